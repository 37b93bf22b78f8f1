"""A training step of a GPT on a cluster, on paper: bytes per GPU and seconds, under a layout.

Symbols: L blocks, D width, T positions, V entries in the vocabulary, b samples per micro-batch, m
micro-batches per replica; t, p, d GPUs for tensor, pipeline and data parallelism. Numbers on the
wire and in products have 2 bytes.
Sources: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
Megatron-LM" (2021), sections 2.2, 3.2 and 5.1, for parameters, FLOPs and the bubble; Korthikanti
et al., "Reducing activation recomputation in large transformer models" (2022), section 4, for
activations; Rajbhandari et al., "ZeRO" (2020), sections 3 and 7, for sharding.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.units import check_choice, check_integer

RECOMPUTE = ("none", "selective", "full")
# Bytes per parameter of 16-bit mixed-precision Adam; its state is a 32-bit copy and two moments.
_WEIGHT = 2
_GRADIENT = 2
_OPTIMIZER = 12


@dataclass(frozen=True)
class GPT:
    """The size of a decoder-only transformer."""

    layers: int
    width: int
    heads: int
    length: int = 2048
    vocabulary: int = 51200

    @property
    def block_parameters(self) -> int:
        return 12 * self.width**2 + 13 * self.width

    @property
    def embedding_parameters(self) -> int:
        return (self.vocabulary + self.length) * self.width

    @property
    def parameters(self) -> int:
        """12 L D^2 (1 + 13 / 12D + (V + T) / 12LD); the head's matrix is the embedding's."""
        return self.layers * self.block_parameters + self.embedding_parameters

    def flops(self, samples: int = 1) -> float:
        """FLOPs of the products in a step, 72 B T L D^2 (1 + T / 6D + V / 12LD)."""
        return 3 * samples * (self._blocks_flops + 2 * self.length * self.width * self.vocabulary)

    def recomputed_flops(self, recompute: str, samples: int = 1) -> float:
        """FLOPs that backward computes again: all blocks' forwards, or attention's products."""
        if recompute == "none":
            return 0
        if recompute == "selective":
            return samples * 4 * self.layers * self.length**2 * self.width
        return samples * self._blocks_flops

    @property
    def _blocks_flops(self) -> float:
        return 4 * self.layers * self.length * self.width * (6 * self.width + self.length)


@dataclass(frozen=True)
class Cluster:
    """GPUs, their links, and how much of a peak a real run gets.

    Attributes:
        flops, memory_bytes: of one GPU; the peak of its 16-bit products.
        inside, between: bytes per second of a GPU, in one direction: over its links to those of
            its host, and over its part of the host's network cards.
        product_share: of ``flops``, in the products of a transformer; the one fitted constant.
        link_share: of ``inside`` and ``between``, in a collective of large messages; assumed.
    """

    gpus: int
    gpus_per_host: int = 8
    flops: float = 312e12
    memory_bytes: float = 80e9
    inside: float = 300e9
    between: float = 25e9
    product_share: float = 0.6
    link_share: float = 0.7

    def ring_pass_seconds(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Share-reduce, or share-only, of S bytes over every ``stride``-th GPU.

        Inside a host each GPU passes on (P - 1) / P x S; between hosts its members share cards.
        """
        members = max(1, min(ranks, self.gpus_per_host // stride))
        hosts = math.ceil(ranks / members)
        inside_s = (members - 1) / members * num_bytes / self.inside
        between_s = (hosts - 1) / hosts * num_bytes / members / self.between
        return max(inside_s, between_s) / self.link_share

    def hop_seconds(self, num_bytes: float, stride: int) -> float:
        """A message to the GPU that is ``stride`` further on."""
        rate = self.inside if 2 * stride <= self.gpus_per_host else self.between
        return num_bytes / (rate * self.link_share)


@dataclass(frozen=True)
class Layout:
    """A division of a step: GPUs are numbered by tensor rank, then replica, then stage.

    Attributes:
        dp, tp, pp: d replicas, each of t x p GPUs.
        stage: of ZeRO; 1 shards optimizer state over the replicas, 2 gradients too, 3 all.
        micro_batch: b.
        interleave: parts of the model that each pipeline stage has.
        sequence_parallel: what lies between tensor-parallel layers is cut by position.
        recompute: the part that backward computes again, ``none``, ``selective`` (attention's
            scores, as in flash attention) or ``full`` (all of each block).
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    stage: int = 0
    micro_batch: int = 1
    interleave: int = 1
    sequence_parallel: bool = True
    recompute: str = "selective"

    def __post_init__(self) -> None:
        check_choice("recompute", self.recompute, RECOMPUTE)
        check_integer("stage", self.stage, least=0, most=3)
        for name in ("dp", "tp", "pp", "micro_batch", "interleave"):
            check_integer(name, getattr(self, name))

    def __str__(self) -> str:
        sides = f"dp {self.dp} x tp {self.tp} x pp {self.pp}"
        return f"{sides}, stage {self.stage}, micro-batch {self.micro_batch}"

    def micro_batches(self, model: GPT, batch: int, cluster: Cluster) -> int:
        """m; ValueError for a layout that does not divide the model, the batch or the cluster."""
        used = self.dp * self.tp * self.pp
        if used != cluster.gpus:
            raise ValueError(
                f"dp x tp x pp is {self.dp} x {self.tp} x {self.pp} = {used} GPUs, "
                f"the cluster has {cluster.gpus}"
            )
        m, rest = divmod(batch, self.dp * self.micro_batch)
        if rest:
            raise ValueError(
                f"a batch of {batch} is not divisible by dp x micro_batch = "
                f"{self.dp} x {self.micro_batch}"
            )
        if model.heads % self.tp:
            raise ValueError(f"{model.heads} heads are not divisible by tp = {self.tp}")
        if self.pp * self.interleave > model.layers:
            raise ValueError(
                f"{model.layers} blocks cannot be cut into {self.pp * self.interleave} parts"
            )
        if self.interleave > 1 and (self.pp == 1 or m % self.pp):
            raise ValueError(
                f"interleaved stages need several stages, and {m} micro-batches to be a multiple "
                f"of pp = {self.pp}"
            )
        return m


def gpt_bytes(model: GPT, batch: int, cluster: Cluster, layout: Layout) -> dict[str, float]:
    """Bytes on the GPU that holds most, in the first stage, by what they are for.

    Left out: what a framework itself takes, buffers of messages, fragmentation: 5 to 10 GB.
    """
    micro_batches = layout.micro_batches(model, batch, cluster)
    tp, pp = layout.tp, layout.pp
    blocks = math.ceil(model.layers / pp)
    owned = (blocks * model.block_parameters + model.embedding_parameters) / tp
    shard = owned / layout.dp
    # Bytes per token and D that a block keeps for its backward.
    scores = 0 if layout.recompute == "selective" else 5 * model.heads * model.length / model.width
    block = (34 + scores) / tp
    if not layout.sequence_parallel:
        # Tensor parallelism does not cut this part.
        block += 10 - 10 / tp
    kept = block
    recomputed = 0.0
    if layout.recompute == "full":
        kept = 2 / tp if layout.sequence_parallel else 2.0
        recomputed = block
    # 1F1B: the first stage holds p micro-batches, and with interleaving some parts of more.
    held = float(min(micro_batches, pp))
    if layout.interleave > 1:
        held *= 1 + (pp - 1) / (pp * layout.interleave)
    tokens = layout.micro_batch * model.length
    weights = gradients = states = owned
    if layout.stage >= 1:
        states = shard
    if layout.stage >= 2:
        gradients = shard
    if layout.stage == 3:
        weights = shard
    return {
        "parameters": _WEIGHT * weights,
        "gradients": _GRADIENT * gradients,
        "optimizer": _OPTIMIZER * states,
        "activations": tokens * model.width * (held * blocks * kept + recomputed),
    }


def gpt_seconds(model: GPT, batch: int, cluster: Cluster, layout: Layout) -> dict[str, float]:
    """Seconds of a step by what they go to; their sum is the step.

    ``compute``: products and what is computed again. ``tensor``: all-reduces in the blocks (two
    forward, two backward, two more where all is computed again), which nothing hides.
    ``hops``: messages between stages. ``bubble``: (p - 1) / v of a micro-batch's time.
    ``data``: the part of the gradients' all-reduce that backward of the last micro-batch does not
    hide; in stage 3 the part of two all-gathers of parameters and of the reduce-scatter of
    gradients that no micro-batch hides.
    """
    micro_batches = layout.micro_batches(model, batch, cluster)
    tp, pp = layout.tp, layout.pp
    flops = model.flops(layout.micro_batch)
    flops += model.recomputed_flops(layout.recompute, layout.micro_batch)
    compute_s = flops / (tp * pp) / (cluster.flops * cluster.product_share)
    activation_bytes = 2 * layout.micro_batch * model.length * model.width
    all_reduces = (6 if layout.recompute == "full" else 4) * model.layers / pp
    tensor_s = 2 * all_reduces * cluster.ring_pass_seconds(activation_bytes, tp)
    hop_s = cluster.hop_seconds(activation_bytes / tp, tp * layout.dp)
    hops_s = 2 * layout.interleave * hop_s if pp > 1 else 0.0
    weight_bytes = _WEIGHT * model.parameters / (tp * pp)
    pass_s = cluster.ring_pass_seconds(weight_bytes, layout.dp, tp)
    data_s = max(0.0, 2 * pass_s - 2 / 3 * compute_s)
    if layout.stage == 3:
        data_s = micro_batches * max(0.0, 3 * pass_s - compute_s)
    elif layout.stage == 2:  # gradients are reduced after each micro-batch
        data_s += (micro_batches - 1) * max(0.0, pass_s - 2 / 3 * compute_s)
    return {
        "compute": micro_batches * compute_s,
        "tensor": micro_batches * tensor_s,
        "hops": micro_batches * hops_s,
        "bubble": (pp - 1) / layout.interleave * (compute_s + tensor_s + hops_s),
        "data": data_s,
    }


def layouts(
    model: GPT, batch: int, cluster: Cluster, recompute: str = "selective"
) -> Iterator[Layout]:
    """All layouts that divide the model, the batch and the cluster, with tp inside a host.

    Without pipeline of every ZeRO stage, with one of stages 0 and 1; b is a power of two.
    """
    tensor_sides = [2**n for n in range(cluster.gpus_per_host.bit_length())]
    for tp in tensor_sides:
        for pp in range(1, cluster.gpus // tp + 1):
            dp, rest = divmod(cluster.gpus, tp * pp)
            if rest:
                continue
            stages = (0, 1, 2, 3) if pp == 1 else (0, 1)
            for stage, micro_batch in itertools.product(stages, (1, 2, 4, 8, 16)):
                layout = Layout(dp, tp, pp, stage, micro_batch, recompute=recompute)
                try:
                    layout.micro_batches(model, batch, cluster)
                except ValueError:
                    continue
                if stage == 0 or dp > 1:
                    yield layout
