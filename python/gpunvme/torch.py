"""State dicts of PyTorch, in the format of ``torch.save``, straight between files and GPU memory.

    import gpunvme.torch

    gpunvme.torch.save(model.state_dict(), "/data/model.pt")
    model.load_state_dict(gpunvme.torch.load("/data/model.pt", "cuda"))

``torch.load`` reads what is saved here, and what ``torch.save`` wrote is loaded here. Files must lie on a
mount of gpunvme.
"""

import copy
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.serialization import config

from gpunvme._batches import Progress, perform
from gpunvme._file import open as open_file
from gpunvme._replace import replaced
from gpunvme._types import AnyPath, Require

__all__ = ["load", "save"]

#: What the bytes of each tensor are aligned to in a file that is saved: blocks of the filesystem.
ALIGNMENT = 4096


def save(obj: Any, path: AnyPath, *, progress: bool | None = None, require: Require | None = None) -> None:
    """Saves an object as ``torch.save`` does, with the bytes of its tensors written from where they lie.
    The file appears under its name when all of it is durable.

    Args:
        obj: tensors in dictionaries, lists and tuples, such as a state dict, and plain values: what
            ``torch.load(path, weights_only=True)`` takes.
        path: the file; one that exists is replaced.
        progress: whether to show a bar, with tqdm; without it one is shown for more than 1 GiB, where tqdm
            is installed and standard error is a terminal.
        require: a demand on the route, as for :meth:`gpunvme.File.write_from`.

    Raises:
        ValueError: it has other objects, or tensors in them.
        gpunvme.Error: the file cannot be written.
    """
    path = os.fsdecode(path)
    with replaced(path) as temporary, open_file(temporary, "r+") as file:
        # The layout, with room for the tensors.
        with config.patch("save.storage_alignment", ALIGNMENT), torch.serialization.skip_data():
            torch.save(obj, temporary)
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor, laid_out in zip(_tensors(obj), _tensors(layout(temporary, path)), strict=True):
            storages[offset_of(laid_out)] = tensor.untyped_storage()
        saved = sum(storage.nbytes() for storage in storages.values())
        if saved != sum(records(temporary, path).values()):
            raise ValueError(
                "tensors can be saved in dictionaries, lists and tuples, and not in other objects"
            )
        with Progress(saved, os.path.basename(path), progress) as bar:
            items = [
                (file, bytes_of(storage), offset, storage.nbytes())
                for offset, storage in sorted(storages.items())
                if storage.nbytes() > 0
            ]
            perform(items, bar, write=True, require=require)
        file.sync()


def load(
    path: AnyPath,
    device: Any = None,
    *,
    map_location: Any = None,
    weights_only: bool = True,
    progress: bool | None = None,
    require: Require | None = None,
) -> Any:
    """Loads what ``torch.save`` or :func:`save` saved, as ``torch.load(path, weights_only=True)`` does, with
    the bytes of tensors read to where they are to lie.

    Args:
        path: the file.
        device: where all tensors come to lie: ``"cuda:0"``, a number of a GPU, ``"cpu"`` (the usual).
        map_location: the same, as ``torch.load`` names it.
        weights_only: as ``torch.load`` has it; only true can be had.
        progress: as for :func:`save`.
        require: a demand on the route, as for :meth:`gpunvme.File.read_into`.

    Raises:
        ValueError: it is no such file, or has what only ``torch.load`` can read: tensors that are compressed,
            sparse or quantized, files of PyTorch before 1.6; or ``weights_only`` is false.
        TypeError: ``device`` and ``map_location`` are both given, or the latter is no device.
        gpunvme.Error: the file lies on no mount of gpunvme, or cannot be read.
    """
    if not weights_only:
        raise ValueError("only weights are loaded, as with weights_only=True: torch.load loads other objects")
    if map_location is not None:
        if device is not None:
            raise TypeError("device and map_location are two names of one argument")
        if not isinstance(map_location, (str, int, torch.device)):
            raise TypeError(f"map_location has to be a device, and is of {type(map_location).__name__}")
        device = map_location
    elif device is None:
        device = "cpu"
    path = os.fsdecode(path)
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    storages: dict[int, torch.Tensor] = {}

    def real(fake: torch.Tensor) -> torch.Tensor:
        offset, length = offset_of(fake), fake.untyped_storage().nbytes()
        if lengths.get(offset, -1) < length:
            raise ValueError(f"{path}: the bytes of a tensor are not there as torch.save writes them")
        if offset not in storages:
            storages[offset] = torch.empty(length, dtype=torch.uint8, device=place)
        tensor = torch.empty(0, dtype=fake.dtype, device=place)
        tensor.set_(storages[offset].untyped_storage(), fake.storage_offset(), fake.size(), fake.stride())
        if fake.is_conj():
            tensor = tensor.conj()
        if fake.is_neg():
            tensor = torch._neg_view(tensor)
        if isinstance(fake, torch.nn.Parameter):
            return torch.nn.Parameter(tensor, fake.requires_grad)
        return tensor.requires_grad_(fake.requires_grad)

    with open_file(path) as file:
        # Another file may get the name meanwhile, as save gives it.
        here = f"/proc/self/fd/{file.fileno()}"
        lengths = records(here, path)
        loaded = map_tensors(layout(here, path), real)
        total = sum(storage.nbytes for storage in storages.values())
        with Progress(total, os.path.basename(path), progress) as bar:
            items = [
                (file, storage, offset, storage.nbytes)
                for offset, storage in sorted(storages.items())
                if storage.nbytes > 0
            ]
            perform(items, bar, require=require)
    return loaded


def layout(file: "str | IO[bytes]", what: str) -> Any:
    """What a file holds, with tensors that have no bytes and know where theirs are. ``what`` names it.

    Raises:
        ValueError: it has tensors for which there is no such thing.
    """
    try:
        with FakeTensorMode():
            return torch.load(file, weights_only=True)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{what}: only torch.load can read this: sparse or quantized tensors?") from error
    except pickle.UnpicklingError as error:
        # Its message is a page; the name stands behind this word.
        name = str(error).partition("GLOBAL ")[2].split(" ")[0]
        raise ValueError(
            f"{what}: it has other objects than tensors and plain values ({name}): "
            "torch.serialization.add_safe_globals allows them"
        ) from error


def offset_of(tensor: torch.Tensor) -> int:
    """Where in its file the bytes of a tensor of :func:`layout` begin."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    offset = tensor.untyped_storage()._checkpoint_offset if plain else None
    if offset is None:
        raise ValueError("sparse, quantized and meta tensors can be saved and loaded by PyTorch only")
    return int(offset)


def records(place: str, path: str) -> dict[int, int]:
    """The records of tensors: where in a file each begins, and its length in bytes. The file is opened at
    ``place``, and called ``path``.

    Raises:
        ValueError: their bytes are not there as they are in memory.
    """
    found: dict[int, int] = {}
    try:
        with open(place, "rb") as file, zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith("/byteorder") and archive.read(entry) != sys.byteorder.encode():
                    raise ValueError(f"{path}: from a machine of another byte order; torch.load reads it")
                if "/data/" not in entry.filename:
                    continue
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{path}: its tensors are compressed; torch.load reads it")
                # What the local header has behind its 30 bytes: the name and the extra field (APPNOTE 4.3.7).
                file.seek(entry.header_offset)
                name, extra = struct.unpack("<26x2H", file.read(30))
                found[entry.header_offset + 30 + name + extra] = entry.file_size
    except (zipfile.BadZipFile, struct.error) as error:
        raise ValueError(f"{path}: no file of torch.save, or one of PyTorch before 1.6 ({error})") from None
    return found


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of an object, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def map_tensors(
    tree: Any, change: Callable[[torch.Tensor], torch.Tensor], other: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """A copy of an object with its tensors changed, and what else it holds: dictionaries, lists and tuples
    are new. Dictionaries keep their attributes: a state dict has the versions of its modules in one."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = map_tensors(value, change, other)
        return mapped
    if isinstance(tree, list):
        return [map_tensors(value, change, other) for value in tree]
    if isinstance(tree, tuple):
        changed = [map_tensors(value, change, other) for value in tree]
        return type(tree)(*changed) if hasattr(tree, "_fields") else type(tree)(changed)
    return other(tree)
