"""What lives in memory: computed from the program (liveness), measured (tracker), compared."""
