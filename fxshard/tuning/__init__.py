"""The fastest configuration that fits: space, bounds, search, and what came out."""
