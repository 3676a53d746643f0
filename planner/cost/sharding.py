"""Along which dim fully_shard divides a parameter, the padding that this needs, and the rows that each rank keeps."""

import math

MOST_PADDING = 0.1
"""Share of a parameter that may be padding; beyond it the parameter is divided along another dim. Along dim 0 torch
pads to a multiple of the degree. Along other dims it can only divide evenly, and copies what it gathers and reduces
once more."""


def shard_dim(shape: tuple[int, ...], degree: int) -> int:
    """The dim along which a parameter of this shape (on one tensor rank) is divided over `degree` ranks.

    It is dim 0, unless that needs more padding than MOST_PADDING and another dim divides evenly. Otherwise 8 experts or
    one class token on 64 ranks would be held, gathered and reduced as if they were 64.
    """
    if not shape or _padded(shape[0], degree) <= (1 + MOST_PADDING) * shape[0]:
        return 0
    return next((dim for dim, size in enumerate(shape) if size and size % degree == 0), 0)


def padded_elements(shape: tuple[int, ...], degree: int) -> int:
    """Elements of a parameter, with the padding that lets `degree` ranks hold equal shards. A parameter without dims is
    sharded like a tensor of one element."""
    if degree == 1:
        return math.prod(shape)
    shape = shape or (1,)
    dim = shard_dim(shape, degree)
    return math.prod((*shape[:dim], _padded(shape[dim], degree), *shape[dim + 1 :]))


def _padded(size: int, degree: int) -> int:
    return -(-size // degree) * degree


def kept_rows(shape: tuple[int, ...], num_shards: int, rank: int) -> range:
    """The rows of a parameter that fully_shard leaves on one rank: those that torch.chunk gives it, fewer or none on
    the last ranks; all rows if another dim is divided.

    shape: that of the parameter on one tensor rank.
    """
    if shard_dim(shape, num_shards) != 0:
        return range(shape[0])
    size = -(-shape[0] // num_shards)
    return range(shape[0])[rank * size : (rank + 1) * size]
