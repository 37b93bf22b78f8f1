"""PyTorch's counterparts, under the names of ours, on the same loop, data and batches."""
