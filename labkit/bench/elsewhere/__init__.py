"""The same training run by labkit and by other frameworks, in turns in one run."""
