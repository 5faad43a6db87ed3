"""Memory of a GPU by the driver API alone, so that tests need no array library and run against the software
CUDA driver as well as on a GPU."""

import ctypes
from functools import cache
from typing import Any

import numpy


@cache
def driver() -> ctypes.CDLL | None:
    """The CUDA driver with its first GPU's context, or None where there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        try:
            cuda = ctypes.CDLL("libcuda.so")
        except OSError:
            return None
    return cuda if cuda.cuInit(0) == 0 else None


def enter() -> ctypes.CDLL:
    """Makes the first GPU's primary context the calling thread's."""
    cuda = driver()
    assert cuda is not None
    context = ctypes.c_void_p()
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    check(cuda.cuCtxPushCurrent_v2(context))
    return cuda


def check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"CUDA error {code}")


class Stream:
    """A stream, with the protocol of CUDA's own Python packages."""

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        check(enter().cuStreamCreate(ctypes.byref(self.handle), 1))

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle.value or 0

    def synchronize(self) -> None:
        check(enter().cuStreamSynchronize(self.handle))


class Array:
    """Bytes in device memory, as a CUDA array."""

    freed = 0

    def __init__(
        self, shape: tuple[int, ...] | int, dtype: Any = numpy.uint8, stream: int | None = None
    ) -> None:
        self.shape = (shape,) if isinstance(shape, int) else shape
        self.dtype = numpy.dtype(dtype)
        self.stream = stream
        self.address = ctypes.c_uint64()
        self.nbytes = int(numpy.prod(self.shape)) * self.dtype.itemsize
        check(enter().cuMemAlloc_v2(ctypes.byref(self.address), ctypes.c_size_t(self.nbytes)))

    def __del__(self) -> None:
        Array.freed += 1
        enter().cuMemFree_v2(self.address)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address.value, False),
            "strides": None,
            "version": 3,
            "stream": self.stream,
        }

    def set(self, values: numpy.ndarray) -> "Array":
        values = numpy.ascontiguousarray(values, self.dtype)
        assert values.nbytes == self.nbytes
        source = ctypes.c_void_p(values.ctypes.data)
        check(enter().cuMemcpyHtoDAsync_v2(self.address, source, ctypes.c_size_t(self.nbytes), None))
        check(enter().cuStreamSynchronize(None))
        return self

    def get(self) -> numpy.ndarray:
        values = numpy.empty(self.shape, self.dtype)
        target = ctypes.c_void_p(values.ctypes.data)
        check(enter().cuMemcpyDtoHAsync_v2(target, self.address, ctypes.c_size_t(self.nbytes), None))
        check(enter().cuStreamSynchronize(None))
        return values


class View:
    """A CUDA array that is part of another, or says something else of it."""

    def __init__(self, of: Array, **changes: Any) -> None:
        self.of = of
        self.__cuda_array_interface__ = of.__cuda_array_interface__ | changes


class DLPack:
    """Any array, by DLPack alone."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.of.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        device = self.of.__dlpack_device__()
        return int(device[0]), int(device[1])
