"""The native part: `python/src` of the repository."""

import os
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, final, overload

from gpunvme._error import Error
from gpunvme._types import Array, Memory, Require

class Routes(TypedDict):
    """Bytes by route."""

    p2p: int
    bounce: int
    host: int
    hole: int
    edge: int

class Info(TypedDict):
    """What a mount is and can do. Sizes are bytes."""

    device: str
    label: str
    uuid: str
    daemon: str
    read_only: bool
    capacity: int
    free: int
    block_size: int
    logical_block: int
    memory_alignment: int
    devices: int
    route: str
    reason: str | None

class Stats(TypedDict):
    """What a mount did since it was mounted, for all processes."""

    read: Routes
    write: Routes
    calls: dict[str, int]
    failed: int
    reasons: dict[str, int]
    buffers: int
    buffer_bytes: int
    processes: int

@final
class Transfer:
    """What a transfer moved, and how."""

    @property
    def bytes(self) -> int:
        """How many bytes were moved. Fewer than were asked for means that the file ended."""
    @property
    def routes(self) -> dict[str, int]:
        """Bytes by route: ``p2p``, ``bounce``, ``host``; ``hole`` are zeros that the file never stored,
        ``edge`` what the daemon copied because it is not aligned. Only those that are not zero."""
    @property
    def reason(self) -> str | None:
        """The code that says why not every byte went the fastest way; None where each did."""
    @property
    def explanation(self) -> str:
        """One sentence about the reason, and what would change it; empty where there is none."""
    def __eq__(self, other: object) -> bool: ...

@final
class Pending:
    """A request that was begun. Its memory is in use, and kept, until it is done, even if this object
    goes before."""

    def done(self) -> bool:
        """Whether :meth:`result` would return at once."""
    def result(self, timeout: float | None = None) -> Transfer:
        """Waits until the request is done, and says what it moved.

        Args:
            timeout: seconds to wait at most; without it there is no limit.

        Raises:
            Error: what the request failed with.
            TimeoutError: it is not done by then, and goes on.
        """

@final
class Extent:
    """Where bytes of a file lie on the device."""

    @property
    def file_offset(self) -> int:
        """Where in the file it begins, in bytes."""
    @property
    def length(self) -> int:
        """How many bytes it has."""
    @property
    def device(self) -> int:
        """Which device of the volume it lies on."""
    @property
    def device_offset(self) -> int:
        """Where it begins on that device, in bytes."""
    @property
    def unwritten(self) -> bool:
        """Whether it is allocated and was never written: it reads as zeros."""

@final
class Buffer:
    """Host memory that is registered with a mount: bytes move between it and files without a copy by the
    CPU. It has the buffer protocol, so ``numpy.frombuffer(buffer, dtype)`` is an array in it, and slices
    of that array are read into and written from as the buffer itself is.

    Made by :meth:`Mount.buffer`. It is unregistered when nothing uses it any more.
    """

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Mount:
    """A mounted volume. While one of it, or a file of the mount, is there, what transfers need (staging
    memory, threads) is kept ready.

    Args:
        path: the mount, or a file or directory on it.

    Raises:
        Error: the path lies on no mount of gpunvme (ENOTTY), or what open(2) says.
    """

    def __new__(cls, path: str | os.PathLike[str]) -> Self: ...
    @property
    def path(self) -> str:
        """The path that it was named by."""
    def info(self) -> Info:
        """What the mount is and can do, asked of its daemon now."""
    def stats(self) -> Stats:
        """What the mount did since it was mounted, for all processes."""
    def buffer(self, nbytes: int) -> Buffer:
        """Host memory that is registered with the mount: ``nbytes`` zeros, page aligned."""
    def route(self, memory: Array) -> tuple[str, str | None]:
        """The route that transfers between the mount and ``memory`` take, and the reason why it is not a
        faster one, or None."""
    def forget(self, memory: Array) -> None:
        """Gives up what is registered of a GPU's memory, which otherwise stays in existence, even if it is
        freed, until other memory needs the room. Only the route ``p2p`` registers any."""
    def close(self) -> None:
        """Lets go of the mount: it can be unmounted when its files are closed too."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

class File:
    """A file of a mount. Any number of threads may use it at once.

    What is called *memory* below is anything that holds contiguous memory: a tensor of PyTorch, an array
    of CuPy, NumPy, JAX or Numba, whatever has ``__cuda_array_interface__``, ``__dlpack__`` or the buffer
    protocol; or a list of ``(memory, offset)`` pairs, which are moved in one request. All memory of a
    request lies on GPUs, or all in the host. Offsets and lengths need no alignment.

    A call first waits for the stream that the memory's library puts its work on (PyTorch's current
    stream, the stream that ``__cuda_array_interface__`` names, what DLPack orders), so that a tensor may
    be read into, or written from, right after the code that uses it. With ``stream=`` it does not wait:
    the request takes its place in the order of that stream.
    """

    def __new__(cls, path: str | os.PathLike[str], mode: Literal["r", "r+", "w"] = "r") -> Self: ...
    @overload
    def read_into(
        self, memory: Memory, offset: int = 0, *, stream: None = None, require: Require | None = None
    ) -> Transfer: ...
    @overload
    def read_into(
        self, memory: Memory, offset: int = 0, *, stream: object, require: Require | None = None
    ) -> Pending:
        """Reads bytes of the file into memory.

        Args:
            memory: what is read into, all of it; or a list of ``(memory, offset)`` pairs.
            offset: where in the file to begin, in bytes.
            stream: a CUDA stream (of PyTorch, CuPy or Numba, or its handle): the read takes its place in
                the stream's order, and the call returns at once.
            require: ``"p2p"``, ``"bounce"`` or ``"host"``: this route and no other; ``"direct"``: no byte
                may be copied by the CPU. Where that cannot be met nothing is moved.

        Returns:
            A :class:`Transfer`; fewer bytes than the memory has mean that the file ended. With
            ``stream`` a :class:`Pending`.

        Raises:
            Error: with errno, route and reason.
            TypeError: ``memory`` holds none.
            ValueError: it is strided, or read-only.
        """
    @overload
    def write_from(
        self, memory: Memory, offset: int = 0, *, stream: None = None, require: Require | None = None
    ) -> Transfer: ...
    @overload
    def write_from(
        self, memory: Memory, offset: int = 0, *, stream: object, require: Require | None = None
    ) -> Pending:
        """Writes memory to the file, which becomes longer where it ends before. Like ``write(2)`` it is
        durable after :meth:`sync`. Arguments, result and errors are those of :meth:`read_into`."""
    @overload
    def read_rows(
        self, memory: Array, offsets: object, *, stream: None = None, require: Require | None = None
    ) -> Transfer: ...
    @overload
    def read_rows(
        self, memory: Array, offsets: object, *, stream: object, require: Require | None = None
    ) -> Pending:
        """Reads rows of equal length, each from an offset of its own, in one request.

        Args:
            memory: what is read into: as many rows as there are offsets, side by side.
            offsets: where in the file each begins, in bytes: an array or a sequence of integers.

        Everything else is as for :meth:`read_into`.
        """
    @overload
    def write_rows(
        self, memory: Array, offsets: object, *, stream: None = None, require: Require | None = None
    ) -> Transfer: ...
    @overload
    def write_rows(
        self, memory: Array, offsets: object, *, stream: object, require: Require | None = None
    ) -> Pending:
        """Writes rows of equal length, each to an offset of its own, in one request. Arguments, result and
        errors are those of :meth:`read_rows`."""
    def submit_read_into(self, memory: Memory, offset: int = 0, *, require: Require | None = None) -> Pending:
        """Begins a :meth:`read_into`, and returns at once with a :class:`Pending`."""
    def submit_write_from(
        self, memory: Memory, offset: int = 0, *, require: Require | None = None
    ) -> Pending:
        """Begins a :meth:`write_from`, and returns at once with a :class:`Pending`."""
    def _submit_to(
        self,
        write: bool,
        memory: Memory,
        offset: int,
        demand: Require | None,
        answer_to: tuple[Completions, int],
    ) -> None: ...
    def extents(self, offset: int = 0, length: int | None = None) -> list[Extent]:
        """Where the file's bytes lie on the device. What no extent covers is a hole. The answer is no
        lease: the file may change a moment later.

        Args:
            offset: where in the file to begin, in bytes.
            length: how many bytes to look at; without it all that follow.
        """
    @property
    def size(self) -> int:
        """Its size in bytes, now."""
    def truncate(self, size: int) -> None:
        """Sets its size in bytes. Bytes that are added read as zeros."""
    def sync(self) -> None:
        """Makes what was written durable: fsync(2)."""
    def fileno(self) -> int:
        """Its descriptor, for calls of the ``os`` module; it stays the file's."""
    def close(self) -> None:
        """Closes it. Requests in flight go on."""
    @property
    def closed(self) -> bool:
        """Whether it is closed."""
    @property
    def name(self) -> str:
        """The path that it was opened by."""
    @property
    def mode(self) -> str:
        """The mode that it was opened in."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Completions:
    """What one event loop is told of its requests. Of the package's own use."""

    def __new__(cls) -> Self: ...
    def fileno(self) -> int: ...
    def take(self) -> list[tuple[int, Transfer | Error]]: ...
