"""A plan: what a step will do on one rank, known before it runs."""
