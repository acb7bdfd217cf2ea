"""This machine: files that no crash tears, and Python's collector of cycles."""
