"""Host memory: arrays, buffers, registered memory."""

import ctypes
import errno
import mmap
import os
import pickle
import signal
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
from conftest import Volume
from raw_cuda import DLPack

import gpunvme
from gpunvme import _types

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]


@pytest.mark.parametrize("length", [0, 1, 511, 4096, 4097, (4 << 20) - 1, (9 << 20) + 5])
@pytest.mark.parametrize("offset", [0, 1, 4096, 5000])
def test_an_array_holds_what_the_file_has(stored, length, offset):
    path, values = stored(offset + length + 100)
    array = numpy.zeros(length, numpy.uint8)
    with gpunvme.open(path) as f:
        done = f.read_into(array, offset)
    assert done.bytes == length
    assert set(done.routes) <= {"cache", "host", "edge"}
    assert numpy.array_equal(array, values[offset : offset + length])


def test_a_read_says_why_it_did_not_come_from_the_page_cache(stored):
    path, values = stored(98_304)
    with gpunvme.Mount(path.parent) as mount:
        buffer = mount.buffer(98_304)
        assert path.read_bytes() == values.tobytes()
        with gpunvme.open(path, caching="never") as f:
            done = f.read_into(buffer)
            assert "cache" not in done.routes and done.cache_reason == "caching-off"
        with gpunvme.open(path) as f:
            done = f.read_into(buffer)
            assert done.routes == {"cache": 98_304} and done.cache_reason is None and done.reason is None
            with open(path, "rb") as plain:
                os.posix_fadvise(plain.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            done = f.read_into(buffer)
            assert "cache" not in done.routes and done.cache_reason == "not-resident"
            assert done.reason == "not-gpu-memory"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_as_it_was_written(folder, dtype):
    values = numpy.frombuffer(numpy.random.default_rng(2).bytes(160 * 3), dtype if dtype != "?" else "u1")
    if dtype == "?":
        values = values % 2 == 1
    shape = (3, values.size // 3)
    values = values[: shape[0] * shape[1]].reshape(shape)
    with gpunvme.open(folder / "file", "w") as f:
        assert f.write_from(values).bytes == values.nbytes
        again = numpy.empty_like(values)
        assert f.read_into(again).bytes == values.nbytes
    assert again.tobytes() == values.tobytes()


def test_everything_with_a_buffer_is_memory(stored):
    path, values = stored(10_000)
    anonymous = mmap.mmap(-1, 10_000)
    array = numpy.zeros(10_000, numpy.uint8)
    targets = [
        bytearray(10_000),
        memoryview(bytearray(10_000)),
        array,
        DLPack(numpy.zeros(10_000, numpy.uint8)),
        anonymous,
    ]
    with gpunvme.open(path) as f:
        for target in targets:
            assert f.read_into(target).bytes == 10_000
            read = target.of if isinstance(target, DLPack) else target
            assert bytes(memoryview(read)) == values.tobytes(), target


def test_a_list_of_pairs_is_one_request(stored):
    path, values = stored(1 << 20)
    rows = [
        (numpy.zeros(n, numpy.uint8), at)
        for n, at in [(5, 3), (4096, 8192), (0, 17), (70_000, 1), (1, 1 << 19)]
    ]
    with gpunvme.open(path) as f:
        before = gpunvme.Mount(path).stats()["calls"]["read"]
        done = f.read_into(rows)
        calls = gpunvme.Mount(path).stats()["calls"]["read"] - before
    assert done.bytes == sum(row.nbytes for row, _ in rows)
    assert calls == 1
    for row, at in rows:
        assert numpy.array_equal(row, values[at : at + row.size])


def test_the_end_of_the_file_ends_a_read(stored):
    path, values = stored(5000)
    array, behind = numpy.full(6000, 7, numpy.uint8), numpy.full(10, 7, numpy.uint8)
    with gpunvme.open(path) as f:
        assert f.read_into(array).bytes == 5000
        # A part behind the end does not keep others from being read.
        first = numpy.zeros(10, numpy.uint8)
        assert f.read_into([(behind, 5000), (first, 0)]).bytes == 10
    assert numpy.array_equal(array[:5000], values) and (array[5000:] == 7).all()
    assert (behind == 7).all() and numpy.array_equal(first, values[:10])


def test_memory_that_cannot_be_used_is_refused_by_name(stored):
    path, _ = stored(10_000)
    with gpunvme.open(path) as f:
        with pytest.raises(ValueError, match=r"ndarray is a strided view .*shape \[50, 25\]"):
            f.read_into(numpy.zeros((50, 50), numpy.uint8)[:, ::2])
        with pytest.raises(ValueError, match="strided view"):
            f.read_into(numpy.zeros((50, 50), numpy.uint8).T)
        with pytest.raises(ValueError, match="bytes is read-only"):
            f.read_into(b"x" * 10)
        with pytest.raises(TypeError, match="int holds no memory"):
            f.read_into(5)
        with pytest.raises(TypeError, match="pairs"):
            f.read_into([numpy.zeros(3)])
        with pytest.raises(ValueError, match="leave out offset"):
            f.read_into([(numpy.zeros(3), 0)], 5)
        with pytest.raises(ValueError, match="require must be"):
            f.read_into(numpy.zeros(3), require="teleport")
        with pytest.raises(OverflowError):
            f.read_into(numpy.zeros(3), offset=-1)


def test_rows_of_a_matrix_can_be_read_one_by_one(stored):
    path, values = stored(10_000)
    matrix = numpy.zeros((100, 200), numpy.uint8)
    with gpunvme.open(path) as f:
        f.read_into([(matrix[row, :100], 100 * row) for row in range(100)])
    assert numpy.array_equal(matrix[:, :100].reshape(-1), values) and not matrix[:, 100:].any()


def test_a_route_that_cannot_be_had_is_an_error_and_nothing_moves(stored):
    path, _ = stored(10_000)
    array = numpy.zeros(8192, numpy.uint8)
    with gpunvme.open(path) as f:
        for demand in ["p2p", "bounce", "direct"]:
            with pytest.raises(gpunvme.Error) as refused:
                f.read_into(array, require=demand)
            assert refused.value.errno == errno.EOPNOTSUPP
            assert refused.value.reason == "route-not-available"
            assert refused.value.moved.bytes == 0 and refused.value.route is None
            assert refused.value.filename == str(path) and str(path) in str(refused.value)
        assert not array.any()
        assert f.read_into(array, require="host").bytes == 8192


def test_registered_memory_needs_no_copy(stored):
    path, values = stored(1 << 20)
    with gpunvme.Mount(path.parent) as mount, gpunvme.open(path, "r+") as f:
        buffer = mount.buffer(1 << 20)
        assert len(buffer) == buffer.nbytes == 1 << 20
        array = numpy.frombuffer(buffer, numpy.uint8)
        assert mount.route(array) == ("host", "not-gpu-memory")
        done = f.read_into(buffer, require="direct")
        assert done.routes == {"host": 1 << 20} and numpy.array_equal(array, values)
        # A slice of an array in it is in it too.
        assert f.read_into(array[4096:8192], 8192, require="direct").bytes == 4096
        assert numpy.array_equal(array[4096:8192], values[8192:12288])
        array[:4096] = 9
        assert f.write_from(array[:4096], require="direct").bytes == 4096
        assert path.read_bytes()[:4096] == b"\t" * 4096
        assert mount.stats()["buffers"] >= 1
        del buffer
        array[0] = 1  # the array keeps it


def test_writes_of_registered_memory_go_side_by_side(own_volume: Volume):
    """Seen by the calls in which their threads are, while the daemon answers none."""
    with gpunvme.Mount(own_volume.path) as mount, gpunvme.open(own_volume.path / "file", "w") as file:
        memory = memoryview(mount.buffer(8192))
        file.write_from(memory)
        halves = [(memory[at : at + 4096], at) for at in (0, 4096)]
        threads = [threading.Thread(target=file.write_from, args=half) for half in halves]

        def calls() -> list[str]:
            return [Path(f"/proc/self/task/{thread.native_id}/syscall").read_text()[:3] for thread in threads]

        (daemon,) = own_volume._daemons()
        os.kill(daemon, signal.SIGSTOP)
        try:
            for thread in threads:
                thread.start()
            end = time.monotonic() + 20
            while (found := calls()) != ["16 ", "16 "] and time.monotonic() < end:
                time.sleep(0.01)
        finally:
            os.kill(daemon, signal.SIGCONT)
        for thread in threads:
            thread.join()
        assert found == ["16 ", "16 "], "both are in ioctl(2)"


def test_what_a_transfer_moved_goes_to_another_process(stored):
    path, _ = stored(10_000)
    with gpunvme.open(path) as f:
        done = f.read_into(bytearray(10_000))
        assert pickle.loads(pickle.dumps(done)) == done and done.bytes == 10_000
        with pytest.raises(gpunvme.Error, match="such a range"):
            f.extents(2**63)
        with pytest.raises(TypeError, match="its item 1 is of list"):
            f.read_into([(bytearray(10), 0), [bytearray(10), 0]])
    assert gpunvme.__version__.count(".") == 2


def test_a_file_elsewhere_is_refused_and_left_alone(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("content")
    with pytest.raises(gpunvme.Error, match="not on a gpunvme mount") as refused:
        gpunvme.open(precious, "w")
    assert refused.value.errno == errno.ENOTTY
    assert precious.read_text() == "content"
    with pytest.raises(gpunvme.Error):
        gpunvme.Mount(tmp_path)


def test_errors_are_the_classes_that_python_has_for_them(folder):
    with pytest.raises(FileNotFoundError) as missing:
        gpunvme.open(folder / "missing")
    assert isinstance(missing.value, gpunvme.Error) and missing.value.errno == errno.ENOENT
    with pytest.raises(ValueError, match="mode must be"):
        gpunvme.open(folder / "missing", "rb")
    again = pickle.loads(pickle.dumps(missing.value))
    assert type(again) is type(missing.value) and again.filename == missing.value.filename
    (folder / "file").write_bytes(b"abc")
    with gpunvme.open(folder / "file") as f, pytest.raises(gpunvme.Error) as refused:
        f.write_from(b"def")
    assert refused.value.errno == errno.EBADF


def test_a_closed_file_says_so(stored):
    path, _ = stored(10)
    f = gpunvme.open(path)
    assert (f.name, f.mode, f.closed, f.size) == (str(path), "r", False, 10)
    f.close()
    f.close()
    assert f.closed
    with pytest.raises(ValueError, match="closed"):
        f.read_into(bytearray(10))


def test_sizes_extents_and_sync(folder):
    with gpunvme.open(folder / "file", "w") as f:
        f.truncate(1 << 20)
        assert f.size == 1 << 20
        f.write_from(b"x" * 8192, 65536)
        f.sync()
        (extent,) = f.extents()
        assert (extent.file_offset, extent.length, extent.device, extent.unwritten) == (65536, 8192, 0, False)
        assert f.extents(0, 65536) == []
        assert os.fstat(f.fileno()).st_size == 1 << 20
        hole = bytearray(b"y" * 4096)
        assert f.read_into(hole).routes == {"hole": 4096} and not any(hole)


def test_info_and_stats_tell_of_the_mount(volume):
    mount = gpunvme.Mount(volume)
    info, stats = mount.info(), mount.stats()
    assert info["block_size"] == 4096 and info["capacity"] > info["free"] > 0 and not info["read_only"]
    assert stats["read"].keys() == {"p2p", "bounce", "cache", "host", "hole", "edge"}
    assert stats["calls"]["info"] > 0
    asked = stats["requests"]["ioctl"]
    assert asked["count"] > 0
    assert asked["p50"] <= asked["p99"]
    assert stats["device_requests"]["read"]["failed"] == 0


def test_a_sync_makes_durable_what_any_process_wrote(own_volume):
    (own_volume.path / "file").write_bytes(b"x" * 5_000_000)
    with gpunvme.Mount(own_volume.path) as mount:
        mount.sync()
    own_volume.kill()
    own_volume.unmount()
    own_volume.mount()
    assert (own_volume.path / "file").read_bytes() == b"x" * 5_000_000
    mount.close()
    with pytest.raises(ValueError, match="closed"):
        mount.info()


def test_many_threads_use_one_file(stored):
    path, values = stored(8 << 20)
    with gpunvme.open(path) as f, ThreadPoolExecutor(8) as pool:

        def read(at: int) -> bool:
            array = numpy.zeros(100_000, numpy.uint8)
            return f.read_into(array, at).bytes == 100_000 and numpy.array_equal(
                array, values[at : at + 100_000]
            )

        assert all(pool.map(read, range(0, 7_000_000, 77_777)))


def test_other_threads_run_while_one_waits(stored):
    path, _ = stored(64 << 20)
    count, over = 0, False

    def work() -> None:
        nonlocal count
        while not over:
            count += 1

    thread = threading.Thread(target=work)
    thread.start()
    with gpunvme.open(path) as f:
        before, target = count, bytearray(64 << 20)
        for _ in range(4):
            f.read_into(target)
    during, over = count - before, True
    thread.join()
    assert during > 1000


def test_a_submitted_request_is_waited_for_later(stored):
    path, values = stored(16 << 20)
    arrays = [numpy.zeros(2 << 20, numpy.uint8) for _ in range(8)]
    with gpunvme.open(path) as f:
        pending = [f.submit_read_into(array, at * array.size) for at, array in enumerate(arrays)]
        assert [p.result(timeout=60).bytes for p in pending] == [2 << 20] * 8
        assert all(p.done() for p in pending) and pending[0].result() is pending[0].result()
    assert numpy.array_equal(numpy.concatenate(arrays), values)
    with gpunvme.open(path) as f:
        failed = f.submit_write_from(bytearray(10))
        for _ in range(2):
            with pytest.raises(gpunvme.Error):
                failed.result()


def test_a_bytearray_cannot_be_resized_while_it_is_read_into(stored):
    path, values = stored(32 << 20)
    target = bytearray(32 << 20)
    with gpunvme.open(path) as f:
        pending = f.submit_read_into(target)
        if not pending.done():
            with pytest.raises(BufferError):
                target.append(1)
        pending.result()
        del pending
        target.append(1)
    assert target[:-1] == values.tobytes()


def test_a_file_goes_to_another_process_by_its_path(stored):
    path, values = stored(100)
    with pickle.loads(pickle.dumps(gpunvme.open(path))) as f:
        target = bytearray(100)
        assert f.read_into(target).bytes == 100 and target == values.tobytes()


def test_a_child_process_is_told_to_open_the_file_again(stored):
    path, values = stored(100_000)
    f = gpunvme.open(path)
    pending = f.submit_read_into(bytearray(10))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                pending.result(10)
            except ChildProcessError as error:
                assert error.errno == errno.ECHILD
            else:
                os._exit(3)
            try:
                f.read_into(bytearray(10))
            except ChildProcessError as error:
                if isinstance(error, gpunvme.Error) and error.errno == errno.ECHILD:
                    target = bytearray(100_000)
                    with gpunvme.open(path) as again:
                        done = again.submit_read_into(target).result(30)
                    code = 0 if done.bytes == 100_000 and target == values.tobytes() else 2
            del f
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert f.read_into(bytearray(10)).bytes == pending.result(30).bytes == 10


def test_a_mount_that_goes_away_is_an_error(own_volume: Volume):
    path = own_volume.path / "file"
    Path(path).write_bytes(b"x" * 100_000)
    f = gpunvme.open(path)
    assert f.read_into(bytearray(100_000)).bytes == 100_000
    own_volume.kill()
    with pytest.raises(gpunvme.Error) as gone:
        for _ in range(1000):
            f.read_into(bytearray(100_000))
    assert gone.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENODEV)
    # What the package copies through is nothing that the caller has.
    for call in (f.read_into, f.write_from):
        with pytest.raises(gpunvme.Error) as gone:
            call(bytearray(100_000))
        assert "registered" not in str(gone.value) and gone.value.filename is not None, gone.value
    f.close()


def test_a_mount_can_be_unmounted_when_its_files_are_closed(own_volume: Volume):
    with gpunvme.open(own_volume.path / "file", "w") as f:
        f.write_from(b"x" * 10_000)
        f.submit_read_into(bytearray(10_000)).result()
    own_volume.unmount()


def test_doctor_tells_the_route_of_this_machine(folder):
    report = gpunvme.doctor()
    assert report["ssds"] or "machine" in report
    with pytest.raises(RuntimeError, match="no-such-device"):
        gpunvme.doctor("/dev/no-such-device")


def test_rows_come_from_offsets_of_their_own(stored):
    path, values = stored(100_000)
    matrix = numpy.zeros((4, 1000), numpy.uint8)
    with gpunvme.open(path) as f:
        for offsets in (
            [5, 70_000, 0, 4096],
            numpy.array([5, 70_000, 0, 4096], numpy.int32),
            (5, 70_000, 0, 4096),
        ):
            matrix[:] = 0
            assert f.read_rows(matrix, offsets).bytes == 4000
            for row, at in zip(matrix, (5, 70_000, 0, 4096), strict=True):
                assert numpy.array_equal(row, values[at : at + 1000])
        assert f.read_rows(numpy.zeros((0, 5)), []).bytes == 0
        with pytest.raises(ValueError, match="4000 bytes are not 3 rows"):
            f.read_rows(matrix, [1, 2, 3])
        with pytest.raises(ValueError, match="4000 bytes are not 0 rows"):
            f.read_rows(matrix, [])
        with pytest.raises(ValueError, match=r"2 offsets are not as many as .* \[4, 1000\]"):
            f.read_rows(matrix, [1, 2])
        for shape in ((2, 2, 1000), (4000,), (2, 2, 10, 100)):
            again = numpy.zeros(shape, numpy.uint8)
            assert f.read_rows(again, [5, 70_000, 0, 4096]).bytes == 4000
            assert numpy.array_equal(again.reshape(4, 1000)[1], values[70_000:71_000])
        assert f.read_rows(matrix, [9]).bytes == 4000
        with pytest.raises(OverflowError):
            f.read_rows(matrix, numpy.array([-1, 0, 0, 0]))
        for kind in (">i8", ">u8", "<u8", ">i4"):
            matrix[:] = 0
            f.read_rows(matrix, numpy.array([5, 70_000, 0, 4096], kind))
            assert numpy.array_equal(matrix[1], values[70_000:71_000])


def test_everything_public_says_what_it_does():
    for name in gpunvme.__all__:
        public = getattr(gpunvme, name)
        members = vars(public).items() if isinstance(public, type) else []
        silent = [member for member, value in members if not member.startswith("_") and not value.__doc__]
        assert public.__doc__ and not silent, (name, silent)


def test_offsets_that_no_file_has_are_refused_and_others_go_on(stored):
    path, values = stored(4096)
    array = numpy.zeros(4096, numpy.uint8)
    with gpunvme.open(path, "r+") as f:
        for offset in (2**64 - 1, 2**63 - 1, 2**63 - 4095):
            for call in (f.read_into, f.write_from, f.submit_read_into, f.submit_write_from):
                for arguments in ((array, offset), ([(array[:1], 0), (array, offset)],)):
                    with pytest.raises(OverflowError, match="no file has 4096 bytes"):
                        call(*arguments)
            with pytest.raises(OverflowError):
                f.read_rows(array, numpy.array([offset], numpy.uint64))
        assert f.submit_read_into(array).result(30).bytes == 4096
    assert numpy.array_equal(array, values)


def test_registered_memory_beyond_the_limit_is_refused_before_there_is_any(volume):
    with gpunvme.Mount(volume) as mount, pytest.raises(gpunvme.Error) as refused:
        mount.buffer(1 << 40)
    assert refused.value.errno == errno.ENOMEM


def test_objects_are_no_memory_and_times_are(folder):
    times = numpy.array(["2026-11-23", "1970-01-01"], "M8[us]")
    fields = numpy.zeros(3, [("O", "i4"), ("b", "f8")])
    with gpunvme.open(folder / "file", "w") as f:
        for objects in (numpy.array([None] * 4), numpy.zeros(3, [("a", "i4"), ("b", "O")])):
            for call in (f.read_into, f.write_from):
                with pytest.raises(TypeError, match="holds objects of Python's"):
                    call(objects)
        f.write_from([(times, 0), (fields, 4096)])
        again, times_again = numpy.ones_like(fields), numpy.zeros_like(times)
        assert f.read_into([(times_again, 0), (again, 4096)]).bytes == times.nbytes + fields.nbytes
        with pytest.raises(ValueError, match="strided view"):
            f.read_into(numpy.zeros((4, 4), "m8[s]")[:, ::2])
        frozen = times.copy()
        frozen.setflags(write=False)
        with pytest.raises(ValueError, match="read-only"):
            f.read_into(frozen)
    assert numpy.array_equal(times, times_again) and numpy.array_equal(fields, again)


def test_errors_name_the_part_of_a_list(stored):
    path, _ = stored(16_384)
    with gpunvme.Mount(path) as mount, gpunvme.open(path, "r+") as f:
        registered = numpy.frombuffer(mount.buffer(8192), numpy.uint8)
        behind = numpy.zeros(4096, numpy.uint8)
        pairs = [(behind, 20_000), (registered[:4096], 0), (numpy.zeros(4096, numpy.uint8), 4096)]
        with pytest.raises(gpunvme.Error) as refused:
            f.read_into(pairs, require="direct")
        assert refused.value.segment == 2 and refused.value.moved.bytes == 4096
    with gpunvme.open(path) as f, pytest.raises(gpunvme.Error) as refused:
        f.write_from([(registered[:4096], 0), (behind, 4096)])
    assert refused.value.errno == errno.EBADF


def test_objects_without_dimensions_are_no_memory_either(stored):
    path, values = stored(4096)

    class Holds(ctypes.Structure):
        _fields_ = (("number", ctypes.c_int), ("object", ctypes.py_object))

    class Plain(ctypes.Structure):
        _fields_ = (("number", ctypes.c_uint32), ("O", ctypes.c_double))

    thing = {"x": 1}
    objects = [
        numpy.array(thing, dtype=object),
        numpy.array((1, thing), [("a", "i4"), ("b", "O")]),
        ctypes.py_object(thing),
        Holds(1, thing),
    ]
    with gpunvme.open(path, "r+") as file:
        for holder in objects:
            for call in (file.read_into, file.write_from):
                with pytest.raises(TypeError, match="holds objects of Python's"):
                    call(holder)
        for plain in (Plain(), numpy.zeros((), "<f8"), ctypes.c_uint64(), numpy.zeros((), [("O", "i4")])):
            size = len(bytes(plain))
            assert file.read_into(plain).bytes == size and bytes(plain) == values[:size].tobytes()


def test_structures_with_objects_in_them_are_refused_and_others_read(stored):
    path, values = stored(4096)
    with gpunvme.open(path) as file:
        objects = numpy.zeros(4, [("time", "M8[ns]"), ("object", "O")])
        nested = numpy.zeros(4, [("time", "M8[ns]"), ("inner", [("object", "O", (2,))])])
        for array in (objects, nested):
            with pytest.raises(TypeError, match="object"):
                file.read_into(array)
        times = numpy.zeros(16, [("time", "M8[ns]"), ("value", "<f4")])
        file.read_into(times)
        assert times.tobytes() == values[: times.nbytes].tobytes()


def test_errors_have_names_by_which_programs_find_them(folder, tmp_path):
    def open_elsewhere():
        (tmp_path / "file").write_bytes(b"x")
        gpunvme.open(tmp_path / "file")

    for raising, name in [
        (lambda: gpunvme.open(folder / "missing"), "NotFoundError"),
        (lambda: gpunvme.open(folder, "w"), "IsDirectoryError"),
        (open_elsewhere, "Error"),
    ]:
        with pytest.raises(gpunvme.Error) as refused:
            raising()
        kind = type(refused.value)
        assert traceback.format_exception_only(refused.value)[0].startswith(f"gpunvme.{name}: ")
        assert getattr(gpunvme, name) is kind is pickle.loads(pickle.dumps(kind))
        assert type(pickle.loads(pickle.dumps(refused.value))) is kind


def test_the_types_of_statistics_are_what_they_have(volume):
    with gpunvme.Mount(volume) as mount:
        stats = mount.stats()
    assert stats.keys() == _types.Stats.__annotations__.keys()
    assert stats["read"].keys() == stats["write"].keys() == _types.Routes.__annotations__.keys()
