"""Running the user's own training code on tensors without data: the memory that it takes."""
