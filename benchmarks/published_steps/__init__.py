"""Published peaks of FSDP2 jobs beside dry runs: `python -m benchmarks.published_steps`."""
