"""What the ranks of several hosts tell each other, and the faults that are found from it."""
