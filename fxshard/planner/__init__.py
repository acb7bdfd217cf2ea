"""Searches over plans: what fits a budget, the largest batch, the fastest configuration."""
