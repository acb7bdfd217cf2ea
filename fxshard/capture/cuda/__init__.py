"""Planning for CUDA without one: its operators and autocast in place of the CPU's."""
