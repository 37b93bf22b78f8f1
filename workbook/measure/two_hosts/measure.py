"""Take the measurement: jobs of one, two, four and eight ranks take turns at every rate."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

from labkit.costs.link import Link, fit_link
from labkit.errors import WorkerError
from labkit.units import check_integer
from workbook.measure.two_hosts import work
from workbook.measure.two_hosts.hosts import TwoHosts, check_two_hosts
from workbook.measure.two_hosts.jobs import Job
from workbook.measure.two_hosts.raw_rate import raw_bytes_per_s
from workbook.measure.two_hosts.result import UNLIMITED, Cable, Seconds, TwoHostsResult, medians

RATES: dict[str, float | None] = {UNLIMITED: None, "10 Gb/s": 10e9, "1 Gb/s": 1e9}
# Up to the largest that is sent. Smaller ones would find tokens for all of their bytes.
_MESSAGE_BYTES = (2**20, 2**22, work.GRADIENT_BYTES // 16 * 4, work.GRADIENT_BYTES // 8 * 4)
_MESSAGE_REPEATS = 5
_REAL = (work.ALONE, work.ONE_HOST, work.FLAT, work.HIERARCHICAL)
_REAL_RATES = (UNLIMITED, "1 Gb/s")
_REAL_REPEATS = 3
# Eight ranks share this machine's cores: only where the cable is slow do they wait for it.
_RATES_OF_EIGHT = ("1 Gb/s",)
_WAYS = (work.FLAT, work.HIERARCHICAL, work.DEALT_OUT)
# TCP carries headers, too, and a bucket is full at the start.
_MOST_OVER_RATE = 1.1


def bench_two_hosts(repeats: int = 5) -> Iterator[TwoHostsResult]:
    """Train on one host and on two, at several rates, and compare with the model.

    Args:
        repeats: turns of each contender at each rate.

    Raises:
        ValueError: no repeats; not root, or something that two hosts need is missing here.
        WorkerError: the ranks failed.
    """
    check_integer("repeats", repeats)
    check_two_hosts()
    return _results(repeats)


def _results(repeats: int) -> Iterator[TwoHostsResult]:
    with TwoHosts() as hosts:
        yield measure(hosts, repeats)


def measure(
    hosts: TwoHosts,
    repeats: int,
    rates: Mapping[str, float | None] = RATES,
    contenders: Sequence[str] = tuple(work.CONTENDERS),
) -> TwoHostsResult:
    """The whole measurement, on these hosts."""
    with ExitStack() as stack:
        jobs = {ranks: stack.enter_context(_job(hosts, ranks)) for ranks in (1, 2, 4)}
        for job in jobs.values():
            job.wait_until_ready()
        turns = Turns(hosts, jobs, rates)
        cables = {rate: turns.cable(rate) for rate in rates}
        steps, local_s = turns.steps(contenders, repeats)
        real = [rate for rate in rates if rate in _REAL_RATES]
        real_steps = turns.real_steps(real, min(repeats, _REAL_REPEATS))
        all_reduces = turns.all_reduces(4, repeats)
    slow = {rate: rates[rate] for rate in rates if rate in _RATES_OF_EIGHT}
    with _job(hosts, 8) as job:
        job.wait_until_ready()
        for rate, found in Turns(hosts, {8: job}, slow).all_reduces(8, repeats).items():
            all_reduces[rate] |= found
    return TwoHostsResult(cables, steps, local_s, real_steps, all_reduces)


def _job(hosts: TwoHosts, ranks: int) -> Job:
    num_hosts = 1 if ranks <= 2 else 2
    return Job(hosts, num_hosts, ranks // num_hosts, number=ranks)


class Turns:
    """The turns of some jobs at several rates."""

    def __init__(
        self, hosts: TwoHosts, jobs: Mapping[int, Job], rates: Mapping[str, float | None]
    ):
        self.hosts, self.jobs, self.rates = hosts, jobs, rates

    def cable(self, rate: str) -> Cable:
        """What the cable carries at this rate.

        Raises:
            WorkerError: more than the rate: nothing limits it.
        """
        bits_per_s = self.rates[rate]
        self.hosts.set_rate(bits_per_s)
        raw = raw_bytes_per_s(self.hosts)
        if bits_per_s is not None and 8 * raw > _MOST_OVER_RATE * bits_per_s:
            raise WorkerError(
                f"the cable carries {8 * raw / 1e9:.3g} Gb/s at a limit of {rate}: this kernel's "
                "token bucket filter does not limit it"
            )
        links = self._link(4, "message"), self._link(4, "inside"), self._link(2, "message")
        return Cable(bits_per_s, raw, *links)

    def _link(self, ranks: int, kind: str) -> Link:
        """Messages of one kind between the ranks of a job, and additions, on all of them."""
        gamma = self._fit(ranks, "add").beta_s_per_byte
        found = self._fit(ranks, kind)
        return Link(found.alpha_s, found.beta_s_per_byte, gamma)

    def _fit(self, ranks: int, kind: str) -> Link:
        sizes = [size for size in _MESSAGE_BYTES for _ in range(_MESSAGE_REPEATS)]
        for size in _MESSAGE_BYTES:
            self.jobs[ranks].turn(f"{kind} {size}")
        seconds = [self.jobs[ranks].turn(f"{kind} {size}")["seconds"] for size in sizes]
        return fit_link(sizes, seconds)

    def steps(
        self, contenders: Sequence[str], repeats: int
    ) -> tuple[dict[str, Seconds], dict[str, dict[str, float]]]:
        """Seconds by rate and contender, and what each contender does between its messages."""
        spent = defaultdict(list)
        found = {rate: defaultdict(list) for rate in self.rates}
        for rate, name, is_counted in _in_turns(list(self.rates), contenders, repeats):
            answer = self._turn(rate, work.CONTENDERS[name].world_size, f"train {name}")
            if is_counted:
                found[rate][name].append(answer["seconds"])
                if rate == next(iter(self.rates)):
                    spent[name].append(answer["spent_s"])
        return _plain(found), {name: medians(rows) for name, rows in spent.items()}

    def real_steps(self, rates: Sequence[str], repeats: int) -> dict[str, Seconds]:
        """Seconds of ResNet-18 by rate and contender."""
        found = {rate: defaultdict(list) for rate in rates}
        for rate, name, is_counted in _in_turns(rates, _REAL, repeats):
            answer = self._turn(rate, work.CONTENDERS[name].world_size, f"resnet18 {name}")
            if is_counted:
                found[rate][name].append(answer["seconds"])
        return _plain(found)

    def all_reduces(
        self, ranks: int, repeats: int
    ) -> dict[str, dict[tuple[int, str], list[float]]]:
        """Seconds of one large all-reduce, by rate and (ranks per host, way)."""
        found = {rate: defaultdict(list) for rate in self.rates}
        for rate, name, is_counted in _in_turns(list(self.rates), _WAYS, repeats):
            answer = self._turn(rate, ranks, f"all-reduce {name}")
            if is_counted:
                found[rate][ranks // 2, name].append(answer["seconds"])
        return _plain(found)

    def _turn(self, rate: str, ranks: int, words: str) -> dict:
        self.hosts.set_rate(self.rates[rate])
        return self.jobs[ranks].turn(words)


def _in_turns(
    rates: Sequence[str], names: Sequence[str], repeats: int
) -> Iterator[tuple[str, str, bool]]:
    """(rate, contender, whether it counts): a first round that does not, then the repeats.

    Each repeat begins with another rate and another contender.
    """
    for repeat in range(-1, repeats):
        for rate in _rotated(rates, repeat):
            for name in _rotated(names, repeat):
                yield rate, name, repeat >= 0


def _rotated(names: Sequence[str], by: int) -> list[str]:
    first = by % len(names)
    return [*names[first:], *names[:first]]


def _plain(found: Mapping) -> dict:
    return {rate: dict(by_name) for rate, by_name in found.items()}
