"""What torchrun runs on the hosts of page 12's second half."""
