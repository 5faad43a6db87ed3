"""A storage plugin of LMCache: each chunk of key-value cache is a file of a mount.

A file has a header of one block, and then the chunk's bytes. It appears under its name when it is whole,
and is found again after a restart. Files stay until LMCache removes their chunks, or the folder is emptied.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

import gpunvme

__all__ = ["Storage"]

_LOG = logging.getLogger(__name__)
#: Bytes of the header: a block of the filesystem, so that the chunk is aligned.
_HEADER = 4096
#: Chunks that are written at once.
_WRITERS = 4
#: Bytes of a name that a file may have. What is longer is named by its hash.
_LONGEST = 255


class Storage(StoragePluginInterface):  # type: ignore[misc]
    """Chunks as files in the folder that ``extra_config["gpunvme.path"]`` names."""

    def __init__(
        self,
        dst_device: str = "cuda",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        self._folder = Path(config.extra_config["gpunvme.path"])
        self._folder.mkdir(parents=True, exist_ok=True)
        self._mount = gpunvme.Mount(self._folder)
        self._writers = ThreadPoolExecutor(_WRITERS, "gpunvme-lmcache")
        self._lock = threading.Lock()
        self._being_put: set[Any] = set()

    def _path(self, key: Any) -> Path:
        name: str = quote(key.to_string(), safe="") + ".kv"
        if len(name) > _LONGEST:
            name = hashlib.sha256(name.encode()).hexdigest() + ".kv"
        return self._folder / name

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Whether there is a chunk. Nothing is evicted, so that none has to be pinned."""
        return self._path(key).exists()

    pin = unpin = contains

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        """How many chunks there are, of the first ones."""
        count: int = self.batched_contains(keys, pin)
        return count

    def exists_in_put_tasks(self, key: Any) -> bool:
        """Whether a chunk is being written."""
        with self._lock:
            return key in self._being_put

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> list[Future[None]]:
        """Begins to write chunks that are not there."""
        begun = []
        for key, chunk in zip(keys, objs, strict=True):
            with self._lock:
                if key in self._being_put or self.contains(key):
                    continue
                self._being_put.add(key)
            chunk.ref_count_up()
            try:
                begun.append(self._writers.submit(self._put, key, chunk, on_complete_callback))
            except RuntimeError:  # it is closed
                self._has_put(key, chunk)
                raise
        return begun

    async def async_batched_submit_put_task(self, *arguments: Any, **more: Any) -> None:
        """As :meth:`batched_submit_put_task`."""
        self.batched_submit_put_task(*arguments, **more)

    def _put(self, key: Any, chunk: Any, on_complete: Callable[[Any], None] | None) -> None:
        temporary = self._folder / f".{secrets.token_hex(8)}.tmp"
        try:
            path = self._path(key)
            tensor = chunk.tensor
            dtype = str(tensor.dtype).removeprefix("torch.")
            header = {"shape": list(tensor.shape), "dtype": dtype, "format": chunk.metadata.fmt.name}
            with gpunvme.open(temporary, "w") as file:
                file.write_from(json.dumps(header).encode().ljust(_HEADER))
                file.write_from(tensor, _HEADER)
            temporary.rename(path)
        except BaseException as error:
            _LOG.warning("the chunk %s was not written: %s", key, error)
            temporary.unlink(missing_ok=True)
            raise
        finally:
            self._has_put(key, chunk)
        if on_complete is not None:
            on_complete(key)

    def _has_put(self, key: Any, chunk: Any) -> None:
        chunk.ref_count_down()
        with self._lock:
            self._being_put.discard(key)

    def _begin(self, key: Any) -> tuple[gpunvme.File, Any, gpunvme.Pending] | None:
        """Begins to read a chunk, where there is one that can be read, and memory for it."""
        path, chunk = self._path(key), None
        try:
            file = gpunvme.open(path)
        except FileNotFoundError:
            return None
        except gpunvme.Error as error:
            _LOG.warning("%s is taken for missing: %s", path, error)
            return None
        try:
            header = bytearray(_HEADER)
            file.read_into(header)
            said = json.loads(header)
            shape, dtype = torch.Size(said["shape"]), getattr(torch, said["dtype"])
            kind = MemoryFormat[said["format"]]
            chunk = self.local_cpu_backend.allocate(shape, dtype, kind, busy_loop=False)
            if chunk is not None:
                return file, chunk, file.submit_read_into(chunk.tensor, _HEADER)
        except (gpunvme.Error, AttributeError, KeyError, TypeError, ValueError) as error:
            _LOG.warning("%s is taken for missing: %s", path, error)
            if chunk is not None:
                chunk.ref_count_down()
        file.close()
        return None

    def get_blocking(self, key: Any) -> Any:
        """Reads a chunk; None where there is none, or no memory for it."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        """Reads chunks, all at once."""
        found = [self._begin(key) for key in keys]
        return [one and self._finish(*one) for one in found]

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """Reads chunks, as far as there are, and memory for them."""
        begun = []
        for key in keys:
            one = self._begin(key)
            if one is None:
                break
            begun.append(one)
        try:
            # One thread for all: where the task is cancelled, they are read to their end all the same.
            reading = asyncio.get_running_loop().run_in_executor(None, self._finish_all, begun)
            chunks = await asyncio.shield(reading)
        except asyncio.CancelledError:
            reading.add_done_callback(lambda done: self._give_back(done.result()))
            raise
        # They are taken for the first ones of the keys: none may stand in the place of another.
        there = chunks.index(None) if None in chunks else len(chunks)
        self._give_back(chunks[there:])
        return chunks[:there]

    def _finish_all(self, begun: list[tuple[gpunvme.File, Any, gpunvme.Pending]]) -> list[Any]:
        return [self._finish(*one) for one in begun]

    def _give_back(self, chunks: list[Any]) -> None:
        for chunk in chunks:
            if chunk is not None:
                chunk.ref_count_down()

    def _finish(self, file: gpunvme.File, chunk: Any, pending: gpunvme.Pending) -> Any:
        with file:
            try:
                if pending.result().bytes == chunk.tensor.nbytes:
                    return chunk
            except gpunvme.Error as error:
                _LOG.warning("%s is taken for missing: %s", file.name, error)
        chunk.ref_count_down()
        return None

    def remove(self, key: Any, force: bool = True) -> bool:
        """Removes a chunk; whether there was one."""
        with contextlib.suppress(FileNotFoundError):
            self._path(key).unlink()
            return True
        return False

    def get_allocator_backend(self) -> Any:
        """What has memory for chunks: LMCache's own, of pinned host memory."""
        return self.local_cpu_backend

    def touch_cache(self) -> None:
        """Does nothing: no chunk is evicted."""

    def close(self) -> None:
        """Waits for chunks that are being written."""
        self._writers.shutdown()
        self._mount.close()
