"""What differs on CUDA: memory inside its kernels, its caching allocator, and what is outside."""
