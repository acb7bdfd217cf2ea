"""The parameters of a sharded model outside of programs: what they are, reads, unsharding."""
