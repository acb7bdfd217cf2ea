"""The options of fxshard, checked once, and the environment variables, parsed once."""
