"""Which ranks each host gets."""

from itertools import pairwise

from labkit.units import format_count


def spread(world_size: int, num_hosts: int) -> list[range]:
    """The ranks of each host, numbered host by host, as evenly as possible: 5 on 2 are 3 and 2.

    Raises:
        ValueError: more hosts than ranks.
    """
    if num_hosts > world_size:
        raise ValueError(
            f"{format_count(num_hosts, 'host')} for {format_count(world_size, 'rank')}: each host "
            f"needs at least one rank, so use hosts={world_size}, or a larger world_size"
        )
    each, more = divmod(world_size, num_hosts)
    starts = [host * each + min(host, more) for host in range(num_hosts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
