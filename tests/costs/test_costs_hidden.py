"""From how many tokens on communication is hidden: the inequalities, and a step on a cluster."""

import math

import pytest

from labkit.costs import Link, ring_all_reduce_cost, tokens_that_hide
from workbook.gpt_step import GPT, Cluster, Layout, gpt_seconds

WIDTH, RANKS, FLOPS = 512, 4, 1e12
NVLINK = Link(1e-5, 1 / 20e9)


@pytest.mark.parametrize(("technique", "share"), [("ddp", 2 / 3), ("tensor_parallel", 1)])
def test_with_these_tokens_a_block_computes_as_long_as_its_all_reduces_take(technique, share):
    tokens = tokens_that_hide(technique, WIDTH, RANKS, NVLINK, FLOPS)
    count, elements, products = 1, 12 * WIDTH**2, 72 * WIDTH**2
    if technique == "tensor_parallel":
        count, elements, products = 4, tokens * WIDTH, products / RANKS
    ring = ring_all_reduce_cost(RANKS * round(elements / RANKS), 2, RANKS)
    sent_s = count * (ring.messages * NVLINK.alpha_s + ring.num_bytes * NVLINK.beta_s_per_byte)
    assert sent_s == pytest.approx(share * tokens * products / FLOPS, rel=1e-3)


def test_below_a_width_no_number_of_tokens_hides_tensor_parallelism():
    width = (RANKS - 1) * 2 * FLOPS / 20e9 / 9
    assert tokens_that_hide("tensor_parallel", math.floor(width), RANKS, NVLINK, FLOPS) == math.inf
    assert tokens_that_hide("tensor_parallel", math.ceil(width), RANKS, NVLINK, FLOPS) < math.inf


def test_the_calculator_hides_gathered_weights_from_the_same_tokens_on():
    """Of a GPT whose attention and vocabulary hardly count."""
    model = GPT(4, 8192, 64, length=256, vocabulary=1)
    cluster = Cluster(64, gpus_per_host=1)
    link = Link(0, 1 / (cluster.between * cluster.link_share))
    flops_per_s = cluster.flops * cluster.product_share
    tokens = tokens_that_hide("sharded", model.width, 64, link, flops_per_s)
    for factor, hidden in ((0.9, False), (1.1, True)):
        samples = round(factor * tokens / model.length)
        layout = Layout(dp=64, stage=3, micro_batch=samples)
        parts_s = gpt_seconds(model, 64 * samples, cluster, layout)
        assert (parts_s["data"] == 0) == hidden
