"""Samples of a data set, read straight into batches on a GPU.

    from torch.utils.data import DataLoader
    from gpunvme.data import Batches, Files

    samples = Files(paths, labels)
    loader = DataLoader(samples, batch_size=256, shuffle=True, collate_fn=list)
    for batch in Batches(loader, "cuda"):
        batch[0]            # the bytes of the first sample, a view of the batch's memory
        batch.samples[0]    # its path, and its label

A data set here says where samples lie: in files of their own (:class:`Files`), in records of one length
(:class:`Records`), in shards of tar (:class:`Tars`). It reads none, so a DataLoader shuffles, samples and
batches them at no cost, by workers or without, and hands on lists (``collate_fn=list``).
:class:`Batches` reads them: some batches ahead, in this process, where CUDA is. Workers would have to copy
through shared memory what is read here to its place.
"""

import bisect
import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, default_collate

from gpunvme._native import BatchReader
from gpunvme._types import AnyPath, Require

__all__ = ["Batch", "Batches", "Files", "Records", "Sample", "Tars"]

#: What a sample is aligned to in its batch, in bytes: blocks for what a device writes there itself, and
#: for small ones what any dtype needs.
_LARGE, _SMALL = 4096, 64
#: Samples of as many bytes are large.
_FROM = 64 << 10
#: What hands on samples as they are.
_COLLATE = "use DataLoader(…, collate_fn=list)"


class Sample(NamedTuple):
    """Where a sample lies."""

    #: Its file.
    path: str
    #: Where it begins in the file, in bytes.
    offset: int = 0
    #: Its length in bytes; None for all of the file.
    length: int | None = None
    #: What else is known of it: a label, the name of a member.
    extra: Any = None


class Files(Dataset[Sample]):  # type: ignore[misc]
    """A sample in each file.

    Args:
        paths: the files.
        extras: what goes with each, such as a label; as many as there are files.
    """

    def __init__(self, paths: Iterable[AnyPath], extras: Sequence[Any] | None = None) -> None:
        self._paths = _listed(paths)
        if extras is not None and len(extras) != len(self._paths):
            raise ValueError(f"{len(extras)} extras for {len(self._paths)} files")
        self._extras = extras

    def __repr__(self) -> str:
        return f"Files({len(self)} files)"

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Sample:
        extra = None if self._extras is None else self._extras[index]
        return Sample(self._paths[index], extra=extra)


class Records(Dataset[Sample]):  # type: ignore[misc]
    """Samples of one length, one after the other in one file or several.

    Args:
        paths: the files, in order.
        nbytes: length of a record in bytes.
        header: bytes at the beginning of each file that belong to no record.

    Raises:
        ValueError: a file does not end with a whole record.
        OSError: a file cannot be found.
    """

    def __init__(self, paths: Iterable[AnyPath], nbytes: int, *, header: int = 0) -> None:
        if nbytes <= 0 or header < 0:
            raise ValueError("a record has at least one byte, and a header at least none")
        self._paths = _listed(paths)
        self._nbytes, self._header = nbytes, header
        counts = []
        for path in self._paths:
            count, rest = divmod(os.path.getsize(path) - header, nbytes)
            if count < 0 or rest:
                raise ValueError(f"{path}: {rest} bytes are left behind {max(count, 0)} records of {nbytes}")
            counts.append(count)
        self._ends = list(accumulate(counts))

    def __repr__(self) -> str:
        return f"Records({len(self)} records of {self._nbytes} bytes in {len(self._paths)} files)"

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = bisect.bisect_right(self._ends, index)
        first = self._ends[file - 1] if file else 0
        return Sample(self._paths[file], self._header + (index - first) * self._nbytes, self._nbytes, index)


class Tars(Dataset[Sample]):  # type: ignore[misc]
    """A sample in each member of shards of tar that are not compressed. ``extra`` is the member's name.

    Making it reads the shards' headers, once; it can be pickled, and kept.

    Args:
        shards: the files.
        match: says of the name of a member whether it is a sample; without it every regular file is.

    Raises:
        tarfile.TarError: a shard is no tar, is compressed, or ends in the middle.
    """

    def __init__(self, shards: Iterable[AnyPath], match: Callable[[str], bool] | None = None) -> None:
        self._samples: list[Sample] = []
        for shard in _listed(shards):
            try:
                self._samples += _members(shard, match)
            except tarfile.TarError as error:
                raise type(error)(f"{shard}: {error}") from error

    def __repr__(self) -> str:
        return f"Tars({len(self)} samples)"

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


class Batch:
    """Samples in memory. ``batch[i]`` is a view of the bytes of one; iterating gives all."""

    def __init__(self, samples: list[Sample], memory: torch.Tensor, places: list[tuple[int, int]]) -> None:
        #: What was read, in order.
        self.samples = samples
        #: All of the memory: a tensor of bytes, in which samples are aligned.
        self.memory = memory
        self._places = places

    def __repr__(self) -> str:
        return f"Batch({len(self)} samples, {self.memory.numel()} bytes on {self.memory.device})"

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> torch.Tensor:
        start, length = self._places[index]
        return self.memory[start : start + length]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[index] for index in range(len(self)))

    def stack(self, dtype: torch.dtype = torch.uint8, shape: Sequence[int] = (-1,)) -> torch.Tensor:
        """The samples as one tensor, whose first dimension is the sample. Nothing is copied.

        Args:
            dtype: what the bytes are.
            shape: of a sample; one length may be -1.

        Raises:
            ValueError: they are not of one length, or the length fits neither dtype nor shape.
        """
        lengths = {length for _, length in self._places}
        if len(lengths) != 1:
            raise ValueError(f"samples of {len(lengths)} lengths are no tensor")
        (length,) = lengths
        if length % dtype.itemsize:
            raise ValueError(f"{length} bytes are no whole number of {dtype}")
        # All are of one length, so they are as far from one another.
        stride = self._places[1][0] - self._places[0][0] if len(self) > 1 else length
        items = self.memory[: length // dtype.itemsize * dtype.itemsize].view(dtype)
        rows = items.as_strided((len(self), length // dtype.itemsize), (stride // dtype.itemsize, 1))
        try:
            return rows.unflatten(1, tuple(shape))
        except RuntimeError as error:
            raise ValueError(f"{length} bytes of {dtype} are not of shape {tuple(shape)}") from error


class Batches:
    """Batches of samples, read some ahead of the one in use.

    Args:
        loader: gives lists of :class:`Sample`: a DataLoader with ``collate_fn=list``, or anything iterable.
        device: where the memory of batches lies: ``"cuda:0"``, ``"cpu"``.
        ahead: batches that are read while one is in use. Each has memory of its own.
        threads: that open files and read, for all batches together: native ones, which do not need the
            interpreter.
        skip: batches that are left out of the first iteration, to go on in the middle of an epoch. They are
            not read.
        require: a demand on the route, as for :meth:`gpunvme.File.read_into`.

    Raises:
        TypeError: the loader, or a batch of it, has no lists of samples.
        gpunvme.Error: while iterating, a file cannot be opened or read; it names the file.
        EOFError: while iterating, a file ends before a sample does.
    """

    def __init__(
        self,
        loader: Iterable[Sequence[Sample]],
        device: Any = "cuda",
        *,
        ahead: int = 2,
        threads: int = 8,
        skip: int = 0,
        require: Require | None = None,
    ) -> None:
        if ahead < 1 or threads < 1 or skip < 0:
            raise ValueError("at least one batch ahead and one thread, and at least none skipped")
        if getattr(loader, "collate_fn", None) is default_collate:
            raise TypeError(f"the loader makes tensors of samples: {_COLLATE}")
        self._loader, self._ahead, self._threads, self._skip = loader, ahead, threads, skip
        self._device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self._require = require

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._skip)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        skip, self._skip = self._skip, 0
        planned: Iterator[Sequence[Sample]] = islice(iter(self._loader), skip, None)
        stream = None
        if self._device.type == "cuda":
            torch.cuda.init()  # says why there is no CUDA
            stream = torch.cuda.Stream(self._device)
        in_flight: deque[Future[Batch]] = deque()
        reader = BatchReader(self._threads)

        def give_up() -> None:
            reader.stop()
            for batch in in_flight:
                batch.cancel()

        with ExitStack() as ending:
            # One for each batch that is read ahead, which waits for the reader's threads.
            leaders = ending.enter_context(ThreadPoolExecutor(self._ahead, "gpunvme-batch"))
            ending.callback(give_up)

            def begin() -> None:
                nonlocal planned
                try:
                    for samples in islice(planned, 1):
                        in_flight.append(leaders.submit(self._read, list(samples), stream, reader))
                except Exception as error:
                    # It is raised in its turn, and is the end: the batches before it are whole.
                    planned = iter(())
                    in_flight.append(_failed(error))

            for _ in range(self._ahead):
                begin()
            while in_flight:
                batch = in_flight.popleft().result()
                begin()
                if stream is not None:
                    # Its memory is given to another batch when the stream in use now is done with it.
                    batch.memory.record_stream(torch.cuda.current_stream(self._device))
                yield batch

    def _read(self, samples: list[Sample], stream: "torch.cuda.Stream | None", reader: BatchReader) -> Batch:
        """Reads a batch: each file is opened once, and is one request."""
        by_path: dict[str, list[int]] = {}
        for at, sample in enumerate(samples):
            if not isinstance(sample, Sample):
                raise TypeError(f"a batch has a {type(sample).__name__} in the place of a Sample: {_COLLATE}")
            by_path.setdefault(sample.path, []).append(at)
        with reader.open(list(by_path)) as files:
            lengths = [0] * len(samples)
            for whole, places in zip(files.sizes, by_path.values(), strict=True):
                for at in places:
                    _, offset, length, _ = samples[at]
                    if offset > whole:
                        raise EOFError(f"{samples[at].path}: it has {whole} bytes, and no sample at {offset}")
                    lengths[at] = whole - offset if length is None else length
            starts, end = [], 0
            for length in lengths:
                starts.append(_aligned(end, length))
                end = starts[-1] + length
            parts = [
                [(starts[at], samples[at].offset, lengths[at]) for at in places if lengths[at]]
                for places in by_path.values()
            ]
            # On a stream of its own, for whose kernels nothing has to wait.
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                memory = torch.empty(end, dtype=torch.uint8, device=self._device)
                moved = files.read_into(memory, parts, require=self._require)
        for path, of_file, arrived in zip(by_path, parts, moved, strict=True):
            wanted = sum(length for _, _, length in of_file)
            if arrived < wanted:
                raise EOFError(f"{path}: the file ended {wanted - arrived} bytes too early")
        return Batch(samples, memory, list(zip(starts, lengths, strict=True)))


def _failed(error: Exception) -> Future[Batch]:
    """A batch that is none. The traceback of the error does not refer to it, as it would to a local variable
    of whoever caught it."""
    failed: Future[Batch] = Future()
    failed.set_exception(error)
    return failed


def _listed(paths: Iterable[AnyPath]) -> list[str]:
    """Paths as texts."""
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise TypeError(f"{os.fsdecode(paths)!r} is one path: give a list of them")
    return [os.fsdecode(path) for path in paths]


def _members(shard: str, match: Callable[[str], bool] | None) -> Iterator[Sample]:
    """The samples of a shard of tar."""
    length = os.path.getsize(shard)
    with tarfile.open(shard, "r:") as archive:
        for member in archive:
            if not member.isreg() or member.issparse():
                continue
            if match is not None and not match(member.name):
                continue
            if member.offset_data + member.size > length:
                raise tarfile.ReadError(f"it ends within {member.name}")
            yield Sample(shard, member.offset_data, member.size, member.name)
        # What is no header ends the shard for tarfile as well: a shard ends with blocks of zeros.
        if _block(shard, archive.offset) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"it ends, or is damaged, at {archive.offset}")


def _block(shard: str, offset: int) -> bytes:
    with open(shard, "rb") as file:
        file.seek(offset)
        return file.read(tarfile.BLOCKSIZE)


def _aligned(end: int, length: int) -> int:
    """Where a sample begins that follows others of so many bytes."""
    alignment = _LARGE if length >= _FROM else _SMALL
    return -(-end // alignment) * alignment
