"""Training runs: the loop that all techniques share, and the functions that start a run.

train_run      ``train_with`` and ``train_run``: from settings to a result
resolve        data, model, loss and technique, found once; own: the learner's own parts
optimizer      the update: an optimizer whose learning rate follows the run's schedule
loop           the epochs on a rank; evaluation: what each of them reports; logs: where it goes
checkpoint     checkpoint files: written in a thread, found and read again
saving         what a run gives to a checkpoint; resume: whether a run can go on from one
stop           SIGTERM ends the ranks together, with a checkpoint
result         what a run returns; state: how two runs' parameters are compared
measured_link  what a message between this machine's ranks costs
split_run      a few steps of a model in stages, measured
"""
