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

    def full_bytes(flats: Iterable[int]) -> int:
        return element_bytes * sum(sizes[flat] for flat in flats)

    def shard_bytes(flats: Iterable[int]) -> int:
        chunk = owned_chunk(rank, world_size)
        total = 0
        for flat in flats:
            start, end = chunk_bounds(sizes[flat], world_size)[chunk]
            total += element_bytes * (end - start)
        return total

    flats = range(len(sizes))
    between_steps = {
        "parameters": shard_bytes(flats) if stage == 3 else full_bytes(flats),
        "gradients": full_bytes(trained) if stage == 1 else shard_bytes(trained),
        "optimizer": states * shard_bytes(trained) + counter_bytes * len(trained),
        "in_flight": 0,
    }
    setups = [between_steps | {"optimizer": 0}]
    backwards = [between_steps]
    if stage == 3:
        for flat in flats:
            ledger = dict(setups[0])
            ledger["parameters"] = shard_bytes(range(flat + 1)) + full_bytes([flat])
            ledger["gradients"] = shard_bytes(number for number in trained if number <= flat)
            setups.append(ledger)
    if stage > 1:
        owned = [[flat for flat in unit if flat in trained] for unit in first_uses(uses)] + [[]]
        trained_units = [unit for unit, flats in enumerate(uses) if set(flats) & set(trained)]
        # Backward goes from the last unit to the first.
        for unit in reversed(range(trained_units[0], len(uses))):
            ledger = dict(between_steps)
            ledger["gradients"] += full_bytes(owned[unit])
            ledger["in_flight"] += full_bytes(owned[unit + 1])
            if stage == 3:
                ledger["parameters"] += full_bytes(set(uses[unit]))
                if unit > trained_units[0]:
                    ledger["in_flight"] += full_bytes(set(uses[unit - 1]) - set(uses[unit]))
            backwards.append(ledger)
    return {
        "setup": max(setups, key=_total),
        "between_steps": between_steps,
        "most": max(backwards, key=_total),
    }


def _total(ledger: dict[str, int]) -> int:
    return sum(ledger.values())
