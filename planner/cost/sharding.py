"""Along which dim fully_shard divides a parameter, the padding that comes with it, and the rows that a rank keeps."""

import math

MOST_PADDING = 0.1
"""Share of a parameter that may be padding before it is divided along another dim. Along dim 0 torch pads to a multiple
of the degree, along other dims it divides evenly only, and copies what it gathers and reduces once more."""


def shard_dim(shape: tuple[int, ...], degree: int) -> int:
    """The dim that a parameter of this shape (on one tensor rank) is divided along on `degree` ranks.

    It is dim 0 unless padding that would cost more than MOST_PADDING and another dim divides evenly: 8 experts or one
    class token on 64 ranks would otherwise be held, gathered and reduced as if they were 64.
    """
    if not shape or _padded(shape[0], degree) <= (1 + MOST_PADDING) * shape[0]:
        return 0
    return next((dim for dim, size in enumerate(shape) if size and size % degree == 0), 0)


def padded_elements(shape: tuple[int, ...], degree: int) -> int:
    """Elements of a parameter once it is padded for `degree` ranks, each of which holds 1/degree of them. One without
    dims is sharded as a tensor of one."""
    if degree == 1:
        return math.prod(shape)
    shape = shape or (1,)
    dim = shard_dim(shape, degree)
    return math.prod((*shape[:dim], _padded(shape[dim], degree), *shape[dim + 1 :]))


def _padded(size: int, degree: int) -> int:
    return -(-size // degree) * degree


def kept_rows(shape: tuple[int, ...], num_shards: int, rank: int) -> range:
    """The rows of a parameter that fully_shard leaves on one rank: those that torch.chunk gives it, on the last ranks
    fewer or none; all rows where another dim is divided.

    shape: of what one tensor rank holds.
    """
    if shard_dim(shape, num_shards) != 0:
        return range(shape[0])
    size = -(-shape[0] // num_shards)
    return range(shape[0])[rank * size : (rank + 1) * size]
