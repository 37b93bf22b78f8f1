"""Top-k compression: how many elements of a gradient are sent."""


def kept_elements(num_elements: int) -> int:
    """The k of top-k: 1 % of the elements, rounded down, at least 1 (0 for an empty gradient)."""
    return min(num_elements, max(1, num_elements // 100))
