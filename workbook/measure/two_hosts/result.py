"""What ``labkit bench two-hosts`` found: repeats by rate and contender, the model, the record."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from labkit.costs.link import Link
from workbook.measure.record import Figures, Result
from workbook.measure.spread import Spread, ratios, rounded
from workbook.measure.two_hosts import model, table, work

# {contender: seconds of each repeat}
Seconds = dict[str, list[float]]
UNLIMITED = "unlimited"


@dataclass(frozen=True)
class Cable:
    """What the cable carried at one rate.

    Attributes:
        raw_bytes_per_s: of one plain TCP connection.
        between, inside: a message over the cable, and inside a host, with four ranks.
        one_host: a message between the two ranks of the job on one host.
    """

    bits_per_s: float | None
    raw_bytes_per_s: float
    between: Link
    inside: Link
    one_host: Link

    def inside_of(self, contender: str) -> Link:
        return self.one_host if work.CONTENDERS[contender].world_size == 2 else self.inside


@dataclass(frozen=True)
class TwoHostsResult(Result):
    """Everything by rate; repeats with the same number were taken together.

    Attributes:
        cables: by rate.
        steps: of the emulated model, by rate.
        local_s: by contender, rank 0's seconds between its messages, by kind.
        real_steps: of ResNet-18, by rate.
        all_reduces: by rate and (ranks per host, way).
    """

    cables: dict[str, Cable]
    steps: dict[str, Seconds]
    local_s: dict[str, dict[str, float]]
    real_steps: dict[str, Seconds] = field(default_factory=dict)
    all_reduces: dict[str, dict[tuple[int, str], list[float]]] = field(default_factory=dict)

    def __str__(self) -> str:
        record = self.record()
        steps, size = table.two_hosts_table(record), f"{work.GRADIENT_BYTES / 1e6:.1f} MB"
        parts = {
            "The cable": table.cable_table(record),
            "Steps, computing asleep: median (quartiles), in turns": steps,
            f"One all-reduce of {size}": table.all_reduce_table(record),
            "A real ResNet-18, whose workers share this machine's cores": table.real_table(record),
        }
        return "\n".join(f"{title}\n\n{part}\n" for title, part in parts.items() if part.rows)

    def record(self) -> dict[str, Any]:
        return {
            "links": [{"rate": rate} | asdict(cable) for rate, cable in self.cables.items()],
            "steps": [row for rate in self.steps for row in self._step_rows(rate)],
            "all_reduces": [row for rate in self.all_reduces for row in self._reduced(rate)],
            "real_steps": [row for rate in self.real_steps for row in self._real_rows(rate)],
        }

    def figures(self) -> Figures:
        from workbook.measure.two_hosts.figure import two_hosts_figure

        return {"steps": two_hosts_figure(self.record())}

    def model_s(self, rate: str, contender: str) -> float:
        """The predicted step of a contender at a rate."""
        like = contender if work.CONTENDERS[contender].strategy != "ddp" else work.FLAT
        cable = self.cables[rate]
        links = cable.inside_of(contender), cable.between
        return model.step_s(contender, self.local_s[like], *links)

    def _step_rows(self, rate: str) -> Iterable[dict[str, Any]]:
        alone_s = self.model_s(rate, work.ALONE)
        for name, row in _rows(rate, self.steps[rate], work.BATCHES):
            model_s = self.model_s(rate, name)
            row |= {"local_s": self.local_s.get(name), "model_s": model_s}
            row["model_speed_up"] = alone_s / model_s * work.share(name)
            if unlimited := self.steps.get(UNLIMITED):
                times = ratios(self.steps[rate][name], unlimited[name])
                row["slow_down"] = asdict(Spread.of(times))
                row["model_slow_down"] = model_s / self.model_s(UNLIMITED, name)
            if published := work.published_speed_ups(name):
                row["published_speed_up"] = published
            yield row

    def _real_rows(self, rate: str) -> Iterable[dict[str, Any]]:
        yield from (row for _, row in _rows(rate, self.real_steps[rate], work.REAL_BATCHES))

    def _reduced(self, rate: str) -> Iterable[dict[str, Any]]:
        found, cable = self.all_reduces[rate], self.cables[rate]
        for (per_host, name), seconds in found.items():
            ways = work.FLAT, name
            ring_s, model_s = (
                model.all_reduce_s(way, 2 * per_host, cable.inside, cable.between) for way in ways
            )
            times = ratios(found[per_host, work.FLAT], seconds)
            yield {
                "rate": rate,
                "contender": name,
                "workers": 2 * per_host,
                "hosts": 2,
                "num_bytes": work.GRADIENT_BYTES,
                "seconds": rounded(seconds),
                "time_s": asdict(Spread.of(seconds)),
                "model_s": model_s,
                "times_ring": asdict(Spread.of(times)),
                "model_times_ring": ring_s / model_s,
            }


def _rows(
    rate: str, steps: Seconds, batches: Mapping[int, int]
) -> Iterable[tuple[str, dict[str, Any]]]:
    """(contender, row) with what is measured."""
    for name, seconds in steps.items():
        workers = work.CONTENDERS[name].world_size
        samples = workers * batches[workers]
        faster = ratios(steps[work.ALONE], seconds)
        speed_up = Spread.of([samples / batches[1] * one for one in faster])
        row = {
            "rate": rate,
            "contender": name,
            "workers": workers,
            "hosts": max(1, workers // 2),
            "samples": samples,
            "seconds": rounded(seconds),
            "step_s": asdict(Spread.of(seconds)),
            "speed_up": asdict(speed_up),
            "efficiency": speed_up.median / workers,
        }
        yield name, row


def medians(repeats: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The median of each kind of time."""
    rows = list(repeats)
    return {kind: statistics.median(row.get(kind, 0.0) for row in rows) for kind in work.LOCAL}
