"""Memory: the bytes that a rank holds, by kind. Compare with what is counted."""

from collections.abc import Iterable, Sequence

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
    """Predicted bytes per kind: the peak at ``setup``, ``between_steps``, the peak in backward.

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
    full_bytes = [element_bytes * size for size in sizes]
    bounds = [chunk_bounds(size, world_size)[owned_chunk(rank, world_size)] for size in sizes]
    shard_bytes = [element_bytes * (end - start) for start, end in bounds]
    between_steps = {
        "parameters": sum(shard_bytes) if stage == 3 else sum(full_bytes),
        "gradients": _sum_of(full_bytes if stage == 1 else shard_bytes, trained),
        "optimizer": states * _sum_of(shard_bytes, trained) + counter_bytes * len(trained),
        "in_flight": 0,
    }
    setups = [between_steps | {"optimizer": 0}]
    if stage == 3:
        ledger = setups[0] | {"parameters": 0, "gradients": 0}
        for flat, flat_bytes in enumerate(full_bytes):
            ledger["parameters"] += shard_bytes[flat]
            if flat in trained:
                ledger["gradients"] += shard_bytes[flat]
            setups.append(ledger | {"parameters": ledger["parameters"] + flat_bytes})
    backwards = [between_steps]
    owned = [set(unit) & set(trained) for unit in first_uses(uses)]
    owned.append(set())
    first = min(unit for unit, used in enumerate(uses) if set(used) & set(trained))
    # Backward goes from the last unit to the first trained one. (Stage 1 keeps all gradients.)
    units = reversed(range(first, len(uses))) if stage > 1 else ()
    for unit in units:
        ledger = dict(between_steps)
        ledger["gradients"] += _sum_of(full_bytes, owned[unit])
        ledger["in_flight"] += _sum_of(full_bytes, owned[unit + 1])
        if stage == 3:
            ledger["parameters"] += _sum_of(full_bytes, set(uses[unit]))
            ahead = set(uses[unit - 1]) if unit > first else set()
            ledger["in_flight"] += _sum_of(full_bytes, ahead - set(uses[unit]))
        backwards.append(ledger)
    setup = max(setups, key=_total)
    return {"setup": setup, "between_steps": between_steps, "most": max(backwards, key=_total)}


def _sum_of(bytes_by_flat: Sequence[int], flats: Iterable[int]) -> int:
    return sum(bytes_by_flat[flat] for flat in flats)


def _total(ledger: dict[str, int]) -> int:
    return sum(ledger.values())
