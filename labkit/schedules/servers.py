"""Parameter servers: the turns in which servers meet workers.

In turn t server s meets worker (t + s) mod M, if there is such a worker: each worker meets a
different server, and after M = max(servers, workers) turns every server has met every worker. All
ranks go through the turns in this order, so no cycle of ranks waits for each other.
Servers A and B, workers 0, 1 and 2:

    turn 0    A - 0    B - 1
    turn 1    A - 1    B - 2
    turn 2    A - 2    B - 0
"""


def server_turns(server: int, num_servers: int, num_workers: int) -> list[int]:
    """The workers (0, 1, ...) in the order in which ``server`` meets them: t + server (mod M)."""
    turns = max(num_servers, num_workers)
    workers = [(turn + server) % turns for turn in range(turns)]
    return [worker for worker in workers if worker < num_workers]


def worker_turns(worker: int, num_servers: int, num_workers: int) -> list[int]:
    """The servers in the order in which ``worker`` meets them: worker - t (mod M)."""
    turns = max(num_servers, num_workers)
    servers = [(worker - turn) % turns for turn in range(turns)]
    return [server for server in servers if server < num_servers]
