"""A training run: the loop that all techniques share, and the run from outside."""
