"""Distributed checkpoints of PyTorch, straight between files and GPU memory.

    import torch.distributed.checkpoint as dcp
    from gpunvme.checkpoint import Reader, Writer

    dcp.save(state, storage_writer=Writer("/data/step-1000"))
    dcp.load(state, storage_reader=Reader("/data/step-1000"))

The format is that of PyTorch's ``FileSystemWriter``: its ``FileSystemReader`` reads what is written here, and
the reverse. Plans, resharding and metadata are PyTorch's; only the bytes of tensors move in another way.
Checkpoints must lie on a mount of gpunvme.
"""

import copy
import dataclasses
import functools
import io
import os
import pickle
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config

from gpunvme._batches import perform
from gpunvme._file import File
from gpunvme._file import open as open_file
from gpunvme._parts import read_part, runs
from gpunvme._replace import replaced
from gpunvme._types import AnyPath, Require
from gpunvme.torch import ALIGNMENT, bytes_of, layout, map_tensors, records

__all__ = ["Reader", "Writer"]

#: Tensors of fewer bytes are saved by way of host memory, together with what surrounds them.
_SMALL = 64 << 10
#: The name of what a checkpoint of all ranks holds; that of one rank has a prefix.
_METADATA = ".metadata"
#: Files that are open at once: a checkpoint may have more than a process may have open.
_OPEN = 64


class Reader(FileSystemReader):  # type: ignore[misc]
    """Reads a checkpoint: into GPU memory where a tensor lies there, each rank what it needs.

    Args:
        path: the checkpoint's folder.
        require: a demand on the route, as for :meth:`gpunvme.File.read_into`.
    """

    def __init__(self, path: AnyPath, *, require: Require | None = None) -> None:
        super().__init__(os.fsdecode(path))
        self._require = require
        #: Tensors without bytes, by what was pickled of them: many tensors of a model are alike.
        self._known: dict[bytes, Any] = {}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Reads what a plan asks for."""
        others: list[ReadItem] = []
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO or info.transform_descriptors:
                others.append(item)
            else:
                by_file.setdefault(info.relative_path, []).append(item)
        resolved: list[tuple[ReadItem, torch.Tensor]] = []

        def whole(names: list[str], files: ExitStack) -> Iterator[tuple[File, Any, int, int]]:
            for name in names:
                path = self.fs.concat_path(self.path, name)
                file = files.enter_context(open_file(path))
                with self.fs.create_stream(path, "rb") as stream:
                    items = by_file[name]
                    items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
                    for item in items:
                        info = self.storage_data[item.storage_index]
                        try:
                            saved, begin = self._layout(self._slice_file(stream, info), info.length)
                        except ValueError:
                            others.append(item)  # what PyTorch's own reader makes of it is right
                            continue
                        target = planner.resolve_tensor(item).detach()
                        resolved.append((item, target))
                        offset = info.offset + begin + saved.storage_offset() * saved.itemsize
                        yield from self._read(file, saved, offset, item, target)

        names = list(by_file)
        for first in range(0, len(names), _OPEN):
            with ExitStack() as files:
                perform(whole(names[first : first + _OPEN], files), require=self._require)
        for item, target in resolved:
            planner.commit_tensor(item, target)
        return super().read_data(dataclasses.replace(plan, items=others), planner)

    def _layout(self, part: IO[bytes], length: int) -> tuple[torch.Tensor, int]:
        """What a part of a file holds: a tensor without bytes, and where in the part they begin.

        Raises:
            ValueError: they do not lie there one after the other, as they are in memory.
        """
        try:
            archive = torch._C.PyTorchFileReader(part)
            pickled, order = archive.get_record("data.pkl"), archive.get_record("byteorder")
            name, *more = (name for name in archive.get_all_records() if name.startswith("data/"))
            begin = archive.get_record_offset(name)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        if pickled not in self._known:
            part.seek(0)
            self._known[pickled] = layout(part, "a part of a checkpoint")
        saved = self._known[pickled]
        plain = (
            isinstance(saved, torch.Tensor)
            and saved.layout == torch.strided
            and saved.is_contiguous()
            and not (saved.is_quantized or saved.is_conj() or saved.is_neg() or saved.is_meta or more)
            and order == sys.byteorder.encode()
            and begin + saved.untyped_storage().nbytes() <= length
        )
        if not plain:
            raise ValueError("no tensor whose bytes lie one after the other")
        return saved, begin

    def _read(
        self, file: File, saved: torch.Tensor, offset: int, item: ReadItem, target: torch.Tensor
    ) -> Iterator[tuple[File, Any, int, int]]:
        """Reads a box of a tensor, or says what is to be read where that is one range of the file."""
        if target.size() != torch.Size(item.lengths):
            raise ValueError(f"{item.dest_index.fqn}: {target.size()} is to hold {torch.Size(item.lengths)}")
        if target.numel() == 0:
            return
        bounds = [(at, at + size) for at, size in zip(item.storage_offsets, item.lengths, strict=True)]
        starts, run = runs(saved.shape, bounds)
        if run == target.numel() and target.is_contiguous() and target.dtype == saved.dtype:
            yield file, target, offset + next(starts) * saved.itemsize, target.nbytes
            return

        def empty(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.empty(shape, dtype=saved.dtype, device=target.device)

        part = read_part(file, offset, saved.shape, bounds, empty, require=self._require)
        target.copy_(part)


class Writer(FileSystemWriter):  # type: ignore[misc]
    """Writes a checkpoint: GPU memory from where it lies, each rank one file.

    A checkpoint that is there stays what it was until the new one takes its place, durably, by its metadata;
    then its files go. A reader has one or the other, or an error where files went after it had begun.

    Args:
        path: the checkpoint's folder.
        snapshot_on_gpu: whether ``async_save`` copies tensors on their GPU, which needs as much memory of
            it, and not to the host.
        sync_files: whether the files are durable when the checkpoint is done.
        overwrite: whether a checkpoint that is there may be replaced.
        require: a demand on the route, as for :meth:`gpunvme.File.write_from`.
    """

    def __init__(
        self,
        path: AnyPath,
        *,
        snapshot_on_gpu: bool = False,
        sync_files: bool = True,
        overwrite: bool = True,
        require: Require | None = None,
    ) -> None:
        super().__init__(os.fsdecode(path), sync_files=sync_files, overwrite=overwrite)
        self._snapshot_on_gpu = snapshot_on_gpu
        self._require = require

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """The copy that ``async_save`` writes while training goes on."""
        if not self._snapshot_on_gpu:
            return super().stage(state_dict)
        snapshot = map_tensors(state_dict, lambda tensor: tensor.detach().clone(), copy.deepcopy)
        # The thread that writes has a stream of its own.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return snapshot

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Writes what a plan asks for."""
        prefix = plan.storage_data.prefix
        if not _named(self.path, "", _METADATA):
            # No checkpoint is here: what this rank has is of saves that did not end, or of a node whose
            # folder is its own and has no metadata.
            self._remove(_named(self.path, prefix, DEFAULT_SUFFIX))
        # No file of another save has its name, whose metadata may still be there.
        name = f"{prefix}0-{secrets.token_hex(8)}{DEFAULT_SUFFIX}"
        results: list[WriteResult] = []
        with open_file(self.fs.concat_path(self.path, name), "w") as file:
            perform(
                ((file, *what) for what in self._layout(name, plan.items, planner, results)),
                write=True,
                require=self._require,
            )
            if self.sync_files:
                file.sync()
                _sync(self.path)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes what the checkpoint holds, by which it exists, and removes the one before.

        PyTorch's own takes the old metadata away first, and in 2.11 syncs the new ones before Python has
        written all of them.
        """
        alone = not getattr(self, "use_collectives", True) and self.rank is not None
        prefix = f"__{self.rank}" if alone else ""
        written = [result for of_rank in results for result in of_rank]
        metadata.storage_data = {result.index: result.storage_data for result in written}
        metadata.storage_meta = self.storage_meta()
        if version := getattr(filesystem, "CURRENT_DCP_VERSION", None):
            metadata.version = version
        with replaced(os.path.join(self.path, f"{prefix}{_METADATA}")) as path, open(path, "wb") as file:
            file.write(pickle.dumps(metadata))
            if self.sync_files:
                file.flush()
                os.fsync(file.fileno())
        # Of a save of the other kind (one for all ranks, or one of each) the files stay.
        others = _named(self.path, "", _METADATA)
        if (_METADATA not in others) if alone else others == {_METADATA}:
            refers_to = {info.relative_path for info in metadata.storage_data.values()}
            self._remove(_named(self.path, f"{prefix}_" if alone else "__", DEFAULT_SUFFIX) - refers_to)

    def _remove(self, names: set[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))

    def _layout(
        self, name: str, items: list[WriteItem], planner: SavePlanner, results: list[WriteResult]
    ) -> Iterator[tuple[Any, int, int]]:
        """Says what is to be written, where, and how many bytes it has: the bytes of tensors, and what
        surrounds them, which is in host memory."""
        end = 0

        def place(item: WriteItem, length: int, offset: int) -> None:
            nonlocal end
            end = offset + length
            where = _StorageInfo(name, offset, length)
            results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=where))

        for item in sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO):
            data = planner.resolve_data(item)
            if isinstance(data, torch.Tensor):
                tensor = data.detach()
                if _is_large(tensor):
                    tensor = _compact(tensor)
                    kind = tensor.dtype, tensor.size(), tensor.stride(), tensor.nbytes
                    head, tail = _frame(*kind, tensor.is_conj(), tensor.is_neg())
                    start = -(-end // ALIGNMENT) * ALIGNMENT
                    place(item, len(head) + tensor.nbytes + len(tail), start)
                    first = tensor.storage_offset() * tensor.itemsize
                    content = bytes_of(tensor.untyped_storage())[first : first + tensor.nbytes]
                    yield head, start, len(head)
                    yield content, start + len(head), tensor.nbytes
                    yield tail, start + len(head) + tensor.nbytes, len(tail)
                    continue
                data = io.BytesIO()
                torch.save(_alone(tensor).cpu(), data)
            start, pickled = end, data.getbuffer()
            place(item, len(pickled), start)
            yield pickled, start, len(pickled)


def _is_large(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are written from where they lie."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
        and tensor.nbytes >= _SMALL
    )


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that has its bytes one after the other, or else in a memory of its own."""
    if tensor.is_contiguous():
        return tensor
    if tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _named(folder: str | os.PathLike[str], prefix: str, suffix: str) -> set[str]:
    """The names in a folder that begin and end so."""
    return {name for name in os.listdir(folder) if name.startswith(prefix) and name.endswith(suffix)}


def _sync(path: str | os.PathLike[str]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shares its memory with no other: all of it is saved."""
    if type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_quantized:
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    return tensor


@functools.lru_cache(maxsize=256)
def _frame(
    dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], nbytes: int, conj: bool, neg: bool
) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and after the bytes of such a tensor in host memory."""
    with ExitStack() as closed:
        memory, file = (os.memfd_create("gpunvme", os.MFD_CLOEXEC) for _ in range(2))
        closed.callback(os.close, memory)
        closed.callback(os.close, file)
        # Memory that is never touched, and so is none.
        storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{memory}", True, nbytes)
        tensor = torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)
        if conj:
            tensor = tensor.conj()
        if neg:
            tensor = torch._neg_view(tensor)
        path = f"/proc/self/fd/{file}"
        with config.patch("save.storage_alignment", ALIGNMENT), torch.serialization.skip_data():
            torch.save(tensor, path)
        ((start, length),) = records(path, path).items()
        end = start + length
        return os.pread(file, start, 0), os.pread(file, os.fstat(file).st_size - end, end)
