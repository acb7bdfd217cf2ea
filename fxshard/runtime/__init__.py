"""Runs programs: the model's own object, its shards, calls, state dicts and checkpoints."""
