"""gpunvme's libcufile for this process: what speaks cuFile reads and writes gpunvme mounts.

    import gpunvme.cufile  # before PyTorch, KvikIO, CuPy and whatever else loads cuFile

Libraries that ask for ``libcufile.so.0`` from then on get gpunvme's; files elsewhere still go to
NVIDIA's. Those that ask for ``libcufile.so``, as cufile-python does, and child processes need
``gpunvme run`` instead.
"""

import ctypes
import os
import re
import shutil
import sys
from pathlib import Path

_NAME = "libcufile.so.0"


def _folder() -> Path:
    """Where gpunvme's library lies: beside the program ``gpunvme``, or where it was installed."""
    program = shutil.which("gpunvme")
    if program is None:
        raise ImportError("there is no program gpunvme in PATH: run scripts/install")
    beside = Path(program).resolve().parent
    for folder in beside / "gpunvme-cufile", beside.parent / "lib/gpunvme-cufile":
        if (folder / _NAME).exists():
            return folder
    raise ImportError(f"{program} has no folder gpunvme-cufile with it: run scripts/install")


def _nvidias() -> str | None:
    """NVIDIA's library, as wheels bring it."""
    for path in sys.path:
        for found in sorted(Path(path).glob(f"nvidia/*/lib/{_NAME}")):
            return str(found)
    return None


def _load() -> str:
    folder = _folder()
    library = str((folder / _NAME).resolve())
    with open("/proc/self/maps") as maps:
        loaded = set(re.findall(r"/.*/libcufile\.so.*$", maps.read(), re.MULTILINE))
    if others := loaded - {library}:
        raise ImportError(f"{others.pop()} is loaded: import gpunvme.cufile before what loads it")
    os.environ.setdefault("CUFILE_ENV_PATH_JSON", str(folder / "cufile.json"))
    if real := _nvidias():
        os.environ.setdefault("GPUNVME_CUFILE_REAL", real)
    ctypes.CDLL(library)
    return library


#: The path of the library.
library: str = _load()
