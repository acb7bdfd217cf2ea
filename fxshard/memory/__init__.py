"""What lives in memory, computed from the program alone."""
