"""Programs that torchrun runs on the hosts of pages 13 and 14."""
