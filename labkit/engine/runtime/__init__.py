"""Run a function on P processes: launch them, supervise them, gather the results, clean up.

launch        ``labkit.run``: the checks before a run, and its result
supervisor    starts the ranks of a run on this machine, watches them, and ends it completely
preload       the process that ranks are forked from (server: its first import)
worker        the process of a rank: it joins the others, calls the function, reports
messages      what travels between the caller and the ranks
failures      how reports and exit codes become one WorkerError
output        what the caller shows: the ranks' lines, and a live drawing
torchrun      ``labkit.run`` and scripts in a process that torchrun has started
rounds        which others torchrun has started with it
ray_ranks     ranks on the nodes of a Ray cluster
rank_watch    the watch over a run without a launcher (plain: how its ranks' values are written)
agents        several hosts on this machine, each an agent of torchrun
"""
