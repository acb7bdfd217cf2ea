"""PyTorch's own tests of FSDP, as tests of ours: the same behaviours, in our own code.

A folder per suite, in it a file per file of torch, and `rows.csv`: what became of each method of
torch's suite. `python -m tests.peers` writes docs/peer-tests.md from these.
"""
