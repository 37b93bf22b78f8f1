"""``labkit.run(..., hosts=2)``: ranks on other machines, started through a cluster of Ray.

An actor on each chosen node starts that host's ranks, as a launcher does on one machine, and sends
what they say to the driver (the notebook's process), which watches the run as it always does.

- ``spread``: which ranks each host gets
- ``cluster``: the nodes of the cluster and their actors; the only module that imports Ray
- ``host``: the actor
- ``remote_ranks``: in the driver, what stands in for the ranks' processes
- ``meeting_store``: where the ranks of different hosts find each other
- ``sent``: what of the driver's process the ranks need: functions, variables, the folder
"""
