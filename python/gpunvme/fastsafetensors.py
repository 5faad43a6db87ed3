"""A copier for the package ``fastsafetensors``, named ``gpunvme``.

    import gpunvme.fastsafetensors  # registers it
    from fastsafetensors.loader import BaseSafeTensorsFileLoader
    from fastsafetensors.st_types import Device

    loader = BaseSafeTensorsFileLoader(None, Device.from_str("cuda:0"), "gpunvme")

Files are read straight into the buffers that fastsafetensors makes. They must lie on a mount of gpunvme.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from fastsafetensors.common import SafeTensorsMetadata
from fastsafetensors.copier.base import CopierInterface, validated_byte_ranges
from fastsafetensors.copier.registry import register_copier_constructor
from fastsafetensors.frameworks import FrameworkOpBase
from fastsafetensors.st_types import Device, DeviceType, DType

from gpunvme._device_memory import DeviceMemory
from gpunvme._file import File
from gpunvme._file import open as open_file
from gpunvme._native import Pending

__all__ = ["Copier", "stand_in"]


def _current_stream() -> int:
    import torch

    # In this interface 1 is the default stream, and 0 is not allowed.
    return torch.cuda.current_stream().cuda_stream or 1


class Copier(CopierInterface):  # type: ignore[misc]
    """Reads one file into one buffer. Files that are submitted one after the other are read at once."""

    def __init__(self, metadata: SafeTensorsMetadata, device: Device, framework: FrameworkOpBase) -> None:
        self.metadata = metadata
        self._device = device
        self._framework = framework
        self._ranges: list[tuple[int, int]] | None = None
        self._file: File | None = None
        self._pending: Pending | None = None
        self._length = 0

    def set_byte_ranges(self, byte_ranges: list[tuple[int, int]] | None) -> None:
        """Reads only these ranges of the file."""
        self._ranges = validated_byte_ranges(self.metadata, byte_ranges)

    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> Any:
        """Makes the buffer, and begins to read into it."""
        start, end = self.metadata.header_length, self.metadata.size_bytes
        # While it is open, what the files of a mount share is kept for the next one.
        self._file = open_file(self.metadata.src)
        buffer = self._framework.alloc_tensor_memory(end - start, self._device)
        address = buffer.get_base_address()

        def memory(first: int, last: int) -> Any:
            if self._device.type == DeviceType.CUDA:
                # PyTorch's allocator hands out memory that its current stream may still be using.
                return DeviceMemory(address + first - start, last - first, _current_stream())
            return (ctypes.c_uint8 * (last - first)).from_address(address + first - start)

        ranges = [(start, end)] if self._ranges is None else self._ranges
        parts = [(memory(first, last), first) for first, last in ranges if last > first]
        try:
            self._pending = self._file.submit_read_into(parts)
        except BaseException:
            # Nothing else gives back what fastsafetensors does not know yet.
            self._framework.free_tensor_memory(buffer, self._device)
            self._file.close()
            raise
        self._length = sum(last - first for first, last in ranges)
        return buffer

    def wait_io(
        self, gbuf: Any, dtype: DType = DType.AUTO, noalign: bool = False, owner: Any = None
    ) -> dict[str, Any]:
        """Waits until all of it is read, and makes tensors of it."""
        if self._pending is None or self._file is None:
            raise RuntimeError("wait_io was called before submit_io")
        moved = self._pending.result().bytes
        self._file.close()
        if moved < self._length:
            raise EOFError(f"{self.metadata.src}: the file ended {self._length - moved} bytes too early")
        start = self.metadata.header_length
        tensors: dict[str, Any] = self.metadata.get_tensors(
            gbuf, self._device, start, dtype=dtype, owner=owner
        )
        return tensors


@register_copier_constructor("gpunvme", Copier)  # type: ignore[untyped-decorator, unused-ignore]
def _constructor(
    device: Device, **_: Any
) -> Callable[[SafeTensorsMetadata, Device, FrameworkOpBase], CopierInterface]:
    return Copier


def stand_in(*names: str) -> None:
    """Registers the copier under names of fastsafetensors' own too, for programs that choose one of those.

    All files that this process loads by them must lie on a mount of gpunvme from then on.
    """
    for name in names:
        register_copier_constructor(name, Copier)(_constructor)
