"""Types of arguments."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

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
#: A demand on how bytes move.
Require: TypeAlias = Literal["p2p", "bounce", "host", "direct"]
