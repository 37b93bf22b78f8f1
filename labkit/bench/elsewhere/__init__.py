"""The same training run by labkit and by other frameworks, in turns; each in an environment of its own."""
