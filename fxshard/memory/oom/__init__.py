"""What a snapshot of CUDA's caching allocator means (``torch.cuda.memory._dump_snapshot``)."""
