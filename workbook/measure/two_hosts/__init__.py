"""``labkit bench two-hosts``: two hosts on one machine, with a cable of any rate between them.

    hosts      the two hosts: network namespaces that end with the program that made them
    raw_rate   what the cable really carries, in plain TCP
    jobs       ranks on the hosts, started by torchrun; ranks: their program, turns as told
    work       what is trained, and by which contenders; the published figures
    model      the predicted steps and all-reduces
    measure    the measurement; result: its numbers and its record
    table      the tables of a record; figure: its figure

It takes root and Linux; ``make two-hosts`` runs it. A reference project saw four workers on two
hosts train no faster than one worker (speed-ups 1.84, 1.71 and 1.01); this shows why, and what a
hierarchical all-reduce and compression win back.
"""

import lazy_loader

# Lazy: who reads the tables of a record needs no torch, and ranks need no figures.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "figure": ["two_hosts_figure"],
        "hosts": ["ADDRESSES", "NAMES", "TwoHosts", "check_two_hosts"],
        "measure": ["bench_two_hosts"],
        "table": [
            "all_reduce_table",
            "cable_table",
            "real_table",
            "slow_downs",
            "speed_ups",
            "two_hosts_table",
        ],
    },
)
