"""Models in the format of safetensors, read straight into tensors and written from them.

    import gpunvme.safetensors as st

    weights = st.load_file("/data/model.safetensors", device="cuda:0")
    st.save_file(weights, "/data/copy.safetensors")

The format is that of the package ``safetensors``, which is not needed; files that either writes the other
reads. Files must lie on a mount of gpunvme.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from types import EllipsisType, TracebackType
from typing import Any, NamedTuple, Self

from gpunvme._arrays import ITEM_BITS, ITEM_SIZES, Framework, check, dtype_name, framework
from gpunvme._batches import Progress, perform, performed
from gpunvme._file import File
from gpunvme._file import open as open_file
from gpunvme._parts import read_part
from gpunvme._replace import replaced
from gpunvme._types import AnyPath, Require

__all__ = ["Slice", "iter_tensors", "load_file", "safe_open", "save_file"]

#: The longest header that the format allows, in bytes.
_LONGEST_HEADER = 100_000_000
#: More dimensions than any library's tensors have.
_MOST_DIMENSIONS = 1000
#: What a saved file's first tensor is aligned to: blocks of the filesystem.
_ALIGNMENT = 4096


class Entry(NamedTuple):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    #: In the file, in bytes.
    offset: int
    length: int


class Header(NamedTuple):
    """A header that was checked: the tensors lie in the file side by side, in this order."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def read_header(file: File) -> Header:
    """Reads and checks the header of a file. It may have come from anywhere.

    Raises:
        ValueError: it is none, or does not describe the file that it is in.
    """
    return header_of(file.name, file.size, lambda length, offset: os.pread(file.fileno(), length, offset))


def header_of(path: str, size: int, read: Callable[[int, int], bytes]) -> Header:
    """As :func:`read_header`, of a file of so many bytes; ``read`` gives some, from an offset on."""

    def wrong(what: str) -> ValueError:
        return ValueError(f"{path}: not a file of safetensors: {what}")

    start = read(8, 0)
    if len(start) < 8:
        raise wrong("it has no header")
    (length,) = struct.unpack("<Q", start)
    if length > min(_LONGEST_HEADER, size - 8):
        raise wrong(f"a header of {length} bytes cannot be in it")
    text = read(length, 8)
    if len(text) < length or not text.startswith(b"{"):
        raise wrong("the header is no JSON object")
    try:
        header = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise wrong(f"the header is no JSON ({error})") from None
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
        raise wrong("its metadata are no texts")
    try:
        described = [
            (first, last, name, item["dtype"], item["shape"])
            for name, item in header.items()
            for first, last in [item["data_offsets"]]
        ]
        described.sort(key=lambda item: item[:2])
    except (KeyError, TypeError, ValueError) as error:
        raise wrong(f"a tensor is not described as it should be ({error!r})") from None
    entries = {}
    data = 8 + length
    end = data
    for first, last, name, dtype, shape in described:
        if not isinstance(dtype, str) or dtype not in ITEM_BITS:
            raise wrong(f"{name!r} has the dtype {dtype!r}, which this version does not know")
        if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
            raise wrong(f"{name!r} has a shape that is none")
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, first, last)):
            raise wrong(f"{name!r} has a shape or place that is no number")
        if data + first != end or 8 * (last - first) != math.prod(shape) * ITEM_BITS[dtype]:
            raise wrong(f"{name!r} lies where it cannot")
        entries[name] = Entry(dtype, tuple(shape), data + first, last - first)
        end = data + last
    if end != size:
        raise wrong(f"its tensors end at {end}, and the file at {size}")
    return Header(entries, metadata)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are texts that others can read, each once."""
    found = {}
    for name, value in pairs:
        name.encode()  # no half of a surrogate pair
        if name in found:
            raise ValueError(f"{name!r} stands there twice")
        found[name] = value
    return found


class Slice:
    """A tensor in a file, of which parts are read by indexing: ``f.get_slice("w")[:, 128:256]``."""

    def __init__(self, of: "safe_open", entry: Entry) -> None:
        self._of, self._entry = of, entry

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._entry.shape

    def __repr__(self) -> str:
        return f"Slice({self._entry.dtype} of shape {list(self._entry.shape)})"

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Its dtype, as the format names it: ``F32`` and the like."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> Any:
        """Reads a part: indices are integers, slices of step 1 and an ellipsis. Only its bytes are read,
        unless they are many short pieces."""
        bounds, dropped = _bounds(self._entry.shape, index)
        part = self._of._read_part(self._entry, bounds)
        shape = tuple(last - first for at, (first, last) in enumerate(bounds) if at not in dropped)
        return part.reshape(shape)


def _bounds(shape: tuple[int, ...], index: Any) -> tuple[list[tuple[int, int]], set[int]]:
    """First and last index of each dimension, and the dimensions that an integer takes away.

    Raises:
        IndexError: it is outside, has more indices than there are dimensions, or a kind or step that is
            not known.
    """
    given = list(index) if isinstance(index, tuple) else [index]
    ellipses = [at for at, item in enumerate(given) if isinstance(item, EllipsisType)]
    if len(ellipses) > 1:
        raise IndexError("an index can have one ellipsis")
    missing = len(shape) - (len(given) - len(ellipses))
    if missing < 0:
        raise IndexError(f"{len(given)} indices for a tensor of {len(shape)} dimensions")
    at = ellipses[0] if ellipses else len(given)
    given[at : at + len(ellipses)] = [slice(None)] * missing
    bounds, dropped = [], set()
    for dimension, (size, item) in enumerate(zip(shape, given, strict=True)):
        if isinstance(item, slice):
            first, last, step = item.indices(size)
            if step != 1:
                raise IndexError("a slice of a tensor in a file must have the step 1")
            bounds.append((first, max(first, last)))
            continue
        try:
            position = item.__index__()
        except AttributeError:
            raise IndexError(f"{item!r} is neither an integer nor a slice") from None
        if not -size <= position < size:
            raise IndexError(f"index {position} is out of range for a dimension of {size}")
        bounds.append((position % size, position % size + 1))
        dropped.add(dimension)
    return bounds, dropped


class safe_open:
    """A file of safetensors, of which tensors and parts of tensors are read when they are asked for.

    Args:
        filename: the file.
        framework: ``"pt"`` for tensors of PyTorch, ``"np"`` for arrays of NumPy.
        device: where tensors come to lie: ``"cuda:0"``, a number of a GPU, ``"cpu"``.
        require: a demand on the route, as for :meth:`gpunvme.File.read_into`.

    Raises:
        ValueError: it is no such file.
        gpunvme.Error: it lies on no mount of gpunvme, or cannot be opened.
    """

    def __init__(
        self, filename: AnyPath, framework: str = "pt", device: Any = "cpu", *, require: Require | None = None
    ) -> None:
        self._arrays: Framework = _framework(framework, device)
        self._require = require
        self._file = open_file(filename)
        try:
            self._header = read_header(self._file)
        except BaseException:
            self._file.close()
            raise

    def __repr__(self) -> str:
        return f"safe_open({self._file.name!r}: {len(self._header.entries)} tensors)"

    def __contains__(self, name: object) -> bool:
        return name in self._header.entries

    def keys(self) -> list[str]:
        """The names of the tensors, in the order in which they lie in the file."""
        return list(self._header.entries)

    offset_keys = keys

    def metadata(self) -> dict[str, str] | None:
        """The texts that were saved with them; None where there are none."""
        return self._header.metadata or None

    def get_tensor(self, name: str) -> Any:
        """Reads a tensor."""
        entry = self._entry(name)
        return self._read_part(entry, [(0, size) for size in entry.shape])

    def get_slice(self, name: str) -> Slice:
        """A tensor of which parts are to be read."""
        return Slice(self, self._entry(name))

    def _entry(self, name: str) -> Entry:
        entry = self._header.entries.get(name)
        if entry is None:
            raise KeyError(f"{self._file.name} has no tensor {name!r}")
        return entry

    def _read_part(self, entry: Entry, bounds: list[tuple[int, int]]) -> Any:
        def empty(shape: tuple[int, ...]) -> Any:
            return self._arrays.empty(shape, entry.dtype)

        part = read_part(self._file, entry.offset, entry.shape, bounds, empty, require=self._require)
        return self._arrays.contiguous(part)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


_framework = framework


def load_file(
    filename: AnyPath,
    device: Any = "cpu",
    *,
    framework: str = "pt",
    names: Iterable[str] | None = None,
    progress: bool | None = None,
    require: Require | None = None,
) -> dict[str, Any]:
    """Loads the tensors of a model.

    Several files, and many tensors of each, are read at once. Each tensor has memory of its own.

    Args:
        filename: a file of safetensors; or the index of a sharded model (``*.index.json``), or the folder
            that holds one or the other.
        device: where tensors come to lie: ``"cuda:0"``, a number of a GPU, ``"cpu"``.
        framework: ``"pt"`` for tensors of PyTorch, ``"np"`` for arrays of NumPy.
        names: the tensors to load; without it all.
        progress: whether to show a bar, with tqdm; without it one is shown for more than 1 GiB, where tqdm
            is installed and standard error is a terminal.
        require: a demand on the route, as for :meth:`gpunvme.File.read_into`.

    Returns:
        The tensors by their names.

    Raises:
        ValueError: it is no such file.
        KeyError: it has no tensor of a name.
        gpunvme.Error: it lies on no mount of gpunvme, or cannot be read.
    """
    return dict(
        iter_tensors(filename, device, framework=framework, names=names, progress=progress, require=require)
    )


def iter_tensors(
    filename: AnyPath,
    device: Any = "cpu",
    *,
    framework: str = "pt",
    names: Iterable[str] | None = None,
    progress: bool | None = None,
    require: Require | None = None,
) -> Iterator[tuple[str, Any]]:
    """Loads the tensors of a model one after the other, each with its name, while further ones are being
    read: for a model of which not all is to be in memory at once. What is read ahead is at most some 640
    MiB, or five tensors where those are longer than 128 MiB.

    Arguments and errors are those of :func:`load_file`.
    """
    arrays = _framework(framework, device)
    if isinstance(names, str):
        raise TypeError(f"names is one text, {names!r}: give a list of names")
    wanted = None if names is None else set(names)
    filename = os.fsdecode(filename)
    with ExitStack() as files:
        entries: list[tuple[File, str, Entry]] = []
        for path, shard_names in shards_of(filename):
            if wanted is not None and shard_names is not None and not wanted & shard_names:
                continue
            file = files.enter_context(open_file(path))
            found = read_header(file).entries
            if shard_names is not None and (absent := shard_names - found.keys()):
                raise ValueError(f"{filename} says that {path} has {min(absent)!r}, and it has not")
            entries += [
                (file, name, entry)
                for name, entry in found.items()
                if (wanted is None or name in wanted) and (shard_names is None or name in shard_names)
            ]
        if wanted is not None and (absent := wanted - {name for _, name, _ in entries}):
            raise KeyError(f"{filename} has no tensor {min(absent)!r}")

        # What is being read, by where it lies.
        at: dict[tuple[File, int], str] = {}

        def items() -> Iterator[tuple[File, Any, int, int]]:
            for file, name, entry in entries:
                if entry.length > 0:
                    at[file, entry.offset] = name
                    yield file, arrays.empty(entry.shape, entry.dtype), entry.offset, entry.length

        for _, name, entry in entries:
            if entry.length == 0:
                yield name, arrays.empty(entry.shape, entry.dtype)
        total = sum(entry.length for _, _, entry in entries)
        with Progress(total, os.path.basename(filename), progress) as bar:
            for file, pairs, length in performed(items(), require=require):
                for tensor, offset in pairs:
                    yield at.pop((file, offset)), tensor
                bar.add(length)


def shards_of(filename: AnyPath) -> list[tuple[str, set[str] | None]]:
    """The files of a model, with the tensors that each is to have, where an index says so."""
    path = os.fsdecode(filename)
    if os.path.isdir(path):
        indices = [name for name in sorted(os.listdir(path)) if name.endswith(".safetensors.index.json")]
        models = [name for name in sorted(os.listdir(path)) if name.endswith(".safetensors")]
        found = indices if len(indices) == 1 else models
        if len(found) != 1:
            raise ValueError(f"{path}: which one is meant, of {', '.join(indices + models) or 'no model'}?")
        path = os.path.join(path, found[0])
    if not path.endswith(".json"):
        return [(path, None)]
    with open(path, encoding="utf-8") as index:
        try:
            weights = json.load(index)["weight_map"]
            shards: dict[str, set[str]] = {}
            for name, file in weights.items():
                shards.setdefault(file, set()).add(name)
            if not all(isinstance(file, str) for file in shards):
                raise ValueError("a file's name is no text")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not the index of a sharded model ({error!r})") from None
    folder = os.path.dirname(path)
    for file in shards:
        if os.path.basename(file) != file:
            raise ValueError(f"{path}: {file!r} is no file beside it")
    return [(os.path.join(folder, file), names) for file, names in sorted(shards.items())]


def save_file(
    tensors: Mapping[str, Any],
    filename: AnyPath,
    metadata: Mapping[str, str] | None = None,
    *,
    progress: bool | None = None,
    require: Require | None = None,
) -> None:
    """Saves tensors as a file of safetensors, from where they lie: GPU memory is not copied to the host
    first. The file appears under its name when all of it is durable.

    Tensors that share memory, such as tied weights, are each written, and share none when they are loaded.

    Args:
        tensors: tensors of PyTorch, or arrays of NumPy or CuPy, contiguous, by their names.
        filename: the file; one that exists is replaced.
        metadata: texts to save with them.
        progress: as for :func:`load_file`.
        require: a demand on the route, as for :meth:`gpunvme.File.write_from`.

    Raises:
        ValueError: a tensor is not contiguous, or of a dtype that the format has no name for; or a name is
            none that the format has.
        TypeError: what is to be saved are no tensors by their names, or metadata are no texts.
        gpunvme.Error: the file cannot be written.
    """
    if not isinstance(tensors, Mapping):
        hint = "give its .state_dict()" if hasattr(tensors, "state_dict") else "save_file(tensors, filename)"
        raise TypeError(
            f"tensors has to be a mapping of names to tensors, not {type(tensors).__name__}: {hint}"
        )
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata has to be a mapping of texts to texts, not {type(metadata).__name__}")
    path = os.fsdecode(filename)
    for given in (*tensors, *(metadata or {}), *(metadata or {}).values()):
        if not isinstance(given, str):
            raise TypeError(f"names and metadata have to be texts, and {given!r} is none")
        given.encode()  # UnicodeEncodeError is a ValueError
    if "__metadata__" in tensors:
        raise ValueError("no tensor can have the name '__metadata__'")
    described = []
    for name, tensor in tensors.items():
        check(name, tensor)
        try:
            described.append((name, dtype_name(tensor), tensor))
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
    # As the package safetensors orders them: each then is aligned to its items.
    described.sort(key=lambda item: (-ITEM_SIZES[item[1]], item[0]))
    header: dict[str, Any] = {}
    if metadata is not None:
        header["__metadata__"] = dict(metadata)
    placed, end = [], 0
    for name, dtype, tensor in described:
        length = math.prod(tensor.shape) * ITEM_SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + length]}
        placed.append((tensor, end, length))
        end += length
    described_as = json.dumps(header, separators=(",", ":")).encode()
    described_as += b" " * (-(8 + len(described_as)) % _ALIGNMENT)
    start = struct.pack("<Q", len(described_as)) + described_as

    with replaced(path) as temporary, open_file(temporary, "r+") as file:
        file.write_from(start)
        with Progress(end, os.path.basename(path), progress) as bar:
            items = ((file, tensor, len(start) + at, length) for tensor, at, length in placed if length > 0)
            perform(items, bar, write=True, require=require)
        file.sync()
