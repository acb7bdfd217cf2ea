"""From a model to its joint graph, and what the trace must know of the model's own code."""
