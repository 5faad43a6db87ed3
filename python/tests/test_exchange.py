"""Memory by DLPack's C exchange API."""

import gc
import subprocess
import sys
from pathlib import Path

import exchange
import numpy
import pytest
import raw_cuda
from conftest import needs_cuda
from exchange import PADDED, READ_ONLY, Tensor, has_api, of, table
from test_gpu import waits_for

import gpunvme


class Fast(Tensor):
    """Has the API and nothing else."""


class Slow(Tensor):
    """Has Python's ways too."""

    def __dlpack_device__(self):
        return exchange.CPU, 0

    def __dlpack__(self, **arguments):
        return self.keep.__dlpack__(**arguments)


has_api(Fast, table())


def zeros(count=1000, **says):
    return of(numpy.zeros(count, numpy.uint8), Fast, **says)


def test_tensors_are_read_into_and_written_from(stored):
    path, values = stored(1000)
    tensor = zeros(shape=(10, 100))
    offset = zeros(byte_offset=64)
    before = Tensor.exports
    with gpunvme.open(path) as f, gpunvme.open(path.parent / "copy", "w") as copy:
        assert f.read_into(tensor).bytes == f.read_into(offset).bytes == 1000
        assert copy.write_from(tensor, 7).bytes == 1000
        assert f.read_into([(zeros(10), 5), (zeros(20), 500)]).bytes == 30
    assert numpy.array_equal(tensor.keep, values) and numpy.array_equal(offset.keep, values)
    assert (path.parent / "copy").read_bytes()[7:] == values.tobytes()
    assert Tensor.exports == before + 5 and not Tensor.exported


def test_what_cannot_be_used_is_refused_by_name(stored):
    path, _ = stored(1000)
    with gpunvme.open(path, "r+") as f:
        for transfer in (f.read_into, f.write_from, f.submit_read_into):
            with pytest.raises(
                ValueError, match=r"Fast is a strided view \(shape \[10, 50\], strides \[100, 1\]\)"
            ):
                transfer(zeros(shape=(10, 50), strides=(100, 1)))
            with pytest.raises(ValueError, match="a shape that no memory has"):
                transfer(zeros(shape=(1 << 40, 1 << 40)))
            with pytest.raises(TypeError, match="Fast has items that share bytes"):
                transfer(zeros(bits=4))
            with pytest.raises(TypeError, match="DLPack's number 8"):
                transfer(zeros(device_type=exchange.METAL))
            with pytest.raises(TypeError, match="holds no memory"):
                transfer(zeros(fails=True))
        with pytest.raises(ValueError, match="Fast is read-only"):
            f.read_into(zeros(flags=READ_ONLY))
        assert f.write_from(zeros(flags=READ_ONLY)).bytes == 1000
        assert f.read_into(zeros(bits=4, flags=PADDED)).bytes == 1000
        assert f.read_into(zeros(bits=4, lanes=2)).bytes == 1000
        assert f.read_into(Fast(0, (0, 5))).bytes == 0
        assert f.read_into(zeros(shape=(10, 1, 100), strides=(100, 3, 1))).bytes == 1000
    assert not Tensor.exported


def test_where_the_api_does_not_serve_python_does(stored):
    class OfAnotherVersion(Slow):
        pass

    class WithAnOlderTable(Slow):
        pass

    class Derived(Slow):
        pass

    has_api(Slow, table())
    has_api(OfAnotherVersion, table(2))
    has_api(WithAnOlderTable, table(2, table()))
    path, values = stored(1000)
    with gpunvme.open(path) as f:
        for kind, says, exports in [
            (Slow, {}, 1),
            (Slow, {"fails": True}, 0),
            (OfAnotherVersion, {}, 0),
            (WithAnOlderTable, {}, 1),
            (Derived, {}, 0),  # it may be something else than what it is derived from
        ]:
            tensor, before = of(numpy.zeros(1000, numpy.uint8), kind, **says), Tensor.exports
            assert f.read_into(tensor).bytes == 1000
            assert numpy.array_equal(tensor.keep, values)
            assert Tensor.exports - before == exports, kind


def test_memory_in_flight_is_kept(stored):
    path, _ = stored(32 << 20)
    with gpunvme.open(path) as f:
        pending = f.submit_read_into(zeros(32 << 20))
        gc.collect()
        if not pending.done():
            assert len(Tensor.exported) == 1
        assert pending.result(60).bytes == 32 << 20
    assert not Tensor.exported


@needs_cuda
def test_a_call_waits_for_the_stream_of_the_library(folder, monkeypatch):
    stream, array = raw_cuda.Stream(), raw_cuda.Array(100_000)
    monkeypatch.setattr(Tensor, "current", stream.handle.value)
    tensor = Fast(array.address.value, (100_000,), array, device_type=exchange.CUDA)
    waits_for(stream, array, tensor, folder / "file")


PYTORCH = """
import sys, types
import numpy
from exchange import COMPLEX, Tensor, has_api, of, table
import gpunvme

class Storage:
    def __init__(self, array): self.array = array
    def data_ptr(self): return self.array.ctypes.data
    def nbytes(self): return self.array.nbytes

class Tensor(Tensor):
    is_cuda, device, conjugated, negated = False, "cpu", False, False
    asked = 0
    def is_conj(self): return self.conjugated
    def is_neg(self): return self.negated
    def untyped_storage(self): return Storage(self.keep)
    # What need not be called where the API tells it.
    def is_contiguous(self): Tensor.asked += 1; return True
    def get_device(self): return -1
    def data_ptr(self): return self.keep.ctypes.data
    @property
    def nbytes(self): return self.keep.nbytes

torch = sys.modules["torch"] = types.ModuleType("torch")
torch.Tensor = has_api(Tensor, table())

class Subclass(Tensor): pass

def zeros(kind=Tensor, **says): return of(numpy.zeros(1000, numpy.uint8), kind, **says)

def refused(tensor, error, told):
    for call in (f.read_into, f.write_from):
        try: call(tensor)
        except error as found: assert told in str(found), found
        else: raise AssertionError(told)

with gpunvme.open(sys.argv[1], "r+") as f:
    values = numpy.fromfile(sys.argv[1], numpy.uint8)
    tensor = zeros(shape=(10, 100))
    assert f.read_into(tensor).bytes == 1000 and (tensor.keep == values).all()
    tensor.negated = True
    refused(tensor, ValueError, "resolve_neg")
    tensor = zeros(code=COMPLEX, bits=64, shape=(125,))
    assert f.read_into(tensor).bytes == 1000
    tensor.conjugated = True
    refused(tensor, ValueError, "resolve_conj")
    # Its storage has become shorter than it says.
    refused(zeros(shape=(1001,)), TypeError, "no memory that can be reached")
    refused(Tensor(0, (5,), numpy.zeros(0, "u1")), TypeError, "no memory that can be reached")
    assert f.read_into(Tensor(0, (0, 5), numpy.zeros(0, "u1"))).bytes == 0
    assert Tensor.asked == 0 and Tensor.exports == 0
    for tensor in (zeros(fails=True), zeros(bits=4), zeros(strides=(2,)), zeros(Subclass)):
        before = Tensor.asked
        assert f.read_into(tensor).bytes == 1000 and (tensor.keep == values).all()
        assert Tensor.asked == before + 1
"""


def test_tensors_of_pytorch_are_looked_at_once(stored):
    """In a process of its own, which takes a stand-in for PyTorch."""
    path, _ = stored(1000)
    done = subprocess.run(
        [sys.executable, "-c", PYTORCH, path],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
