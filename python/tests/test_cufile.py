"""What asks for cuFile in a process that imported gpunvme.cufile."""

import os
import subprocess
import sys
from pathlib import Path

from conftest import program

USER = """
import ctypes, os, sys
class Status(ctypes.Structure): _fields_ = [("code", ctypes.c_int), ("cuda", ctypes.c_int)]
class Descriptor(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("fd", ctypes.c_long), ("operations", ctypes.c_void_p)]
cufile = ctypes.CDLL("libcufile.so.0")
cufile.cuFileHandleRegister.restype = Status
cufile.cuFileRead.restype = ctypes.c_ssize_t
handle, offset = ctypes.c_void_p(), ctypes.c_long(0)
descriptor = Descriptor(1, os.open(sys.argv[1], os.O_RDONLY), None)
assert cufile.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(descriptor)).code == 0
memory = ctypes.create_string_buffer(os.path.getsize(sys.argv[1]))
print(cufile.cuFileRead(handle, memory, ctypes.c_size_t(len(memory)), offset, offset))
"""


def run(code: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    beside = Path(program("gpunvme")).resolve().parent
    environment = {**os.environ, "PATH": f"{beside}:{os.environ['PATH']}", **environment}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_libraries_get_gpunvmes_from_then_on(stored, tmp_path):
    path, values = stored(300_000)
    report = tmp_path / "report"
    done = run("import gpunvme.cufile\n" + USER, path, GPUNVME_CUFILE_REPORT=str(report))
    assert done.stdout == f"{len(values)}\n", done.stderr
    # Ordinary memory on our mount.
    assert f"call {len(values)} real 0" in report.read_text()


def test_it_says_why_it_cannot(tmp_path):
    done = run("import gpunvme.cufile", PATH=str(tmp_path))
    assert "ImportError: there is no program gpunvme in PATH" in done.stderr
    (tmp_path / "libcufile.so.0").write_bytes(Path(program("libgpunvme_cufile.so")).read_bytes())
    late = f"import ctypes; ctypes.CDLL({str(tmp_path / 'libcufile.so.0')!r}); import gpunvme.cufile"
    done = run(late)
    assert f"{tmp_path}/libcufile.so.0 is loaded: import gpunvme.cufile before" in done.stderr
