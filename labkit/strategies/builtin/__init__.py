"""PyTorch's own counterparts, by the names of ours, on the same loop, data and batches."""
