"""``labkit bench``: speeds measured on this machine, in pairs, as ratios with their spread.

    launch        labkit.run against torch.multiprocessing.spawn
    all-reduce    our algorithms against gloo and NCCL; the cost model fitted and compared
    ddp           a step of our DDP, and of PyTorch's on the backend "labkit" and on others
    placement     the cuts of VGG16: hops by placement, and every single cut against the planner
    pipeline      a step of our pipelines, of PyTorch's, and of a split without a pipeline
    checkpoint    for how long a checkpoint stops the training

``turns`` has the rules of timing, ``record`` what is recorded beside the results, ``compare`` the
command ``labkit compare``. ``two_hosts`` and ``elsewhere`` show the records of ``make two-hosts``
and ``make elsewhere``; ``environments`` tells whether Horovod and TensorFlow are here.
"""

import lazy_loader

# Lazy: what compares or reports records must not wait for all that is measured.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"command": ["BENCHES", "main"]}
)
