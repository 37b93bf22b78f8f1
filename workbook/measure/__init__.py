"""``labkit bench`` and ``labkit compare``: what is measured, recorded, predicted and published.

    bench all-reduce    our algorithms beside gloo and NCCL; the cost model, fitted and compared
    bench ddp           a step of our DDP, and of PyTorch's on the backend "labkit" and on others
    bench pipeline      a step of our pipelines, of PyTorch's, and of a split without a pipeline
    compare             all techniques and PyTorch's, under equal conditions

``turns`` has the rules of timing, ``record`` what stands beside the results. ``failures`` trains
while hosts fail. ``two_hosts`` and ``elsewhere`` show the records of ``make two-hosts`` and ``make
elsewhere``.
"""
