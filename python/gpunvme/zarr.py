"""Arrays of Zarr on a mount of gpunvme, read straight into the memory that Zarr asks for.

    import zarr
    from gpunvme.zarr import Store

    zarr.config.enable_gpu()  # chunks as arrays of CuPy
    array = zarr.open_array(Store("/data/array.zarr"), mode="r")

Chunks that are not compressed come into GPU memory so, and compressed ones where a codec of the GPU takes
them.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import gpu
from zarr.core.buffer.core import default_buffer_prototype
from zarr.storage import LocalStore

from gpunvme._file import open as open_file

__all__ = ["Store"]


class Store(LocalStore):  # type: ignore[misc]
    """A store in a folder, as Zarr's own for local files, which it is for all but reading."""

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        """Reads a value, or a part of one; None where there is none."""
        prototype = prototype or default_buffer_prototype()
        path = self.root / key
        if path.is_dir():
            return None
        try:
            file = open_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with file:
            first, last = _range(byte_range, file.size)
            memory = _empty(prototype.buffer, last - first)
            moved = (await file.read_into_async(memory, first)).bytes
        if moved < last - first:
            raise EOFError(f"{path}: the file ended {last - first - moved} bytes too early")
        return prototype.buffer.from_array_like(memory)

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[tuple[str, Any]]) -> list[Any]:
        """Reads parts of values, all at once."""
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))


def _range(request: Any, size: int) -> tuple[int, int]:
    """Where in a file of a size what is asked for begins and ends."""
    match request:
        case None:
            return 0, size
        case RangeByteRequest(start, end):
            return min(start, size), min(end, size)
        case OffsetByteRequest(offset):
            return min(offset, size), size
        case SuffixByteRequest(suffix):
            return max(0, size - suffix), size
        case _:
            raise TypeError(f"{request!r} is no part of a value")


def _empty(kind: Any, length: int) -> Any:
    """Memory for a buffer of Zarr's."""
    if issubclass(kind, gpu.Buffer):
        import cupy

        return cupy.empty(length, "B")
    return numpy.empty(length, "B")
