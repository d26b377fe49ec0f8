"""A tree over ranks in closed form: rank 0 is its root, and each has at most FAN_OUT below it. Pure."""

FAN_OUT = 4


def parent_of(rank: int) -> int:
    return (rank - 1) // FAN_OUT


def children_of(rank: int, size: int) -> range:
    """
    >>> children_of(1, 8)
    range(5, 8)
    """
    return range(min(size, FAN_OUT * rank + 1), min(size, FAN_OUT * rank + FAN_OUT + 1))
