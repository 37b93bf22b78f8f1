"""The parameter server's turns: which worker a server talks to, and which server a worker."""


def server_turns(server: int, num_servers: int, num_workers: int) -> list[int]:
    """The workers (0, 1, ...) in the order in which server number ``server`` serves them.

    M = max(servers, workers). In turn t server s meets worker (t + s) mod M, if there is one, so
    that each worker meets another server, and after M turns each has met all of them. Servers A
    and B, workers 0, 1 and 2:

        turn 0    A - 0    B - 1
        turn 1    A - 1    B - 2
        turn 2    A - 2    B - 0

    Everyone goes through the turns in this order, so no circle of ranks waits for each other.
    """
    turns = max(num_servers, num_workers)
    workers = ((turn + server) % turns for turn in range(turns))
    return [worker for worker in workers if worker < num_workers]


def worker_turns(worker: int, num_servers: int, num_workers: int) -> list[int]:
    """The other side of ``server_turns``: the servers in the order in which a worker meets them.

    In turn t worker w meets server (w - t) mod M, if there is one.
    """
    turns = max(num_servers, num_workers)
    servers = ((worker - turn) % turns for turn in range(turns))
    return [server for server in servers if server < num_servers]
