"""Answers to every exercise, right ones and wrong ones: a file has those of its set of checks."""
