"""PyTorch's counterparts of our techniques, under the same names, in the same training loop."""
