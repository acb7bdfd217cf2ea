"""A report for people and for other tools: text, JSON, a page, Perfetto, PyTorch's memory_viz."""
