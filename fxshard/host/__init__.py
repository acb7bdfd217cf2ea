"""This machine: atomic writes of files, the garbage collector, and progress on a terminal."""
