"""Top-k compression: how many elements of a gradient are sent."""


def kept_elements(num_elements: int) -> int:
    """k: 1 % of the elements, rounded down, but at least one (0 of an empty gradient)."""
    return min(num_elements, max(1, num_elements // 100))
