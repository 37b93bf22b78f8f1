"""Distributed data parallelism: ``naive`` sums after backward, ``bucketed`` overlaps with it."""
