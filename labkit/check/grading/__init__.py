"""What all checks share: run a learner's function, judge values and traffic, say what is wrong."""
