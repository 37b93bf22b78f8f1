"""``labkit bench`` and ``labkit compare``: what is measured, recorded, predicted and published.

    bench      our all-reduces beside gloo and NCCL; the cost model, fitted and compared
    compare    all techniques and PyTorch's, under equal conditions

``turns`` has the rules of timing, ``record`` what stands beside the results. ``failures`` trains
while hosts fail. ``two_hosts`` and ``elsewhere`` show the records of ``make two-hosts`` and ``make
elsewhere``.
"""
