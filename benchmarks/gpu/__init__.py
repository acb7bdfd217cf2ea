"""The parts of `benchmarks/gpu/run.sh`."""
