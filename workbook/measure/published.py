"""Training runs that others have published, to set beside ``labkit.costs.gpt_step``."""

from typing import NamedTuple

from labkit.costs.gpt_step import GPT, Cluster, Layout, gpt_bytes, gpt_seconds


class PublishedRun(NamedTuple):
    """A run: what was trained how, seconds of a step, and where it says so."""

    name: str
    model: GPT
    batch: int
    cluster: Cluster
    layout: Layout
    seconds: float
    source: str

    @property
    def predicted_s(self) -> float:
        return sum(gpt_seconds(*self[1:5]).values())

    @property
    def predicted_bytes(self) -> float:
        return sum(gpt_bytes(*self[1:5]).values())

    @property
    def model_flops_share(self) -> float:
        """FLOPs of the model, none of them counted twice, by what the GPUs' peak allows (MFU)."""
        peak = self.cluster.gpus * self.cluster.flops
        return self.model.flops(self.batch) / (peak * self.seconds)


def _seconds(teraflops: float, model: GPT, batch: int, gpus: int) -> float:
    """Of a step, from FLOPs per second and GPU in which a second forward is counted."""
    flops = model.flops(batch) + model.recomputed_flops("full", batch)
    return flops / (gpus * teraflops * 1e12)


_GPT3, _SHORT = GPT(96, 12288, 96), GPT(96, 12288, 96, length=512, vocabulary=50000)
_PTD = {"sequence_parallel": False, "recompute": "full"}
KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198, table 5"
NARAYANAN = "Narayanan et al. 2021, arXiv 2104.04473, table 2"
BLOOM = "BigScience 2022, github.com/bigscience-workshop/bigscience, train/tr11-176B-ml"
FSDP = "Belevich et al. 2022, PyTorch on Medium: a 1 trillion parameter model with FSDP on AWS"
# On the first one ``Cluster.product_share`` is fitted. Narayanan et al. and Belevich et al. give
# teraFLOP/s per GPU; the former do not say how far they interleave: 2 is a guess.
RUNS = (
    PublishedRun(
        *("175B", _GPT3, 64, Cluster(64), Layout(tp=8, pp=8, interleave=3)),
        *(13.75, KORTHIKANTI),
    ),
    PublishedRun(
        *("22B", GPT(48, 6144, 64), 4, Cluster(8), Layout(tp=8, micro_batch=4)),
        *(1.10, KORTHIKANTI),
    ),
    PublishedRun(
        *("530B", GPT(105, 20480, 128), 280, Cluster(280), Layout(tp=8, pp=35, interleave=3)),
        *(37.83, KORTHIKANTI),
    ),
    PublishedRun(
        *("1T", GPT(128, 25600, 160), 512, Cluster(512), Layout(tp=8, pp=64)),
        *(71.49, KORTHIKANTI),
    ),
    PublishedRun(
        *("BLOOM", GPT(70, 14336, 112, vocabulary=250880), 2048, Cluster(384, between=6.25e9)),
        *(Layout(8, 4, 12, stage=1, micro_batch=2, **_PTD), 105.0, BLOOM),
    ),
    *(
        PublishedRun(
            *(f"175B, dp {gpus // 96}", _GPT3, 1536, Cluster(gpus)),
            *(Layout(gpus // 96, 8, 12, interleave=2, **_PTD),),
            *(_seconds(rate, _GPT3, 1536, gpus), NARAYANAN),
        )
        for gpus, rate in ((384, 153), (1536, 141))
    ),
    PublishedRun(
        *("175B, FSDP", _SHORT, 128 * 20, Cluster(128, memory_bytes=40e9, between=6.25e9)),
        *(Layout(128, stage=3, micro_batch=20, recompute="full"),),
        *(_seconds(159, _SHORT, 128 * 20, 128), FSDP),
    ),
    *(
        PublishedRun(
            *(f"175B, ZeRO-3 on {gpus}", _GPT3, 1536, Cluster(gpus)),
            *(Layout(gpus, stage=3, micro_batch=1536 // gpus, recompute="full"),),
            *(_seconds(rate, _GPT3, 1536, gpus), NARAYANAN),
        )
        for gpus, rate in ((384, 144), (768, 88), (1536, 44))
    ),
)
