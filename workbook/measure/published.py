"""Training runs that others have published, to set beside ``workbook.gpt_step``."""

from dataclasses import dataclass, replace

from workbook.gpt_step import GPT, Cluster, Layout, gpt_bytes, gpt_seconds

KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198, table 5"
NARAYANAN = "Narayanan et al. 2021, arXiv 2104.04473, table 2"
BLOOM = "BigScience 2022, github.com/bigscience-workshop/bigscience, train/tr11-176B-ml"
FSDP = "Belevich et al. 2022, PyTorch on Medium: a 1 trillion parameter model with FSDP on AWS"


@dataclass(frozen=True)
class PublishedRun:
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
        parts_s = gpt_seconds(self.model, self.batch, self.cluster, self.layout)
        return sum(parts_s.values())

    @property
    def predicted_bytes(self) -> float:
        parts_bytes = gpt_bytes(self.model, self.batch, self.cluster, self.layout)
        return sum(parts_bytes.values())

    @property
    def model_flops_share(self) -> float:
        """FLOPs of the model, none of them counted twice, by what the GPUs' peak allows (MFU)."""
        peak = self.cluster.gpus * self.cluster.flops
        return self.model.flops(self.batch) / (peak * self.seconds)

    def at(self, teraflops: float) -> "PublishedRun":
        """The run at this many teraFLOP/s per GPU, in which a second forward is counted."""
        flops = self.model.flops(self.batch) + self.model.recomputed_flops("full", self.batch)
        return replace(self, seconds=flops / (self.cluster.gpus * teraflops * 1e12))


_GPT3 = GPT(96, 12288, 96)
_SHORT = replace(_GPT3, length=512, vocabulary=50000)
_BLOOM = GPT(70, 14336, 112, vocabulary=250880)


_WHOLE = {"sequence_parallel": False, "recompute": "full"}


def _korthikanti(name: str, seconds: float, model: GPT, gpus: int, layout: Layout) -> PublishedRun:
    """A run whose batch has a sequence per GPU, or 4 on the one host."""
    batch = gpus if gpus > 8 else 4
    return PublishedRun(name, seconds, KORTHIKANTI, model, batch, Cluster(gpus), layout)


def _narayanan(name: str, teraflops: float, layout: Layout) -> PublishedRun:
    """A run of GPT-3 on as many GPUs as its layout has."""
    cluster = Cluster(layout.dp * layout.tp * layout.pp)
    return PublishedRun(name, 1.0, NARAYANAN, _GPT3, 1536, cluster, layout).at(teraflops)


_BLOOM_CLUSTER = Cluster(384, between=6.25e9)
_AWS = Cluster(128, memory_bytes=40e9, between=6.25e9)
_FSDP = Layout(128, stage=3, micro_batch=20, recompute="full")
# On the first one ``Cluster.product_share`` is fitted.
RUNS = [
    _korthikanti("175B", 13.75, _GPT3, 64, Layout(tp=8, pp=8, interleave=3)),
    _korthikanti("22B", 1.10, GPT(48, 6144, 64), 8, Layout(tp=8, micro_batch=4)),
    _korthikanti("530B", 37.83, GPT(105, 20480, 128), 280, Layout(tp=8, pp=35, interleave=3)),
    _korthikanti("1T", 71.49, GPT(128, 25600, 160), 512, Layout(tp=8, pp=64)),
    PublishedRun(
        "BLOOM", 105.0, BLOOM, _BLOOM, 2048, _BLOOM_CLUSTER, Layout(8, 4, 12, 1, 2, **_WHOLE)
    ),
    # How far they interleave is not said: 2 is a guess.
    _narayanan("175B, dp 4", 153, Layout(4, 8, 12, interleave=2, **_WHOLE)),
    _narayanan("175B, dp 16", 141, Layout(16, 8, 12, interleave=2, **_WHOLE)),
    PublishedRun("175B, FSDP", 1.0, FSDP, _SHORT, 128 * 20, _AWS, _FSDP).at(159),
    _narayanan("175B, ZeRO-3 on 384", 144, Layout(384, stage=3, micro_batch=4, recompute="full")),
    _narayanan("175B, ZeRO-3 on 768", 88, Layout(768, stage=3, micro_batch=2, recompute="full")),
    _narayanan("175B, ZeRO-3 on 1536", 44, Layout(1536, stage=3, recompute="full")),
]
