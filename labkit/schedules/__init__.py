"""Rules that runs execute: which rank does what at which step. No torch, no processes.

    ring               ring all-reduce and its halves: which chunk goes where at each step
    hierarchical       all-reduce over hosts: inside each host, between hosts, inside again
    tree               binomial trees, recursive doubling, pairwise exchange, dissemination
    servers            which worker meets which parameter server in which turn
    staleness          how many updates late a gradient is, and how a server bounds that
    bucket_assignment  which gradients DDP sends together (when: ``strategies.ddp``)
    top_k              how many elements a sparse gradient keeps
    split_points       where a list of layers is cut into stages
    pipeline           GPipe and 1F1B: what each stage runs, and the messages in between
    learning_rate      the learning rate of each update: warm-up, then constant, step or cosine

Each schedule is written once: the real run executes it, the figures draw it, and the tests compare
it with the textbook.
"""

from labkit.units import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
