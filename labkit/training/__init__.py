"""Training runs: the loop that all techniques share, and the functions that start a run."""
