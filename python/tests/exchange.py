"""A library of tensors that has DLPack's C exchange API, made by ctypes: tests of it need neither PyTorch nor
a compiler. Source of the structures: `dlpack.h` of DLPack 1.3."""

import ctypes
from ctypes import POINTER, PYFUNCTYPE, c_int, c_int32, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar

import numpy

CPU, CUDA, METAL = 1, 2, 8
READ_ONLY, PADDED = 1, 4
UNSIGNED, FLOAT, COMPLEX = 1, 2, 5


class Header(ctypes.Structure):
    _fields_ = (("major", c_uint32), ("minor", c_uint32), ("previous", c_void_p))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
    )


class Managed(ctypes.Structure):
    pass


Deleter = PYFUNCTYPE(None, POINTER(Managed))
Managed._fields_ = (
    ("major", c_uint32),
    ("minor", c_uint32),
    ("context", c_void_p),
    ("deleter", Deleter),
    ("flags", c_uint64),
    ("tensor", DLTensor),
)
Export = PYFUNCTYPE(c_int, ctypes.py_object, POINTER(c_void_p))
View = PYFUNCTYPE(c_int, ctypes.py_object, POINTER(DLTensor))
Stream = PYFUNCTYPE(c_int, c_int32, c_int32, POINTER(c_void_p))


class Table(ctypes.Structure):
    _fields_ = (
        ("header", Header),
        ("allocate", c_void_p),
        ("export", Export),
        ("into_python", c_void_p),
        ("view", View),
        ("stream", Stream),
    )


class Tensor:
    """Items in memory that `keep` has. What it says of them can be anything. Classes that are derived from it
    get the API by :func:`has_api`."""

    #: The stream that the library works in.
    current: ClassVar[int] = 0
    #: What is exported now, by its address, and how much that was in all.
    exported: ClassVar[dict[int, tuple[Managed, "Tensor"]]] = {}
    exports: ClassVar[int] = 0

    def __init__(self, address: int, shape: tuple[int, ...], keep: Any = None, **says: Any) -> None:
        self.keep, self.flags, self.fails = keep, says.pop("flags", 0), says.pop("fails", False)
        strides = says.pop("strides", None)
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*(strides or self._contiguous(shape)))
        self._says = {"code": UNSIGNED, "bits": 8, "lanes": 1, "device_type": CPU} | says
        self._says |= {"data": address, "ndim": len(shape)}

    @staticmethod
    def _contiguous(shape: tuple[int, ...]) -> list[int]:
        return [int(numpy.prod(shape[at + 1 :])) for at in range(len(shape))]

    def fill(self, tensor: DLTensor) -> None:
        for name, value in self._says.items():
            setattr(tensor, name, value)
        tensor.shape, tensor.strides = ctypes.addressof(self._shape), ctypes.addressof(self._strides)


def of(array: numpy.ndarray, kind: type[Tensor], **says: Any) -> Tensor:
    """A tensor of bytes in an array."""
    return kind(array.ctypes.data - says.get("byte_offset", 0), says.pop("shape", array.shape), array, **says)


@Deleter
def delete(managed: Any) -> None:
    del Tensor.exported[ctypes.addressof(managed.contents)]


@Export
def export(tensor: Tensor, out: Any) -> int:
    if tensor.fails:
        return -1
    managed = Managed(major=1, minor=3, deleter=delete, flags=tensor.flags)
    tensor.fill(managed.tensor)
    Tensor.exported[ctypes.addressof(managed)] = managed, tensor
    Tensor.exports += 1
    out[0] = ctypes.addressof(managed)
    return 0


@View
def view(tensor: Tensor, out: Any) -> int:
    if not tensor.fails:
        tensor.fill(out[0])
    return -1 if tensor.fails else 0


@Stream
def stream(device_type: int, device: int, out: Any) -> int:
    out[0] = Tensor.current
    return 0


def table(major: int = 1, previous: Table | None = None) -> Table:
    header = Header(major, 3, None if previous is None else ctypes.addressof(previous))
    made = Table(header, None, export, None, view, stream)
    made.older = previous  # which it leads to, and keeps
    return made


_NAME = ctypes.create_string_buffer(b"dlpack_exchange_api")
# By its item: the attribute is one for all of the process, which others may have given other types.
_new = ctypes.pythonapi["PyCapsule_New"]
_new.restype, _new.argtypes = ctypes.py_object, (c_void_p, c_void_p, c_void_p)


def has_api(kind: type, of: Table) -> type:
    """Gives a class the API, for good: tables live as long as the process."""
    kind._table = of
    kind.__dlpack_c_exchange_api__ = _new(ctypes.addressof(of), ctypes.addressof(_NAME), None)
    return kind
