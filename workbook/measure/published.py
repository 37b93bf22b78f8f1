"""Training runs that others have published, to set beside ``labkit.costs.gpt_step``."""

from typing import Any, NamedTuple

from labkit.costs.gpt_step import GPT, Cluster, Layout, gpt_bytes, gpt_seconds


class PublishedRun(NamedTuple):
    """A run: seconds of a step, where it says so, and what was trained how."""

    name: str
    seconds: float
    source: str
    model: GPT
    batch: int
    cluster: Cluster
    layout: Layout

    @property
    def predicted_s(self) -> float:
        return sum(gpt_seconds(*self[3:]).values())

    @property
    def predicted_bytes(self) -> float:
        return sum(gpt_bytes(*self[3:]).values())

    @property
    def model_flops_share(self) -> float:
        """FLOPs of the model, none of them counted twice, by what the GPUs' peak allows (MFU)."""
        peak = self.cluster.gpus * self.cluster.flops
        return self.model.flops(self.batch) / (peak * self.seconds)


KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198, table 5"
NARAYANAN = "Narayanan et al. 2021, arXiv 2104.04473, table 2"
BLOOM = "BigScience 2022, github.com/bigscience-workshop/bigscience, train/tr11-176B-ml"
FSDP = "Belevich et al. 2022, PyTorch on Medium: a 1 trillion parameter model with FSDP on AWS"
_GPT3, _SHORT = GPT(96, 12288, 96), GPT(96, 12288, 96, length=512, vocabulary=50000)
_PTD = {"sequence_parallel": False, "recompute": "full"}


def _at(teraflops: float, name: str, *run: Any) -> PublishedRun:
    """From teraFLOP/s per GPU, in which a second forward is counted."""
    made = PublishedRun(name, 1.0, *run)
    flops = made.model.flops(made.batch) + made.model.recomputed_flops("full", made.batch)
    return made._replace(seconds=flops / (made.cluster.gpus * teraflops * 1e12))


# On the first one ``Cluster.product_share`` is fitted.
RUNS = [
    PublishedRun(name, step_s, KORTHIKANTI, model, batch, Cluster(gpus), layout)
    for name, step_s, model, batch, gpus, layout in (
        ("175B", 13.75, _GPT3, 64, 64, Layout(tp=8, pp=8, interleave=3)),
        ("22B", 1.10, GPT(48, 6144, 64), 4, 8, Layout(tp=8, micro_batch=4)),
        ("530B", 37.83, GPT(105, 20480, 128), 280, 280, Layout(tp=8, pp=35, interleave=3)),
        ("1T", 71.49, GPT(128, 25600, 160), 512, 512, Layout(tp=8, pp=64)),
    )
]
_BLOOM = GPT(70, 14336, 112, vocabulary=250880), 2048, Cluster(384, between=6.25e9)
RUNS.append(PublishedRun("BLOOM", 105.0, BLOOM, *_BLOOM, Layout(8, 4, 12, 1, 2, **_PTD)))
# How far they interleave is not said: 2 is a guess.
for _gpus, _rate in ((384, 153), (1536, 141)):
    _layout = Layout(_gpus // 96, 8, 12, interleave=2, **_PTD)
    _name = f"175B, dp {_gpus // 96}"
    RUNS.append(_at(_rate, _name, NARAYANAN, _GPT3, 1536, Cluster(_gpus), _layout))
_AWS = Cluster(128, memory_bytes=40e9, between=6.25e9)
_layout = Layout(128, stage=3, micro_batch=20, recompute="full")
RUNS.append(_at(159, "175B, FSDP", FSDP, _SHORT, 128 * 20, _AWS, _layout))
for _gpus, _rate in ((384, 144), (768, 88), (1536, 44)):
    _layout = Layout(_gpus, stage=3, micro_batch=1536 // _gpus, recompute="full")
    _name = f"175B, ZeRO-3 on {_gpus}"
    RUNS.append(_at(_rate, _name, NARAYANAN, _GPT3, 1536, Cluster(_gpus), _layout))
