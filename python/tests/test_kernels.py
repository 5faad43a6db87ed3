"""Rings and arrays for kernels: on the processor with a C++ compiler, on the software driver (which runs no
kernels) as far as it goes, and on a GPU where there is CuPy."""

import errno
import gc
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import cupy_on_cpu
import numpy
import pytest
from conftest import needs_cuda

import gpunvme

GUIDE = Path(__file__).parents[2] / "docs/guide/kernels.md"
HAS_CUPY = importlib.util.find_spec("cupy") is not None

KERNELS = """
#include <gpunvme_array.h>

extern "C" __global__ void write(gpunvme::ring ring, gpunvme::file file, int *statuses)
{
    unsigned word = blockIdx.x;
    gpunvme::outcome done = ring.write(file, blockIdx.x * sizeof(word), &word, sizeof(word));
    statuses[blockIdx.x] = done.status;
}

extern "C" __global__ void add(gpunvme::array<unsigned> words, int *statuses)
{
    unsigned word = 0;
    int status = words.get(blockIdx.x, &word);
    if (status == 0)
        status = words.set(blockIdx.x, word + 1000);
    statuses[blockIdx.x] = status;
}
"""


@pytest.fixture(scope="module")
def kernels():
    if not cupy_on_cpu.RawModule.can_compile():
        pytest.skip("there is no C++ compiler")
    return cupy_on_cpu.RawModule(KERNELS, ("-std=c++14", f"-I{gpunvme.get_include()}"))


@pytest.fixture
def mount(volume):
    with gpunvme.Mount(volume) as mount:
        yield mount


def parameter(of):
    given = of.for_kernels()
    return numpy.frombuffer(given, f"V{len(given)}")


def test_the_headers_come_with_the_package():
    folder = Path(gpunvme.get_include())
    needed = {"gpunvme_device.h", "gpunvme_device_detail.h", "gpunvme_device_groups.h", "gpunvme_array.h"}
    assert needed <= set(os.listdir(folder))


@pytest.mark.skipif(
    not HAS_CUPY and not cupy_on_cpu.RawModule.can_compile(),
    reason="there is neither CuPy nor a C++ compiler",
)
def test_the_program_of_the_guide_reads_a_file(folder, volume, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    kernel = re.search(r'r"""\n(.*?)"""', code, re.DOTALL).group(1)
    assert len([line for line in kernel.splitlines() if line]) <= 15
    values = numpy.random.default_rng(5).integers(0, 100, 4 * 1024).astype(numpy.float32)
    (folder / "floats").write_bytes(values.tobytes())
    code = code.replace('"/data/', f'"{folder}/').replace('"/data"', f'"{volume}"')
    summed = values.reshape(4, 1024)
    if not HAS_CUPY:
        summed = summed[:, :: cupy_on_cpu.STEP]
        monkeypatch.setitem(sys.modules, "cupy", cupy_on_cpu)
        assert "GpuRing.on_gpu(mount, 0)" in code
        code = code.replace("GpuRing.on_gpu(mount, 0)", "GpuRing.on_cpu(mount)")
    exec(compile(code, "the guide", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == f"{summed.sum(axis=1)}\n"


def test_a_kernel_writes_what_it_may(kernels, mount, folder):
    statuses, write = numpy.full(100, -1, numpy.int32), kernels.get_function("write")

    def run(ring, name):
        write((100,), (1,), (parameter(ring), numpy.uint64(name), statuses))
        return set(statuses.tolist())

    with gpunvme.GpuRing.on_cpu(mount, entries=32, slot=4096, patience=10) as ring:
        with gpunvme.open(folder / "words", "w") as file, ring.attach(file) as attached:
            assert run(ring, attached.name) == {0}
            file.sync()
        assert numpy.array_equal(numpy.fromfile(folder / "words", numpy.uint32), numpy.arange(100))
        assert run(ring, attached.name) == {errno.EBADF}  # it is closed
        with gpunvme.open(folder / "words") as file, ring.attach(file) as attached:
            assert run(ring, attached.name) == {errno.EBADF}  # it is open for reading
        del attached
        with gpunvme.open(folder / "words", "r+") as file:
            name = ring.attach(file).name
        gc.collect()
        assert run(ring, name) == {errno.EBADF}  # nothing holds it


def test_an_array_is_changed_by_kernels_and_flushed(kernels, mount, folder):
    numpy.arange(5000, dtype=numpy.uint32).tofile(folder / "words")
    statuses, add = numpy.full(3000, -1, numpy.int32), kernels.get_function("add")
    with gpunvme.open(folder / "words", "r+") as file, gpunvme.GpuRing.on_cpu(mount) as ring:
        with ring.array(file, page=512, cache=1 << 20, ways=4, writable=True) as array:
            assert 20_000 <= array.cache <= 1 << 20
            add((3000,), (1,), (parameter(array), statuses))
            assert not statuses.any()
            assert array.stats() == {"hits": 6000 - 24, "misses": 24, "written": 0}
            with gpunvme.open(folder / "other", "w") as other, pytest.raises(gpunvme.Error) as refused:
                array.flush(other)
            assert refused.value.errno == errno.EINVAL
            assert array.flush(file) == 24 * 512 and array.flush(file) == 0
        expected = numpy.arange(5000, dtype=numpy.uint32)
        expected[:3000] += 1000
        assert numpy.array_equal(numpy.fromfile(folder / "words", numpy.uint32), expected)
        with ring.array(file) as array:  # not for changes
            add((1,), (1,), (parameter(array), statuses))
            assert statuses[0] != 0
        longer = ring.array(file, length=1 << 20, writable=True)
        assert longer.cache >= 1 << 20
        ring.close()
        for one in (array, longer):
            with pytest.raises(ValueError, match="is closed"):
                one.for_kernels()


def test_what_cannot_be_is_refused(mount, folder, tmp_path):
    (folder / "file").write_bytes(bytes(10_000))
    for bad in [-1.0, float("nan"), 1e300]:
        with pytest.raises(ValueError, match="patience"):
            gpunvme.GpuRing.on_cpu(mount, patience=bad)
    with pytest.raises(TypeError):
        gpunvme.GpuRing(mount)  # on a GPU, or not?
    with gpunvme.open(folder / "file") as file, gpunvme.GpuRing.on_cpu(mount, entries=32) as ring:
        for settings in [{"page": 1000}, {"page": 1 << 20}, {"ways": 3}, {"ways": 68}]:
            with pytest.raises(gpunvme.Error) as refused:
                ring.array(file, **settings)
            assert refused.value.errno == errno.EINVAL and refused.value.filename == str(folder / "file")
        with pytest.raises(gpunvme.Error) as refused:
            ring.array(file, writable=True)
        assert refused.value.errno == errno.EBADF
        file.close()
        with pytest.raises(ValueError, match="the file is closed"):
            ring.attach(file)
    assert ring.closed
    for call in (ring.for_kernels, lambda: ring.attach(file)):
        with pytest.raises(ValueError, match="is closed"):
            call()
    ring.close()
    closed = gpunvme.Mount(folder)
    closed.close()
    with pytest.raises(ValueError, match="the mount was closed"):
        gpunvme.GpuRing.on_cpu(closed)


@needs_cuda
def test_a_ring_of_a_gpu_has_what_its_kernels_need(mount, stored):
    path, _ = stored(100_000)
    with gpunvme.open(path) as file, gpunvme.GpuRing.on_gpu(mount, entries=64, slot=8192, patience=2) as ring:
        given = numpy.frombuffer(ring.for_kernels(), numpy.uint64)
        assert given.nbytes == 64 and given[:3].all()
        # Slots are an odd number of blocks.
        assert given[4] == 2_000_000_000 and given[5] == 12288 << 32 | 64
        with ring.attach(file) as attached, ring.array(file, cache=64 << 10) as array:
            assert attached.name > 0 and array.cache <= 64 << 10
            assert len(array.for_kernels()) == 128 and array.for_kernels()[:64] == ring.for_kernels()
            assert array.stats() == {"hits": 0, "misses": 0, "written": 0}
    with pytest.raises(gpunvme.Error) as none:
        gpunvme.GpuRing.on_gpu(mount, 1000)
    assert none.value.errno == errno.ENODEV


def test_a_ring_keeps_its_volume_and_lets_it_go(own_volume):
    with gpunvme.Mount(own_volume.path) as mount:
        ring = gpunvme.GpuRing.on_cpu(mount)
    assert subprocess.run(["umount", own_volume.path], capture_output=True).returncode != 0
    del ring
    own_volume.unmount()


def test_a_child_process_leaves_a_ring_to_its_parent(kernels, mount, folder):
    statuses, write = numpy.full(10, -1, numpy.int32), kernels.get_function("write")
    with gpunvme.open(folder / "words", "w") as file, gpunvme.GpuRing.on_cpu(mount) as ring:
        attached, array = ring.attach(file), ring.array(file, length=4096)
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (ring.for_kernels, array.stats, array.for_kernels):
                try:
                    call()
                except ChildProcessError:
                    refused += 1
            for one in (attached, array, ring):
                one.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        write((10,), (1,), (parameter(ring), numpy.uint64(attached.name), statuses))
        assert not statuses.any()
