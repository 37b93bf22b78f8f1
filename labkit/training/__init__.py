"""Training runs: the loop that all techniques share, and the functions that start a run.

train_run   ``train_with`` and ``train_run``: from settings to a result
work        data, model and loss, labkit's or the learner's own
resolve     work, optimizer and technique, found once; what cannot run is refused
loop        the epochs on a rank, what each of them reports, and where it goes
checkpoint  what a run gives to a checkpoint, its files, and whether another can go on from it
result      what a run returns; state: how two runs' parameters are compared
measured    what messages between this machine's ranks take, and steps of a model in stages
"""
