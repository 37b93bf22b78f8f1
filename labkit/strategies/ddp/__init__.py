"""Distributed data parallelism: ``naive`` synchronises after backward, ``bucketed`` beside it."""
