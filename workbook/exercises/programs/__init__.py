"""Programs that torchrun runs on the hosts of pages 12 and 13."""
