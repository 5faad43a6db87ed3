"""Arrays of PyTorch and NumPy by the names that safetensors gives their dtypes."""

from functools import cache
from typing import Any, Protocol

#: Bytes of an item, by the names of safetensors.
ITEM_SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}

#: Bits of an item. There are dtypes with less than a byte, which no library here has arrays of.
ITEM_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6} | {name: 8 * size for name, size in ITEM_SIZES.items()}

_TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}

_NUMPY = {
    "BOOL": "b1",
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "I64": "<i8",
    "U64": "<u8",
    "F64": "<f8",
    "C64": "<c8",
}
_NAMES = {kind: name for name, kind in _NUMPY.items()}


class Framework(Protocol):
    """A library of arrays."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A new array whose content is not defined. ``ValueError`` for a dtype that the library lacks."""

    def contiguous(self, array: Any) -> Any:
        """The array, or a contiguous copy."""

    def bytes_of(self, array: Any) -> Any:
        """A view of a contiguous array: its bytes, in one dimension."""


class Torch:
    """PyTorch, on one device."""

    def __init__(self, device: Any) -> None:
        import torch

        self.torch = torch
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        known = getattr(self.torch, _TORCH.get(dtype, ""), None)
        if known is None:
            raise ValueError(f"this PyTorch has no dtype for {dtype}")
        return self.torch.empty(shape, dtype=known, device=self.device)

    def contiguous(self, array: Any) -> Any:
        return array.contiguous()

    def bytes_of(self, array: Any) -> Any:
        return array.reshape(-1).view(self.torch.uint8)


class NumPy:
    """NumPy, in host memory."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        import numpy

        if dtype not in _NUMPY:
            raise ValueError(f"NumPy has no dtype for {dtype}")
        return numpy.empty(shape, _NUMPY[dtype])

    def contiguous(self, array: Any) -> Any:
        import numpy

        # It makes one dimension of none.
        return numpy.ascontiguousarray(array).reshape(array.shape)

    def bytes_of(self, array: Any) -> Any:
        return array.reshape(-1).view("u1")


def framework(name: str, device: Any) -> Framework:
    """A library of arrays by its name, as safetensors has it."""
    if name in ("pt", "torch", "pytorch"):
        return Torch(device)
    if name in ("np", "numpy"):
        if str(device) != "cpu":
            raise ValueError(f"NumPy has no arrays on {device}")
        return NumPy()
    raise ValueError(f'framework must be "pt" or "np", not {name!r}')


@cache
def _names_of_torch() -> dict[Any, str]:
    import torch

    return {getattr(torch, dtype): name for name, dtype in _TORCH.items() if hasattr(torch, dtype)}


def check(name: str, array: Any) -> None:
    """Whether an array can be saved from where it lies; ``name`` is what errors call it.

    Raises:
        TypeError: it is no tensor or array, or has no memory.
        ValueError: its items do not lie one after the other.
    """
    # What has the first is not asked for the others, at which PyTorch may raise.
    protocols = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")
    described = hasattr(array, "dtype") and hasattr(array, "shape")
    if not described or not any(hasattr(array, protocol) for protocol in protocols):
        given = type(array)
        raise TypeError(f"{name!r} is no tensor or array: it is of {given.__module__}.{given.__qualname__}")
    if getattr(array, "is_meta", False):
        raise TypeError(f"{name!r} has no memory: it lies on meta")
    # PyTorch's.
    layout = str(getattr(array, "layout", "torch.strided"))
    if hasattr(array, "is_contiguous") and layout != "torch.strided":
        raise ValueError(f"{name!r} is of the layout {layout}, which the format has not")
    for kind in ("conj", "neg"):
        if hasattr(array, f"is_{kind}") and getattr(array, f"is_{kind}")():
            raise ValueError(f"{name!r} is a view whose memory holds other numbers: use .resolve_{kind}()")
    if not _is_contiguous(array):
        shape, strides = list(array.shape), array.stride if hasattr(array, "stride") else array.strides
        strides = list(strides() if callable(strides) else strides)
        copy = ".contiguous()" if hasattr(array, "contiguous") else "numpy.ascontiguousarray, or the like"
        raise ValueError(
            f"{name!r} is a strided view (shape {shape}, strides {strides}): save a copy, by {copy}"
        )


def _is_contiguous(array: Any) -> bool:
    """Of a tensor of PyTorch, or an array like NumPy's or Numba's; others are."""
    if hasattr(array, "is_contiguous"):
        return bool(array.is_contiguous())
    return bool(getattr(getattr(array, "flags", None), "c_contiguous", True))


def dtype_name(array: Any) -> str:
    """What safetensors calls the dtype of a tensor of PyTorch, or an array of NumPy or CuPy."""
    kind = getattr(array.dtype, "str", None)
    # "<f4" and the like; "|" stands where there is no byte order.
    name = _names_of_torch().get(array.dtype) if kind is None else _NAMES.get(kind.replace("|", ""))
    if name is None:
        raise ValueError(f"safetensors has no name for the dtype {array.dtype}")
    return name
