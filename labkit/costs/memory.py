"""Memory: the bytes that a rank holds, by what they are for. Compare with what is counted."""

from collections.abc import Sequence

from labkit.schedules.ring import chunk_bounds, owned_chunk
from labkit.schedules.sharding import Uses, first_uses


def sharded_memory(
    sizes: Sequence[int],
    stage: int,
    world_size: int,
    rank: int = 0,
    *,
    uses: Uses,
    trained: Sequence[int],
    element_bytes: int = 4,
    states: int = 1,
    counter_bytes: int = 0,
) -> dict[str, dict[str, int]]:
    """Bytes by kind: the most at ``setup``, ``between_steps``, the ``most`` in a backward.

    Between steps there are S of parameters, in stage 3 S / P; S of gradients, in stages 2 and 3
    S / P; and states x S / P of the optimizer. At set-up one flat after another
    is cut: in stage 3 it is whole, beside the shards so far. When backward enters unit n, stages 2
    and 3 also hold G(n), and in flight G(n + 1), which is being reduced. Stage 3 also holds W(n),
    and in flight W(n - 1), gathered ahead: two units are whole.

    Args:
        sizes: elements of each flat, of which ranks have parts that differ by at most one.
        uses, trained: by unit, the flats that it uses; and the flats that are trained.
        states: the optimizer's numbers per parameter: SGD's momentum 1, Adam 2.
        counter_bytes: what it keeps beside them for each shard: Adam counts steps, in 4 bytes.
    """

    def whole(some: Sequence[int] | set[int]) -> int:
        return element_bytes * sum(sizes[flat] for flat in some)

    def part(some: Sequence[int]) -> int:
        chunk = owned_chunk(rank, world_size)
        bounds = [chunk_bounds(sizes[flat], world_size)[chunk] for flat in some]
        return element_bytes * sum(end - start for start, end in bounds)

    flats = range(len(sizes))
    rest = {
        "parameters": part(flats) if stage == 3 else whole(flats),
        "gradients": whole(trained) if stage == 1 else part(trained),
        "optimizer": states * part(trained) + counter_bytes * len(trained),
        "in_flight": 0,
    }
    owned = [[flat for flat in some if flat in trained] for some in first_uses(uses)] + [[]]
    first = next(unit for unit, some in enumerate(uses) if {*some} & {*trained})
    moments = [rest]
    for unit in range(len(uses) - 1, first - 1, -1) if stage > 1 else ():
        now = rest | {"gradients": rest["gradients"] + whole(owned[unit])}
        now["in_flight"] += whole(owned[unit + 1])
        if stage == 3:
            here, ahead = {*uses[unit]}, {*uses[unit - 1]} if unit > first else set()
            now["parameters"] += whole(here)
            now["in_flight"] += whole(ahead - here)
        moments.append(now)
    setups = [rest | {"optimizer": 0}]
    for flat in flats if stage == 3 else ():
        now = setups[0] | {"parameters": part(range(flat + 1)) + whole([flat])}
        now["gradients"] = part([number for number in trained if number <= flat])
        setups.append(now)
    setup, most = (max(some, key=lambda now: sum(now.values())) for some in (setups, moments))
    return {"setup": setup, "between_steps": rest, "most": most}
