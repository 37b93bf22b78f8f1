"""Memory: the bytes that a rank holds, by what they are for. Compare with what is counted."""


def gpt_activation_bytes(
    samples: int,
    length: int,
    *,
    width: int,
    num_heads: int,
    num_blocks: int,
    vocabulary: int,
    itemsize: int = 4,
) -> int:
    """What a forward of ``workload.transformer.gpt`` with its loss keeps for backward.

    By token, each block keeps 16 D numbers: what enters the two norms (2), the pairs of linear
    layers (2, 1 and 4), attention (queries, keys, values: 3) and GELU (4); then the mean and the
    deviation in each norm, and a number by head, from which attention's weights are made again.

    Source: Korthikanti et al., "Reducing activation recomputation in large transformer models"
    (2022), section 4, where dropout and attention's scores come to that.
    """
    block = 16 * width + 4 + num_heads
    # The last norm, the head, and the probabilities.
    numbers = num_blocks * block + 2 * width + 2 + vocabulary
    tokens_and_targets = 2 * 8
    # The loss also keeps the sum of its weights.
    return samples * length * (itemsize * numbers + tokens_and_targets) + itemsize
