"""The demo, ``make demo``: every claim of fxshard, on a real model and real text.

In the order in which things happen:

=========  =====================================================================================
recipe     what is trained: settings, model, optimizer; the same in every process
corpus     the text, and who gets which piece of it
main       the parent process: plans, starts the ranks, proves, sums up
rank       one rank, started by torchrun: trains, beside FSDP2, and saves the checkpoint
claims     what must hold at the end
=========  =====================================================================================
"""
