"""Training runs: the loop that all techniques share, and the functions that start a run.

train_run      ``train_with`` and ``train_run``: from settings to a result
together       what the ranks of torchrun agree on before a run
resolve        data, model, loss and technique, found once; own: the learner's own parts
optimizer      the update: an optimizer whose learning rate follows the run's schedule
loop           the epochs on a rank; evaluation: what each of them reports, and where it goes
checkpoint     checkpoint files, written and found again
resume         what a run gives to a checkpoint, and whether another can go on from it
result         what a run returns; state: how two runs' parameters are compared
measured_link  what a message between this machine's ranks costs
split_run      a few steps of a model in stages, measured
"""
