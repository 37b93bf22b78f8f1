"""Distributed data parallelism: ``naive`` sums after backward, ``bucketed`` beside it."""
