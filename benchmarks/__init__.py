"""Scripts that measure; each writes what it found to results/."""
