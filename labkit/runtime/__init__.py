"""Run a function on P processes: launch them, supervise them, gather the results, clean up.

launch        ``labkit.run``: the checks before a run, and its result
supervisor    starts the ranks of a run on this machine, watches them, and ends it completely
preload       the process that ranks are forked from (server: its first import)
worker        the process of a rank, from start to end (prepare: its random numbers)
connect       how a process joins the other ranks and gets its Comm
pickling      functions, arguments and results on their way between processes
messages      what a rank tells its launcher about how it ended
failures      how reports and exit codes become one WorkerError (shortages: out of memory)
output        the ranks' output, as the caller prints it
watch         what shows a run while it lasts
cell_errors   a cell's error without the frames of libraries
torchrun      ``labkit.run`` and scripts in a process that torchrun has started
rounds        which others torchrun has started with it
ray_ranks     ranks on the nodes of a Ray cluster
rank_watch    what watches a run without a launcher (plain: what its ranks tell each other)
agents        several hosts on this machine, each an agent of torchrun (marked: what is left of it)
"""
