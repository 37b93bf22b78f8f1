"""Run a function on P processes: launch them, supervise them, gather the results, clean up.

launch        ``labkit.run``: the checks before a run, and its result
supervisor    watches a run, and ends it completely
start_ranks   starts the ranks' processes, with PyTorch's elastic agent
worker        the process of a rank, from start to end
prepare       a rank's random numbers, variables, and missing keyboard
connect       how a process joins the other ranks and gets its Comm
torchrun      ``labkit.run`` in a process that torchrun has started (rounds: with which others)
script        the same for a script, whose library has a thread that talks to other ranks
pickling      functions, arguments and results on their way between processes
messages      what a rank and its launcher tell each other
limits        what limited a run, in words: rank_states says what each rank did when
chrome_trace  reads traces from files, ours and PyTorch's
failures      how reports and exit codes become one WorkerError
cell_errors   a cell's error on one screen
output        the ranks' output, as the caller prints it (screen: lines that are overwritten;
              objects: what ranks display)
displays      ``display`` and pyplot in a rank (figures: pyplot's backend)
watch         what shows a run while it lasts
nvidia_smi    what nvidia-smi says of driver and cards (gpu_links: who reaches whom; gpu_checks:
              what the doctor says of it)
agents        several hosts on this machine, each an agent of torchrun (marked: what is left of it)
forkserver    the process that ranks are forked from; preload, preload_first and
              preload_last have what it imports
"""
