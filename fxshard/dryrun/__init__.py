"""The user's own training code on tensors without data, for the memory that it takes."""
