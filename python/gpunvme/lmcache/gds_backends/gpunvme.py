"""The backend ``gpunvme`` of LMCache's GDS L1: a slab of key-value cache, in a file of a mount."""

import os
from typing import Any

from lmcache.v1.gpu_connector.gds_backends.base import GDSBackend, GDSHandle, Submission

import gpunvme
from gpunvme._device_memory import DeviceMemory

__all__ = ["Backend", "Handle", "Request"]


class Request(Submission):  # type: ignore[misc]
    """A read or write in the order of a stream."""

    __slots__ = ("pending",)

    def __init__(self, size: int, file_offset: int, buf_offset: int, pending: gpunvme.Pending) -> None:
        super().__init__(size, file_offset, buf_offset)
        self.pending = pending

    @property
    def bytes_done(self) -> int:
        """The bytes that were moved, or a negative errno; to be asked when the stream has passed it."""
        try:
            return self.pending.result().bytes
        except gpunvme.Error as error:
            return -(error.errno or 1)


class Handle(GDSHandle):  # type: ignore[misc]
    """A slab."""

    def __init__(self, path: str, size: int) -> None:
        super().__init__(path)
        self.file = gpunvme.open(path, "w")
        try:
            os.posix_fallocate(self.file.fileno(), 0, size)
        except BaseException:
            self.file.close()
            raise

    def read_async(
        self, buf_base: int, size: int, file_offset: int, buf_offset: int, raw_stream: int
    ) -> Request:
        """Puts a read into the order of a stream."""
        memory = DeviceMemory(buf_base + buf_offset, size)
        pending = self.file.read_into(memory, file_offset, stream=raw_stream)
        return Request(size, file_offset, buf_offset, pending)

    def write_async(
        self, buf_base: int, size: int, file_offset: int, buf_offset: int, raw_stream: int
    ) -> Request:
        """Puts a write into the order of a stream."""
        memory = DeviceMemory(buf_base + buf_offset, size)
        pending = self.file.write_from(memory, file_offset, stream=raw_stream)
        return Request(size, file_offset, buf_offset, pending)

    def close(self) -> None:
        """Closes the slab's file."""
        self.file.close()


class Backend(GDSBackend):  # type: ignore[misc]
    """Slabs of a mount. Neither memory nor streams need to be made known before they are used."""

    name = "gpunvme"

    def open_slab(self, location: str, size: int, direct_io: bool) -> Handle:
        """Makes a slab of ``size`` bytes in the folder ``location`` of a mount. What it does is direct in
        any case."""
        os.makedirs(location, exist_ok=True)
        self.mount = gpunvme.Mount(location)
        return Handle(os.path.join(location, "lmcache_gds_slab.bin"), size)

    def register_buffer(self, buf: Any) -> None:
        """Has what the first transfer would have to do done."""
        if not buf.is_cuda:
            raise ValueError("register_buffer: the tensor must lie on a GPU")
        self.mount.route(buf)

    def deregister_buffer(self, buf: Any) -> None:
        """Gives up what is registered of a buffer."""
        self.mount.forget(buf)

    def register_stream(self, raw_stream: int) -> None:
        """Does nothing."""

    def deregister_stream(self, raw_stream: int) -> None:
        """Does nothing."""
