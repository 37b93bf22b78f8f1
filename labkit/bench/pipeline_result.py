"""What ``labkit bench pipeline`` found for one model: its table, its duels and its record."""

from dataclasses import asdict, dataclass

from labkit.bench.record import Result
from labkit.bench.spread import Spread, ratios, rounded, step_record, table
from labkit.units import format_count, format_number, format_seconds

MICRO_BATCHES = 4
OURS, OURS_1F1B = "labkit gpipe", "labkit 1f1b"
UNPIPELINED, ONE_DEVICE = "labkit split, not pipelined", "one device, all cores"
# By schedule, ours and PyTorch's.
DUELS = {
    schedule: (f"labkit {schedule} on gloo", f"torch {schedule} on gloo")
    for schedule in ("gpipe", "1f1b")
}


@dataclass(frozen=True)
class PipelineResult(Result):
    """One model, cut evenly, under every contender.

    Attributes:
        seconds: by contender, of each step, from the last rank's start to the last rank's end.
        difference: by contender, the largest relative difference of its parameters from those of
            our GPipe after some steps; None for one device, which rank 0 alone trains.
        duels: by schedule, the seconds of the two in ``DUELS``, which took turns alone.
    """

    model: str
    world_size: int
    split_points: tuple[int, ...]
    batch_size: int
    seconds: dict[str, list[float]]
    difference: dict[str, float | None]
    duels: dict[str, dict[str, list[float]]]

    def times_torch(self, schedule: str) -> list[float]:
        """Our step / PyTorch's on the same transport, pair by pair: above 1 PyTorch is faster."""
        return ratios(*(self.duels[schedule][name] for name in DUELS[schedule]))

    def against(self, other: str, ours: str) -> list[float]:
        """The other's step / ours, repeat by repeat: above 1 ours is faster."""
        return ratios(self.seconds[other], self.seconds[ours])

    def __str__(self) -> str:
        steps = format_count(len(self.seconds[OURS]), "step")
        title = (
            f"Step of {self.model} in {self.world_size} stages, cut at "
            f"{', '.join(map(str, self.split_points))}: batch of {self.batch_size} in "
            f"{MICRO_BATCHES} micro-batches,\nmedian of {steps} (quartiles), in turns"
        )
        rows = [
            [
                name,
                Spread.of(seconds).text(format_seconds),
                Spread.of(self.against(name, OURS)).text(format_number),
                "" if (difference := self.difference[name]) is None else f"{difference:.1g}",
            ]
            for name, seconds in self.seconds.items()
        ]
        columns = table(["", "step", f"/ {OURS}", "difference"], rows)
        return f"{title}\n\n{columns}\n\n{self._duels_text()}\n"

    def _duels_text(self) -> str:
        found = {schedule: self.times_torch(schedule) for schedule in self.duels}
        return "\n".join(
            f"{' / '.join(DUELS[schedule])}: {Spread.of(pairs).text('{:.3f}'.format)}, "
            f"{format_count(len(pairs), 'pair')}"
            for schedule, pairs in found.items()
        )

    def record(self) -> dict[str, list[dict]]:
        """``rows``, one per contender, and ``duels``, one per schedule."""
        common = {
            "model": self.model,
            "world_size": self.world_size,
            "split_points": list(self.split_points),
            "batch_size": self.batch_size,
            "micro_batches": MICRO_BATCHES,
        }
        rows = [
            {
                **common,
                "contender": name,
                **step_record(seconds, {OURS: self.against(name, OURS)}),
                "difference": self.difference[name],
            }
            for name, seconds in self.seconds.items()
        ]
        duels = [
            {
                **common,
                "schedule": schedule,
                "seconds": {name: rounded(seconds) for name, seconds in pair.items()},
                "labkit_to_torch": asdict(Spread.of(self.times_torch(schedule))),
            }
            for schedule, pair in self.duels.items()
        ]
        return {"rows": rows, "duels": duels}
