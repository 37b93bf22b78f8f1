"""How many elements a sparse gradient keeps."""


def kept_elements(num_elements: int) -> int:
    """k: 1 % of the elements, rounded down, but one at least (of none, none)."""
    return min(num_elements, max(1, num_elements // 100))
