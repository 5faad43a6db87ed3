"""Types of arguments and answers."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict

if TYPE_CHECKING:
    # Of the standard library from Python 3.12 on; type checkers have it.
    from typing_extensions import Buffer
else:
    Buffer = Any


class SupportsDLPack(Protocol):
    """Tensors and arrays of PyTorch, JAX, CuPy and others."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


class SupportsCudaArray(Protocol):
    """Arrays of CuPy, Numba and others."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


#: An object that holds contiguous memory.
Array: TypeAlias = SupportsDLPack | SupportsCudaArray | Buffer
#: Such an object, or pairs of one and an offset in the file, which are moved in one request.
Memory: TypeAlias = Array | Sequence[tuple[Array, int]]
#: A path, as the functions of the standard library take it.
AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
#: A demand on how bytes move.
Require: TypeAlias = Literal["p2p", "bounce", "cache", "host", "direct"]


#: What reads take of the kernel's page cache.
Caching: TypeAlias = Literal["never", "resident", "read-again"]


class Routes(TypedDict):
    """Bytes by route."""

    p2p: int
    bounce: int
    cache: int
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
    sets: int
    stripe_unit: int
    route: str
    reason: str | None


class Operations(TypedDict):
    """Operations of one kind. Times are seconds."""

    count: int
    failed: int
    in_flight: int
    bytes: int
    seconds: float
    p50: float | None
    p99: float | None


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
    requests: dict[str, Operations]
    transfers: dict[str, Operations]
    device_requests: dict[str, Operations]


class ArrayStats(TypedDict):
    """What kernels found in an array since it was made."""

    hits: int
    misses: int
    written: int
