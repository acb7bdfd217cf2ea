"""From a schedule to Python source, and compiled regions."""
