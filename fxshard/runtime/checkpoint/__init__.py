"""Checkpoints: written by all ranks, in a thread too, and read again on any number of ranks."""
