"""Right and wrong answers to every exercise, one file per set of checks."""
