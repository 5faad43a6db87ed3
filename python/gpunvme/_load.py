"""Models of a store that are loaded while they arrive in a volume."""

import os
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from gpunvme import _arrays
from gpunvme._batches import DEPTH, batches
from gpunvme._file import File
from gpunvme._file import open as open_file
from gpunvme._follow import Follower, Lent
from gpunvme._native import Pending
from gpunvme._stage import Progress, Quota, limits, running, stage
from gpunvme._types import AnyPath, Require
from gpunvme.safetensors import header_of, shards_of

_MODEL = ".safetensors"
_INDEX = ".safetensors.index.json"
#: How often the command is run until it has told to the end.
_TRIES = 5


def load(
    url: AnyPath,
    root: AnyPath | None = None,
    *,
    device: Any = "cpu",
    framework: str = "pt",
    published: bool = False,
    pin: bool = False,
    quota: Quota | None = None,
    progress: Progress | None = None,
    require: Require | None = None,
) -> dict[str, Any]:
    """Brings a model in the format of safetensors into a folder below ``root``, as :func:`stage` does, and
    meanwhile its tensors into memory: what has arrived goes to both from where it arrived.

    What is returned was checked, as each file is before it appears. What is in the folder already is read
    from there, and so is what comes faster than it can be copied; of several processes one fetches, and the
    others read when it is done.

    Args:
        url: a place as for :func:`stage`: a file of safetensors, or what has one, or what has a sharded
            model with its index. All that is there comes into the folder.
        root: the folder that sets lie in, of a gpunvme mount; ``$GPUNVME_STAGE`` without it.
        device: where tensors come to lie: ``"cuda:0"``, a number of a GPU, ``"cpu"``.
        framework: ``"pt"`` for tensors of PyTorch, ``"np"`` for arrays of NumPy.
        published: fail unless the set was published whole.
        pin: never evict the set.
        quota: what the sets below ``root`` may hold together, as for :func:`stage`.
        progress: is called with the bytes that have arrived and those that are to, on another thread.
        require: a demand on the route of what is read from the volume, as for :meth:`gpunvme.File.read_into`.

    Returns:
        The tensors by their names.

    Raises:
        ValueError: there is no model, or there are several; or a file is none of safetensors.
        FileNotFoundError: the command ``gpunvme`` is not installed.
        RuntimeError: what the command could not do.
        gpunvme.Error: the root lies on no mount of gpunvme, or cannot be read.
    """
    arrays = _arrays.framework(framework, device)
    # Which files the model has is to be known before they come.
    folder = stage(url, root, include=[f"*{_INDEX}"], published=published, pin=pin, quota=quota)
    indices = sorted(folder.glob(f"*{_INDEX}"))
    shards = None
    if len(indices) == 1:
        shards = {os.path.basename(path): names for path, names in shards_of(indices[0])}
    for _ in range(_TRIES):
        follower = Follower()
        with ExitStack() as open_files, closing(follower):
            model = _Model(folder, shards, arrays, open_files)
            options = limits(quota, root)
            with running(url, folder, (), published, pin, progress, follower, options):
                is_told = model.read(follower, require)
        # A program that was stopped for a while is told no more. All is there then.
        if is_told:
            return model.tensors()
    raise RuntimeError(f"{folder}: gpunvme hydrate never said all that is there: is it another version?")


class _Model:
    """The files of a model, as they arrive."""

    def __init__(
        self,
        folder: Path,
        shards: dict[str, set[str] | None] | None,
        arrays: _arrays.Framework,
        open_files: ExitStack,
    ) -> None:
        self._folder, self._shards, self._arrays, self._open_files = folder, shards, arrays, open_files
        self._arriving: dict[str, _Arriving] = {}

    def read(self, follower: Follower, require: Require | None) -> bool:
        """Brings into memory what there is, when it is; until the command says no more. Whether that was
        all."""
        in_flight: deque[tuple[Pending, File, int]] = deque()
        is_told = False

        def finish() -> None:
            pending, file, length = in_flight.popleft()
            moved = pending.result().bytes
            if moved < length:
                raise EOFError(f"{file.name}: the file ended {length - moved} bytes too early")

        for event in follower.events():
            ((kind, what),) = event.items()
            if kind == "ended":
                is_told = True
                continue
            for file, pairs, length in batches(self._ready(kind, what)):
                if len(in_flight) == DEPTH:
                    finish()
                in_flight.append((file.submit_read_into(pairs, require=require), file, length))
        while in_flight:
            finish()
        return is_told

    def _ready(self, kind: str, what: dict[str, Any]) -> Iterator[tuple[File, Any, int, int]]:
        """What can be read from the volume that could not before the event, and where to."""
        name = what["name"]
        lent: Lent | None = what.get("memory")
        if not self._is_wanted(name):
            if lent is not None:
                lent.give_back()
            return
        if kind == "dropped":
            # It begins anew, in another file.
            if (dropped := self._arriving.pop(name, None)) is not None:
                dropped.give_back()
            return
        arriving = self._arriving.get(name)
        if arriving is None:
            wanted = None if self._shards is None else self._shards[name]
            arriving = _Arriving(str(self._folder / name), what["size"], wanted, self._arrays)
            self._arriving[name] = arriving
        first, length = (0, what["size"]) if kind == "there" else (what["offset"], what["len"])
        if lent is None:
            path = self._folder / name
            if kind == "written":
                path = self._folder / ".gpunvme-stage" / "partial" / what["partial"]
            try:
                arriving.file = arriving.file or self._open_files.enter_context(open_file(path))
            except FileNotFoundError:
                if kind == "there":
                    raise
                # It has its own name by now, and that is said next.
                return
            status = os.fstat(arriving.file.fileno())
            if kind == "there" and (status.st_size, status.st_mtime_ns) != (what["size"], what["modified"]):
                raise RuntimeError(f"{path}: it became another file while it was loaded")
        yield from arriving.add(first, first + length, lent or arriving.file, kind == "there")

    def _is_wanted(self, name: str) -> bool:
        if self._shards is not None:
            return name in self._shards
        if "/" in name or not name.endswith(_MODEL):
            return False
        if self._arriving and name not in self._arriving:
            raise ValueError(f"{self._folder}: which one is meant, of {name}, {', '.join(self._arriving)}?")
        return True

    def tensors(self) -> dict[str, Any]:
        """All of them."""
        if self._shards is not None and (absent := self._shards.keys() - self._arriving.keys()):
            raise ValueError(f"{self._folder}: the model's index names {min(absent)}, which is not there")
        if not self._arriving:
            raise ValueError(f"{self._folder}: there is no model in the format of safetensors")
        found: dict[str, Any] = {}
        for name, arriving in self._arriving.items():
            if not arriving.is_whole():
                raise RuntimeError(f"{self._folder / name}: it did not arrive as a whole")
            found |= arriving.tensors
        return found


class _Ranges:
    """Bytes of a file, as pairs of the first and the one behind the last, apart and in their order."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, first: int, last: int) -> None:
        before = [part for part in self._ranges if part[1] < first]
        after = [part for part in self._ranges if part[0] > last]
        joined = [(first, last), *self._ranges[len(before) : len(self._ranges) - len(after)]]
        self._ranges = [*before, (min(joined)[0], max(part[1] for part in joined)), *after]

    def gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """What is missing there."""
        missing = []
        for start, end in self._ranges:
            if end > first and start < last:
                if start > first:
                    missing.append((first, start))
                first = end
        return [*missing, (first, last)] if first < last else missing


class _Arriving:
    """A file that arrives: which bytes of it are there, and what of them is in memory."""

    def __init__(self, path: str, size: int, wanted: set[str] | None, arrays: _arrays.Framework) -> None:
        #: In the volume, once something is to be read from there.
        self.file: File | None = None
        self.tensors: dict[str, Any] = {}
        self._path, self._size, self._wanted, self._arrays = path, size, wanted, arrays
        self._there = _Ranges()
        #: What came before the header is known: the first byte, the one behind the last, and where it lies.
        self._waiting: list[tuple[int, int, Lent | File]] = []
        #: Where tensors begin in the file, and their bytes in memory; once the header is known.
        self._places: list[tuple[int, int, Any]] | None = None

    def add(
        self, first: int, last: int, source: Lent | File | None, is_checked: bool
    ) -> Iterator[tuple[File, Any, int, int]]:
        """Bytes are there. What is lent is copied; yields what is to be read from the volume: the file, the
        memory, the place in the file and the length."""
        assert source is not None
        gaps = self._there.gaps(first, last)
        if isinstance(source, Lent) and gaps != [(first, last)]:
            # Copied in pieces it would be given back more than once. The volume has the rest.
            source.give_back()
            return
        self._waiting += [(*gap, source) for gap in gaps]
        self._there.add(first, last)
        if self._places is None:
            try:
                self._places = self._tensors()
            except (ValueError, RuntimeError, struct.error):
                # What was not checked may be damaged, and then begins anew.
                if is_checked:
                    raise
        if self._places is None:
            return
        while self._waiting:
            first, last, source = self._waiting.pop()
            parts = list(self._parts(first, last))
            if isinstance(source, Lent):
                source.copy_into(parts)
                source.give_back()
            else:
                yield from ((source, memory, offset, len(memory)) for memory, offset in parts)

    def is_whole(self) -> bool:
        """Whether all of it was there, and is in memory."""
        return self._places is not None and not self._waiting and not self._there.gaps(0, self._size)

    def give_back(self) -> None:
        """Gives back what waits."""
        for _, _, source in self._waiting:
            if isinstance(source, Lent):
                source.give_back()

    def _parts(self, first: int, last: int) -> Iterator[tuple[Any, int]]:
        """The memory where bytes of the file belong, with their places in the file."""
        assert self._places is not None
        begins_behind = bisect_right(self._places, first, key=lambda place: place[1])
        for start, end, memory in self._places[begins_behind:]:
            if start >= last:
                break
            low, high = max(start, first), min(end, last)
            yield memory[low - start : high - start], low

    def _tensors(self) -> list[tuple[int, int, Any]] | None:
        """Makes the tensors, if the header is there."""
        if self._there.gaps(0, self._size):
            if self._there.gaps(0, 8):
                return None
            (length,) = struct.unpack("<Q", self._read(8, 0))
            if self._there.gaps(0, 8 + length):
                return None
        entries = header_of(self._path, self._size, self._read).entries
        if self._wanted is not None and (absent := self._wanted - entries.keys()):
            raise ValueError(f"{self._path}: the model's index says that it has {min(absent)!r}")
        places = []
        for name, entry in entries.items():
            if self._wanted is None or name in self._wanted:
                tensor = self.tensors[name] = self._arrays.empty(entry.shape, entry.dtype)
                if entry.length > 0:
                    bytes_of = self._arrays.bytes_of(tensor)
                    places.append((entry.offset, entry.offset + entry.length, bytes_of))
        return places

    def _read(self, length: int, offset: int) -> bytes:
        """Bytes of what waits."""
        found = b""
        for first, last, source in sorted(self._waiting, key=lambda part: part[0]):
            at = offset + len(found)
            if first <= at < last and len(found) < length:
                wanted = min(length - len(found), last - at)
                if isinstance(source, Lent):
                    found += source.read(wanted, at)
                else:
                    found += os.pread(source.fileno(), wanted, at)
        return found
