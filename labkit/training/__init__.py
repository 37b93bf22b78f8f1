"""Training runs: the loop that all techniques share, and the functions that start a run.

train_run      ``train_with`` and ``train_run``: from settings to a result
own            the learner's own model, data set, loss and optimizer; check_work tries them first
work           what a run trains: model, data, loss
optimizer      the update: an optimizer whose learning rate follows the run's schedule
checkpoint     checkpoint files: written in the background, verified, read again
make_strategy  the technique that the settings name
loop           the epochs on a rank; evaluation: what each of them reports
result         what a run returns; state: how two runs' parameters are compared
measured_link  what a message between this machine's ranks costs
split_run      a few steps of a model in stages, measured
"""
