"""``labkit bench``: speeds measured on this machine, in pairs, as ratios with their spread.

    all-reduce    our algorithms against gloo and NCCL; the cost model fitted and compared
    ddp           a step of our DDP, and of PyTorch's on the backend "labkit" and on others
    sharded       a step of our stages, of PyTorch's, and of DDP; tensor-parallel likewise
    placement     the hops of VGG16's placements beside the model
    pipeline      a step of our pipelines, of PyTorch's, and of a split without a pipeline

``turns`` has the rules of timing, ``record`` what is recorded beside the results, ``compare`` the
command ``labkit compare``. ``two_hosts`` and ``elsewhere`` show the records of ``make two-hosts``
and ``make elsewhere``; ``environments`` tells whether Horovod and TensorFlow are here.
"""
