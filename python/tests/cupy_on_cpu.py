"""What a program uses of CuPy to run a kernel, on the processor: the kernel is compiled as a function, and
some threads of each block are calls of that, one after the other."""

import ctypes
import itertools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy
from numpy import float32, zeros

__all__ = ["RawModule", "float32", "zeros"]

#: Every so many of a block's threads is played.
STEP = 341
#: What NVRTC knows by itself.
PRELUDE = """
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)
extern "C" struct { unsigned x; } blockIdx, threadIdx;
decltype(blockIdx) blockIdx, threadIdx;
template <class T> static void atomicAdd(T *to, T more) { *to += more; }
"""


def _passed(argument: Any) -> Any:
    """An argument as CuPy passes it: the bytes of scalars and of structures, which are arrays of one element
    in the host's memory; of other arrays the address."""
    if isinstance(argument, numpy.ndarray) and argument.dtype.kind != "V":
        return ctypes.c_void_p(argument.ctypes.data)
    if isinstance(argument, numpy.ndarray):
        assert argument.size == 1
        words = ctypes.c_uint64 * (argument.itemsize // 8)
        structure = type("Structure", (ctypes.Structure,), {"_fields_": [("words", words)]})
        return structure.from_buffer_copy(argument.tobytes())
    assert isinstance(argument, numpy.uint64)
    return ctypes.c_uint64(int(argument))


class RawModule:
    def __init__(self, code: str, options: tuple[str, ...] = ()) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "kernel.cc"), Path(folder, "kernel.so")
            source.write_text(PRELUDE + code)
            strict = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
            subprocess.run(["c++", *strict, *options, source, "-o", library], check=True)
            self.library = ctypes.CDLL(str(library))

    @staticmethod
    def can_compile() -> bool:
        return shutil.which("c++") is not None

    def get_function(self, name: str) -> Any:
        function = getattr(self.library, name)
        function.restype = None
        block, thread = (ctypes.c_uint.in_dll(self.library, name) for name in ("blockIdx", "threadIdx"))

        def launch(grid: tuple[int, ...], threads: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            passed = [_passed(argument) for argument in arguments]
            for block.value, thread.value in itertools.product(range(grid[0]), range(0, threads[0], STEP)):
                function(*passed)

        return launch
