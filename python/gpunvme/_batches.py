"""Many tensors of many files, as requests of a useful size, several in flight at once."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from gpunvme._error import Error
from gpunvme._file import File
from gpunvme._native import Pending

#: Bytes of a request, unless one tensor is longer: enough for a device to be busy, little enough for a
#: progress bar to move.
BATCH = 128 << 20
#: Requests in flight at once.
DEPTH = 4


def _lies_on_gpu(tensor: Any) -> bool:
    """Of PyTorch's tensors or an array like CuPy's, which has the interface on GPUs alone.

    PyTorch's tensors have it too, but to look for it is an error where it has no name for the data type.
    """
    is_cuda = getattr(tensor, "is_cuda", None)
    return bool(is_cuda) if is_cuda is not None else hasattr(tensor, "__cuda_array_interface__")


def batches(items: Iterable[tuple[File, Any, int, int]]) -> Iterator[tuple[File, list[tuple[Any, int]], int]]:
    """Groups items ``(file, tensor, offset, bytes)`` into requests ``(file, pairs, bytes)``.

    A request has tensors of GPUs, or of the host. A state dict has both: weights, and counters.
    """
    file: File | None = None
    pairs: dict[bool, list[tuple[Any, int]]] = {}
    sizes: dict[bool, int] = {}
    for at, tensor, offset, length in items:
        if file is not None and at is not file:
            for on_gpu in list(pairs):
                yield file, pairs.pop(on_gpu), sizes.pop(on_gpu)
        file = at
        on_gpu = _lies_on_gpu(tensor)
        if on_gpu in pairs and sizes[on_gpu] + length > BATCH:
            yield file, pairs.pop(on_gpu), sizes.pop(on_gpu)
        pairs.setdefault(on_gpu, []).append((tensor, offset))
        sizes[on_gpu] = sizes.get(on_gpu, 0) + length
    for on_gpu in list(pairs):
        assert file is not None
        yield file, pairs.pop(on_gpu), sizes.pop(on_gpu)


class Progress:
    """A progress bar of bytes: on a terminal, where tqdm is installed, and for what takes a while."""

    def __init__(self, total: int, what: str, show: bool | None) -> None:
        self.bar: Any = None
        if show is False or (show is None and total < 1 << 30):
            return
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return
        # None: where standard error is a terminal.
        disable = None if show is None else False
        self.bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=disable)

    def add(self, length: int) -> None:
        if self.bar is not None:
            self.bar.update(length)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()


def performed(
    items: Iterable[tuple[File, Any, int, int]], *, write: bool = False, require: Any = None
) -> Iterator[tuple[File, list[tuple[Any, int]], int]]:
    """Reads or writes items ``(file, tensor, offset, bytes)``, and tells of each request when it is done:
    ``(file, pairs, bytes)``, in order. Others are in flight meanwhile.

    Raises:
        Error: what a request failed with.
        EOFError: a file is shorter than it should be.
    """
    in_flight: deque[tuple[Pending, File, list[tuple[Any, int]], int]] = deque()

    def finish() -> tuple[File, list[tuple[Any, int]], int]:
        pending, file, pairs, length = in_flight.popleft()
        moved = pending.result().bytes
        if moved < length:
            raise EOFError(f"{file.name}: the file ended {length - moved} bytes too early")
        return file, pairs, length

    try:
        for file, pairs, length in batches(items):
            if len(in_flight) == DEPTH:
                yield finish()
            begin = file.submit_write_from if write else file.submit_read_into
            in_flight.append((begin(pairs, require=require), file, pairs, length))
        while in_flight:
            yield finish()
    finally:
        # What failed is over when it is raised: nothing is still read into memory that the caller has.
        for pending, *_ in in_flight:
            with suppress(Error):
                pending.result()


def perform(
    items: Iterable[tuple[File, Any, int, int]],
    progress: Progress | None = None,
    *,
    write: bool = False,
    require: Any = None,
) -> None:
    """Reads or writes items, as :func:`performed` does."""
    for _, _, length in performed(items, write=write, require=require):
        if progress is not None:
            progress.add(length)
