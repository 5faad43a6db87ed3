"""Memory that is CUDA's: of the software driver, or of a GPU."""

import ctypes
import errno
import gc
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import raw_cuda
from conftest import needs_cuda
from raw_cuda import Array, Stream, View

import gpunvme

pytestmark = needs_cuda


@pytest.mark.parametrize("length", [1, 512, 4096, 4097, 1 << 20, (9 << 20) + 5])
@pytest.mark.parametrize("offset", [0, 3, 4096])
def test_device_memory_holds_what_the_file_has(stored, length, offset):
    path, values = stored(offset + length + 100)
    array = Array(length)
    with gpunvme.open(path, caching="never") as f:
        done = f.read_into(array, offset)
    assert done.bytes == length and done.routes.keys() <= {"bounce", "p2p", "edge"}
    assert done.reason is not None and done.explanation
    assert numpy.array_equal(array.get(), values[offset : offset + length])


def test_what_was_prepared_comes_from_the_page_cache(stored):
    path, values = stored(100_001)
    array = Array(100_001)
    with gpunvme.open(path) as f:
        with pytest.raises(gpunvme.Error) as refused:
            f.read_into(array, require="cache")
        assert refused.value.reason == "not-cached"
        assert f.prepare() == 100_001 and f.prepare(100_000) == 1
        assert f.read_into(array, require="cache").routes == {"cache": 100_001}
        assert numpy.array_equal(array.get(), values[:100_001])
        path.write_bytes(bytes(100_001))
        f.read_into(array)
        assert not array.get().any()


def test_what_the_page_cache_has_comes_from_there_unless_it_is_forbidden(stored):
    path, values = stored(300_001)
    array = Array(300_001)
    with pytest.raises(ValueError, match="never, resident, read-again"):
        gpunvme.open(path, caching="always")
    for caching in [None, "resident", "read-again"]:
        assert path.read_bytes() == values.tobytes()
        with gpunvme.open(path, caching=caching) as f:
            assert f.read_into(array).routes == {"cache": 300_001}
        assert numpy.array_equal(array.get(), values)
    with gpunvme.open(path, caching="never") as f, pickle.loads(pickle.dumps(f)) as again:
        for opened in [f, again]:
            assert "cache" not in opened.read_into(array).routes


@pytest.mark.parametrize("dtype", ["i1", "u2", "f2", "f4", "f8", "c8"])
def test_device_memory_is_written_as_it_is(folder, dtype):
    values = numpy.arange(30_000).astype(dtype).reshape(3, 10_000)
    array = Array(values.shape, dtype).set(values)
    with gpunvme.open(folder / "file", "w") as f:
        assert f.write_from(array, 17).bytes == values.nbytes
        assert f.size == 17 + values.nbytes
        again = Array(values.shape, dtype)
        f.read_into(again, 17)
    assert numpy.array_equal(again.get(), values)


def test_views_are_read_into_in_place_or_refused(stored):
    path, values = stored(1000)
    array = Array((10, 100)).set(numpy.zeros((10, 100)))
    data = array.__cuda_array_interface__["data"][0]
    with gpunvme.open(path) as f:
        assert f.read_into(View(array, data=(data + 300, False), shape=(2, 100)), 100).bytes == 200
        f.read_into(View(array, shape=(1, 100), strides=(77, 1)))
        f.read_into(View(array, data=(data + 900, False), shape=(2, 50), strides=(50, 1)))
        with pytest.raises(
            ValueError, match=r"View is a strided view \(shape \[10, 50\], strides \[100, 1\]\)"
        ):
            f.read_into(View(array, shape=(10, 50), strides=(100, 1)))
        with pytest.raises(ValueError, match="read-only"):
            f.read_into(View(array, data=(data, True)))
        with pytest.raises(TypeError, match="typestr"):
            f.read_into(View(array, typestr="nonsense"))
        assert f.read_into(View(array, shape=(0, 5))).bytes == 0
    expected = numpy.zeros(1000, numpy.uint8)
    expected[300:500], expected[:100], expected[900:] = values[100:300], values[:100], values[:100]
    assert numpy.array_equal(array.get().reshape(-1), expected)


def test_a_list_of_pairs_scatters(stored):
    path, values = stored(4 << 20)
    rows = [
        (Array(512), int(at)) for at in numpy.random.default_rng(3).integers(0, 4 << 20, 300) - 600 if at >= 0
    ]
    with gpunvme.open(path) as f:
        assert f.read_into(rows).bytes == 512 * len(rows)
        with pytest.raises(ValueError, match="a call each"):
            f.read_into([(Array(10), 0), (bytearray(10), 0)])
    for row, at in rows:
        assert numpy.array_equal(row.get(), values[at : at + 512])


def test_routes_are_told_and_demanded(stored):
    path, _ = stored(10_000)
    array = Array(10_000)
    mount = gpunvme.Mount(path)
    route, reason = mount.route(array)
    assert route == "bounce" and reason == "no-vfio"
    mount.forget(array)
    with gpunvme.open(path) as f:
        assert f.read_into(array, require="bounce").routes["bounce"] > 0
        for call in (f.read_into, f.submit_read_into):
            with pytest.raises(gpunvme.Error) as refused:
                call(array, require="p2p")
            assert (refused.value.errno, refused.value.reason) == (errno.EOPNOTSUPP, "no-vfio")
            assert refused.value.segment == 0
    with pytest.raises(gpunvme.Error) as unknown:
        gpunvme.open(path).read_into(View(array, data=(0x1000, False)))
    assert unknown.value.errno == errno.EFAULT and unknown.value.segment == 0


def test_in_a_stream_what_follows_sees_the_bytes(stored):
    path, values = stored(3 << 20)
    stream = Stream()
    array, copy = Array(3 << 20), numpy.zeros(3 << 20, numpy.uint8)
    driver = raw_cuda.enter()
    with gpunvme.open(path) as f:
        pending = f.read_into(array, stream=stream)
        target = ctypes.c_void_p(copy.ctypes.data)
        raw_cuda.check(
            driver.cuMemcpyDtoHAsync_v2(target, array.address, ctypes.c_size_t(copy.nbytes), stream.handle)
        )
        stream.synchronize()
        assert numpy.array_equal(copy, values)
        done = pending.result()
        assert done.bytes == 3 << 20 and pending.done() and pending.result() == done


def test_in_a_stream_a_write_sees_what_came_before(folder):
    stream = Stream()
    values = numpy.random.default_rng(4).integers(0, 256, 2 << 20, numpy.uint8)
    array, driver = Array(2 << 20), raw_cuda.enter()
    with gpunvme.open(folder / "file", "w") as f:
        source = ctypes.c_void_p(values.ctypes.data)
        raw_cuda.check(
            driver.cuMemcpyHtoDAsync_v2(array.address, source, ctypes.c_size_t(values.nbytes), stream.handle)
        )
        pending = f.write_from(array, stream=stream.handle.value)
        stream.synchronize()
        pending.result(timeout=30)
    assert (folder / "file").read_bytes() == values.tobytes()


def pinned(length: int, value: int) -> ctypes.c_void_p:
    """Host memory of CUDA's."""
    memory = ctypes.c_void_p()
    raw_cuda.check(raw_cuda.enter().cuMemHostAlloc(ctypes.byref(memory), ctypes.c_size_t(length), 3))
    ctypes.memset(memory, value, length)
    return memory


class Gate:
    """What keeps a stream from going on until it is opened. After a while it opens by itself: a test that
    waits for the stream by mistake fails then, and does not hang."""

    LIMIT = 20.0

    def __init__(self) -> None:
        self.word = pinned(4, 0)
        self.timer = threading.Timer(self.LIMIT, self.open)
        self.timer.daemon = True

    def close(self, stream: Stream) -> None:
        # Freeing memory waits for all streams of the GPU, this one included: what earlier tests left
        # is freed before.
        gc.collect()
        raw_cuda.check(
            raw_cuda.enter().cuStreamWaitValue32_v2(stream.handle, self.word, ctypes.c_uint32(1), 0)
        )
        self.timer.start()

    def open(self) -> None:
        ctypes.c_uint32.from_address(self.word.value or 0).value = 1
        self.timer.cancel()


def waits_for(stream: Stream, array: Array, memory: object, path: Path) -> None:
    """A write must not begin before the stream that fills the memory, which is the array's, is through."""
    gate, ones = Gate(), pinned(100_000, 1)
    array.set(numpy.zeros(100_000))
    with gpunvme.open(path, "w") as f:
        f.write_from(memory)
        gate.close(stream)
        fill = raw_cuda.enter().cuMemcpyHtoDAsync_v2
        raw_cuda.check(fill(array.address, ones, ctypes.c_size_t(100_000), stream.handle))
        opener = threading.Timer(0.2, gate.open)
        opener.start()
        f.write_from(memory)
        opener.join()
    assert path.read_bytes() == b"\1" * 100_000


def test_a_call_waits_for_the_stream_that_the_memory_names(folder):
    stream = Stream()
    array = Array(100_000, stream=stream.handle.value)
    waits_for(stream, array, array, folder / "file")


@pytest.mark.parametrize("in_stream", [False, True])
def test_memory_that_is_let_go_in_flight_is_kept_until_the_end(stored, in_stream):
    path, _ = stored(32 << 20)
    stream = Stream()
    with gpunvme.open(path) as f:
        gc.collect()
        before = Array.freed
        if in_stream:
            pending = f.read_into(Array(32 << 20), stream=stream)
        else:
            pending = f.submit_read_into(Array(32 << 20))
        gc.collect()
        if not pending.done():
            assert Array.freed == before
        pending.result()
        del pending
        gc.collect()
        assert Array.freed == before + 1


def test_a_pending_request_that_is_forgotten_keeps_its_memory(stored):
    path, _ = stored(16 << 20)
    stream = Stream()
    before = Array.freed
    with gpunvme.open(path) as f:
        for _ in range(4):
            f.submit_read_into(Array(8 << 20))
            f.read_into(Array(8 << 20), stream=stream)
        stream.synchronize()
        for _ in range(100):
            f.read_into(bytearray(10))  # any call lets go of what is over
            gc.collect()
            if Array.freed == before + 8:
                break
            time.sleep(0.05)
    assert Array.freed == before + 8


def test_a_child_process_lets_go_of_no_memory_of_its_parent(stored):
    """That takes calls of CUDA, which the child of a fork must not make."""
    path, _ = stored(1 << 20)
    stream = Stream()
    with gpunvme.open(path) as f:
        gc.collect()
        before = Array.freed
        held = f.read_into(Array(1 << 20), stream=stream)
        f.read_into(Array(1 << 20), stream=stream).done()
        end = time.monotonic() + 30
        stream.synchronize()
        while not held.done() and time.monotonic() < end:
            time.sleep(0.01)
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # such a call may not return
            code = 1
            try:
                del held
                with gpunvme.open(path) as again:
                    again.read_into(bytearray(10))  # any call lets go of what is over
                    gc.collect()
                    code = 0 if Array.freed == before else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        held.result(30)
        f.read_into(bytearray(10))
        gc.collect()
        assert Array.freed == before + 2


def test_closing_the_file_ends_no_request(stored):
    path, values = stored(16 << 20)
    array = Array(16 << 20)
    f = gpunvme.open(path)
    pending = f.submit_read_into(array)
    f.close()
    del f
    assert pending.result(30).bytes == 16 << 20
    assert numpy.array_equal(array.get(), values)


def test_many_threads_read_into_device_memory(stored):
    path, values = stored(8 << 20)
    with gpunvme.open(path) as f, ThreadPoolExecutor(8) as pool:

        def read(at: int) -> bool:
            array = Array(50_000)
            return f.read_into(array, at).bytes == 50_000 and numpy.array_equal(
                array.get(), values[at : at + 50_000]
            )

        assert all(pool.map(read, range(0, 8_000_000, 111_111)))


def test_a_wait_can_be_given_a_limit(stored):
    path, _ = stored(1 << 20)
    stream, gate, array = Stream(), Gate(), Array(1 << 20)
    with gpunvme.open(path) as f:
        f.read_into(array, stream=stream).result(30)
        gate.close(stream)
        begun = time.monotonic()
        pending = f.read_into(array, stream=stream)
        with pytest.raises(TimeoutError):
            pending.result(timeout=0.05)
        assert not pending.done() and time.monotonic() - begun < Gate.LIMIT
        gate.open()
        assert pending.result(timeout=30).bytes == 1 << 20


def test_what_is_no_stream_is_refused(stored):
    path, _ = stored(10)
    with gpunvme.open(path) as f, pytest.raises(TypeError, match="stream must be"):
        f.read_into(Array(10), stream=object())


def test_rows_of_device_memory_come_from_offsets_of_their_own(stored):
    path, values = stored(1 << 20)
    offsets = numpy.random.default_rng(6).integers(0, (1 << 20) - 300, 5000)
    array = Array((5000, 300))
    expected = numpy.stack([values[at : at + 300] for at in offsets])
    with gpunvme.open(path) as f:
        assert f.read_rows(array, offsets).bytes == 5000 * 300
        assert numpy.array_equal(array.get(), expected)
        stream = Stream()
        again = Array((5000, 300))
        pending = f.read_rows(again, offsets.tolist(), stream=stream)
        assert pending.result(30).bytes == 5000 * 300
        assert numpy.array_equal(again.get(), expected)
    with gpunvme.open(path.parent / "rows", "w") as f:
        f.write_rows(array, numpy.arange(5000) * 512)
        assert f.read_rows(again, numpy.arange(4999, -1, -1, dtype=numpy.uint64) * 512).bytes == 5000 * 300
        assert numpy.array_equal(again.get(), expected[::-1])
