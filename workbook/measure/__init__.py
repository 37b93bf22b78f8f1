"""``labkit bench``: speeds measured on this machine, in pairs, as ratios with their spread.

    launch        labkit.run against torch.multiprocessing.spawn
    all-reduce    our algorithms against gloo and NCCL; the cost model fitted and compared
    ddp           a step of our DDP, and of PyTorch's on the backend "labkit" and on others
    placement     the cuts of VGG16: hops by placement, and every single cut against the planner
    pipeline      a step of our pipelines, of PyTorch's, and of a split without a pipeline
    checkpoint    for how long a checkpoint stops the training

``make two-hosts``, ``make elsewhere`` and ``make gpu-report`` run the scripts of these names in
tools/; ``two_hosts`` and ``elsewhere`` show their records. ``turns`` has the rules of timing,
``record`` what is recorded beside the results, ``compare`` the command ``labkit compare``.
``python tools/bench_mpi.py`` is the all-reduce bench with MPI as an additional contender.
"""

import lazy_loader

# Lazy: what compares or reports records must not wait for all that is measured.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"command": ["BENCHES", "main"]}
)
