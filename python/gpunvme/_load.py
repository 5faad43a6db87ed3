"""Models of a store that are loaded while they arrive in a volume."""

import os
import queue
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpunvme import _arrays
from gpunvme._batches import DEPTH, batches
from gpunvme._file import File
from gpunvme._file import open as open_file
from gpunvme._native import Pending
from gpunvme._stage import Event, Progress, Quota, limits, running, stage
from gpunvme._types import Require
from gpunvme.safetensors import Entry, read_header, shards_of

_MODEL = ".safetensors"
_INDEX = ".safetensors.index.json"


def load(
    url: "str | os.PathLike[str]",
    root: "str | os.PathLike[str] | None" = None,
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
    meanwhile its tensors into memory: each is read when its bytes are in the volume.

    What is returned was checked, as each file is before it appears. What is in the folder already is read
    from there; of several processes one fetches, and the others read when it is done.

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
        require: a demand on the route, as for :meth:`gpunvme.File.read_into`.

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
    with ExitStack() as files:
        model = _Model(folder, shards, arrays, files)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        with running(url, folder, (), published, pin, progress, events.put, limits(quota, root)) as process:
            try:
                model.read(events, require)
            except BaseException:
                process.terminate()
                raise
        return model.tensors()


class _Model:
    """The files of a model, as they arrive."""

    def __init__(
        self,
        folder: Path,
        shards: dict[str, set[str] | None] | None,
        arrays: _arrays.Framework,
        files: ExitStack,
    ) -> None:
        self._folder, self._shards, self._arrays, self._files = folder, shards, arrays, files
        self._arriving: dict[str, _Arriving] = {}

    def read(self, events: "queue.SimpleQueue[Event]", require: Require | None) -> None:
        """Reads what can be read, when it can; until the command says no more."""
        in_flight: deque[tuple[Pending, File, int]] = deque()

        def finish() -> None:
            pending, file, length = in_flight.popleft()
            moved = pending.result().bytes
            if moved < length:
                raise EOFError(f"{file.name}: the file ended {length - moved} bytes too early")

        while (event := events.get()) is not None:
            for file, pairs, length in batches(self._ready(event)):
                if len(in_flight) == DEPTH:
                    finish()
                in_flight.append((file.submit_read_into(pairs, require=require), file, length))
        while in_flight:
            finish()

    def _ready(self, event: dict[str, Any]) -> Iterator[tuple[File, Any, int, int]]:
        """What can be read that could not before the event, and where to."""
        ((kind, what),) = event.items()
        name = what["name"] if kind == "written" else what
        if not self._is_wanted(name):
            return
        if kind == "dropped":
            # It begins anew, in another file.
            self._arriving.pop(name, None)
            return
        arriving = self._arriving.get(name)
        if arriving is None:
            path = self._folder / name
            if kind == "written":
                path = self._folder / ".gpunvme-stage" / "partial" / what["partial"]
            try:
                file = self._files.enter_context(open_file(path))
            except FileNotFoundError:
                # It has its own name by now, and that is said next.
                return
            wanted = None if self._shards is None else self._shards[name]
            arriving = self._arriving[name] = _Arriving(file, wanted)
        first, length = (what["offset"], what["len"]) if kind == "written" else (0, arriving.file.size)
        for key, entry in arriving.add(first, first + length, kind == "there"):
            tensor = arriving.tensors[key] = self._arrays.empty(entry.shape, entry.dtype)
            if entry.length > 0:
                yield arriving.file, tensor, entry.offset, entry.length

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
        for arriving in self._arriving.values():
            found |= arriving.tensors
        return found


class _Arriving:
    """A file that arrives: which bytes of it are there, and what of it was read."""

    def __init__(self, file: File, wanted: set[str] | None) -> None:
        self.file = file
        #: What was read, or is being read.
        self.tensors: dict[str, Any] = {}
        self._wanted = wanted
        #: Apart from each other, and in their order.
        self._there: list[tuple[int, int]] = []
        #: What was not read yet, once the header is there.
        self._waiting: list[tuple[str, Entry]] | None = None

    def add(self, first: int, last: int, is_checked: bool) -> list[tuple[str, Entry]]:
        """Bytes are there; says which tensors can be read that could not before."""
        before = [part for part in self._there if part[1] < first]
        after = [part for part in self._there if part[0] > last]
        joined = [(first, last), *self._there[len(before) : len(self._there) - len(after)]]
        self._there = [*before, (min(joined)[0], max(part[1] for part in joined)), *after]
        if self._waiting is None:
            try:
                self._waiting = self._header()
            except ValueError:
                # What was not checked may be damaged, and then begins anew.
                if is_checked:
                    raise
        if self._waiting is None:
            return []
        ready = [item for item in self._waiting if self._has(item[1].offset, item[1].length)]
        self._waiting = [item for item in self._waiting if not self._has(item[1].offset, item[1].length)]
        return ready

    def _has(self, offset: int, length: int) -> bool:
        return length == 0 or any(first <= offset and offset + length <= last for first, last in self._there)

    def _header(self) -> list[tuple[str, Entry]] | None:
        """What the file has of what is wanted, if its header is there."""
        size = self.file.size
        if not self._has(0, size):
            if not self._has(0, 8):
                return None
            (length,) = struct.unpack("<Q", os.pread(self.file.fileno(), 8, 0))
            if not self._has(0, 8 + length):
                return None
        entries = read_header(self.file).entries
        if self._wanted is not None and (absent := self._wanted - entries.keys()):
            raise ValueError(f"{self.file.name}: the model's index says that it has {min(absent)!r}")
        return [item for item in entries.items() if self._wanted is None or item[0] in self._wanted]
