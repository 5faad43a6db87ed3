"""Files of a gpunvme mount, read straight into tensors and arrays, and written from them.

    import gpunvme, torch

    f = gpunvme.open("/data/model.bin")
    t = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    done = f.read_into(t)
    print(done.bytes, done.routes, done.reason)

``gpunvme.safetensors`` loads and saves models, ``gpunvme.torch`` state dicts and distributed
checkpoints. Neither PyTorch nor CUDA is loaded before it is used.
"""

from gpunvme._doctor import doctor
from gpunvme._error import (
    Error,
    ExistsError,
    IsDirectoryError,
    NotDirectoryError,
    NotFoundError,
    NotPermittedError,
    OfParentError,
)
from gpunvme._file import File, open
from gpunvme._include import get_include
from gpunvme._load import load
from gpunvme._native import Attached, Buffer, Extent, GpuArray, GpuRing, Mount, Pending, Transfer, __version__
from gpunvme._stage import stage, stage_async

__all__ = [
    "__version__",
    "open",
    "File",
    "Mount",
    "Buffer",
    "Transfer",
    "Pending",
    "Extent",
    "GpuRing",
    "GpuArray",
    "Attached",
    "get_include",
    "Error",
    "ExistsError",
    "IsDirectoryError",
    "NotDirectoryError",
    "NotFoundError",
    "NotPermittedError",
    "OfParentError",
    "doctor",
    "stage",
    "stage_async",
    "load",
]
