"""Parts of tensors that lie in a file, row after row of the last dimension."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpunvme._file import File
from gpunvme._types import Require

#: Runs of a part that lie closer than so many bytes are not read one by one: what lies between them is
#: read as well. A row takes an H200 two to four microseconds, in which it reads as much.
_CLOSE = 16384

#: First and last index of each dimension.
Bounds = Sequence[tuple[int, int]]


def runs(shape: Sequence[int], bounds: Bounds) -> tuple[Iterator[int], int]:
    """Where the contiguous runs of a part begin, in items, and how many items each has."""
    run, inner = 1, len(shape)
    while inner > 0:
        inner -= 1
        first, last = bounds[inner]
        run *= last - first
        if (first, last) != (0, shape[inner]):
            break
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]

    def starts(at: int, base: int) -> Iterator[int]:
        if at >= inner:
            yield base + sum(
                first * stride for (first, _), stride in zip(bounds[at:], strides[at:], strict=True)
            )
            return
        for position in range(*bounds[at]):
            yield from starts(at + 1, base + position * strides[at])

    return starts(0, 0), run


def read_part(
    file: File,
    offset: int,
    shape: Sequence[int],
    bounds: Bounds,
    empty: Callable[[tuple[int, ...]], Any],
    *,
    require: Require | None = None,
) -> Any:
    """Reads a part of the tensor that begins at an offset of a file.

    ``empty`` makes arrays of a shape, of the tensor's dtype. What is returned is one of them, or a view
    into one.

    Raises:
        EOFError: the file ends before.
    """
    size = tuple(last - first for first, last in bounds)
    if math.prod(size) == 0:
        return empty(size)
    starts, run = runs(shape, bounds)
    whole = [bounds[0], *((0, length) for length in shape[1:])] if bounds else []
    pieces = math.prod(size) // run
    wide = math.prod(last - first for first, last in whole)
    if pieces > 1:
        row = empty((0,)).itemsize * wide // pieces
        if row < _CLOSE:
            rows = read_part(file, offset, shape, whole, empty, require=require)
            return rows[(slice(None), *(slice(*bound) for bound in bounds[1:]))]
    part = empty(size)
    item = part.nbytes // math.prod(size)
    moved = file.read_rows(part, [offset + start * item for start in starts], require=require).bytes
    if moved < part.nbytes:
        raise EOFError(f"{file.name}: the file ended {part.nbytes - moved} bytes too early")
    return part
