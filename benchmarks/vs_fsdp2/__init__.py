"""The parts of `benchmarks/memory_vs_fsdp2.py`."""
