"""Programs that torchrun runs on the hosts of pages 14 and 15."""
