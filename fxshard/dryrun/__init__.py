"""Running the user's own training code on tensors without data, to know the memory that it takes."""
