"""Arrays of other libraries, by whatever way they show their memory. What is not installed is skipped."""

from pathlib import Path

import numpy
import pytest
from conftest import needs_cuda
from raw_cuda import Array, DLPack, View

import gpunvme


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", "bfloat16", "complex64", "bool"])
def test_arrays_of_jax_are_written_and_never_changed(folder, dtype):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    values = jax.numpy.arange(3000).reshape(3, 1000).astype(dtype)
    expected = numpy.asarray(values).tobytes()
    with gpunvme.open(folder / "file", "w") as f:
        # By the buffer protocol, which has no bfloat16, and by DLPack.
        for memory in (values, DLPack(values)):
            assert f.write_from(memory, 5).bytes == len(expected)
            assert (folder / "file").read_bytes()[5:] == expected
            with pytest.raises(ValueError, match="read-only"):
                f.read_into(memory)
        assert f.write_from([(values[1], 0), (values[2], 1 << 20)]).bytes == 2 * len(expected) // 3
    assert numpy.asarray(values).tobytes() == expected


def test_jax_takes_what_was_read(stored):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    path, values = stored(40_000)
    with gpunvme.open(path) as f:
        target = numpy.empty(10_000, numpy.float32)
        f.read_into(target)
    assert numpy.asarray(jax.numpy.asarray(target)).tobytes() == values.tobytes()


def test_functions_of_numba_work_on_what_was_read(stored):
    numba = pytest.importorskip("numba", reason="Numba is not installed")
    path, values = stored(98_304)

    @numba.njit
    def total(array):
        result = 0
        for value in array:
            result += value
        return result

    with gpunvme.Mount(path) as mount, gpunvme.open(path) as f:
        target = numpy.frombuffer(mount.buffer(98_304), numpy.uint8)
        f.read_into(target, require="direct")
        assert total(target) == values.sum()


def test_device_arrays_of_numba_are_memory(stored):
    cuda = pytest.importorskip("numba.cuda", reason="Numba is not installed")
    if not Path("/dev/nvidiactl").exists() or not cuda.is_available():
        pytest.skip("Numba reaches no GPU")  # the software driver has not all that it asks for
    path, values = stored(100_000)
    stream = cuda.stream()
    with gpunvme.open(path) as f:
        array = cuda.device_array(100_000, numpy.uint8)
        assert f.read_into(array).bytes == 100_000
        assert numpy.array_equal(array.copy_to_host(), values)
        f.read_into(array, stream=stream).result(30)
        with pytest.raises(ValueError, match="strided view"):
            f.read_into(array[::2])


def test_arrays_of_cupy_are_memory(stored):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not cupy.cuda.is_available():
        pytest.skip("CuPy reaches no GPU")
    path, values = stored(100_000)
    with gpunvme.open(path) as f:
        array = cupy.zeros((10, 10_000), cupy.uint8)
        assert f.read_into(array).bytes == 100_000
        assert numpy.array_equal(cupy.asnumpy(array).reshape(-1), values)
        with pytest.raises(ValueError, match="strided view"):
            f.read_into(array[:, ::2])
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            again = cupy.zeros(100_000, cupy.uint8)
            pending = f.read_into(again, stream=stream)
            total = int(again.sum())  # in the stream's order
        assert total == int(values.sum(dtype=numpy.int64)) and pending.result(30).bytes == 100_000


@needs_cuda
def test_what_an_array_says_of_itself_is_checked(stored):
    path, _ = stored(1000)
    array = Array(1000)
    with gpunvme.open(path) as f:
        for shape in [(-1,), (2, -500), (1 << 40, 1 << 40), (1 << 62, 4)]:
            with pytest.raises(ValueError, match="a shape that no memory has"):
                f.read_into(View(array, shape=shape))
        for typestr in ["<f0", "|u-1", "<f", ""]:
            with pytest.raises(TypeError, match="typestr"):
                f.read_into(View(array, typestr=typestr))
        with pytest.raises(gpunvme.Error):  # longer than its allocation
            f.read_into(View(array, shape=(1 << 50,)))
