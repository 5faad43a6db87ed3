"""Many threads at once, with the interpreter's lock or without one (3.14t)."""

import os
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
from conftest import needs_cuda
from raw_cuda import Array, Stream

import gpunvme

THREADS = 8


def together(work, threads: int = THREADS) -> list:
    """Does it in so many threads, which begin at once, and returns what they return."""
    ready = threading.Barrier(threads)

    def one(number: int):
        ready.wait()
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, range(threads)))


def test_the_package_asks_for_no_lock_of_the_interpreter():
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("this Python has the lock (3.14t has none)")
    assert not sys._is_gil_enabled()


def test_closing_makes_no_thread_wait_that_has_the_interpreter(stored):
    """A thread that asks while another closes must not be what that one waits for."""
    path, _ = stored(1 << 20)
    code = """if True:
        import sys, threading
        import gpunvme
        sys.setswitchinterval(1e-6)
        for at in range(300):
            # Nothing else has the mount open: what it shares goes with it.
            thing = gpunvme.open(sys.argv[1]) if at % 2 else gpunvme.Mount(sys.argv[1])
            if at % 2:
                thing.submit_read_into(bytearray(1 << 20))

            def ask() -> None:
                try:
                    while True:
                        thing.size if at % 2 else thing.info()
                except ValueError:
                    pass  # closed

            threads = [threading.Thread(target=ask) for _ in range(3)]
            for thread in threads:
                thread.start()
            thing.close()
            for thread in threads:
                thread.join()
    """
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=100)


@needs_cuda
def test_a_call_that_is_the_last_to_use_a_closed_file_makes_no_thread_wait(stored):
    """What goes then waits for a stream that another thread has yet to start."""
    path, _ = stored(1 << 20)
    code = """if True:
        import sys, threading, time
        import gpunvme
        from raw_cuda import Array, Stream
        from test_gpu import Gate

        f = gpunvme.open(sys.argv[1])
        ordered, stream, other = Array(1 << 20), Stream(), Stream()
        late, first, second = Array(1 << 20, stream=other.handle.value), Gate(), Gate()
        f.read_into(late)
        first.close(stream)
        second.close(other)
        pending = f.read_into(ordered, stream=stream)
        call = threading.Thread(target=f.read_into, args=(late,))
        call.start()
        time.sleep(0.2)  # it waits for the other stream
        f.close()
        second.open()
        time.sleep(0.5)  # the call is over, and with it what the file was the last to use
        first.open()
        call.join()
        assert pending.result(30).bytes == 1 << 20
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60, env=environment)


@pytest.mark.parametrize("kind", ["host", pytest.param("gpu", marks=needs_cuda)])
def test_threads_that_wait_for_one_request_all_get_its_result(stored, kind):
    path, _ = stored(4 << 20)
    with gpunvme.open(path) as f:
        for _ in range(20):
            memory = bytearray(4 << 20) if kind == "host" else Array(4 << 20)
            pending = f.submit_read_into(memory)
            results = together(lambda _, pending=pending: pending.result(60))
            assert all(result is results[0] for result in results) and results[0].bytes == 4 << 20
        failed = f.submit_write_from(bytearray(10))

        def error(_: int) -> BaseException:
            with pytest.raises(gpunvme.Error) as raised:
                failed.result(60)
            return raised.value

        assert len({str(found) for found in together(error)}) == 1


def test_threads_open_read_write_and_close_at_once(stored, folder):
    path, values = stored(1 << 20)
    mount = gpunvme.Mount(folder)
    shared = gpunvme.open(path)

    def work(number: int) -> bool:
        random = numpy.random.default_rng(number)
        mine = folder / f"of-{number}"
        for at in range(40):
            offset, length = int(random.integers(0, 500_000)), int(random.integers(1, 500_000))
            expected = values[offset : offset + length]
            with gpunvme.open(path) as own:
                for file in (shared, own):
                    target = bytearray(length)
                    pending = file.submit_read_into(target, offset)
                    again = numpy.empty(length, numpy.uint8)
                    assert file.read_into(again, offset).bytes == length
                    assert pending.result(60).bytes == length
                    assert target == expected.tobytes() and numpy.array_equal(again, expected)
            registered = numpy.frombuffer(mount.buffer(1 << 16), numpy.uint8)
            registered[:] = at
            with gpunvme.open(mine, "w") as file:
                file.write_from(registered)
            assert mine.read_bytes() == bytes([at]) * (1 << 16)
            assert mount.stats()["failed"] >= 0 and shared.extents()
        return True

    assert all(together(work))
    shared.close()


@needs_cuda
def test_threads_use_device_memory_and_streams_at_once(stored):
    path, values = stored(2 << 20)
    shared = gpunvme.open(path)

    def work(number: int) -> bool:
        random, stream = numpy.random.default_rng(number), Stream()
        for _ in range(15):
            offset, length = int(random.integers(0, 1 << 20)), int(random.integers(1, 1 << 20))
            in_stream, submitted, read = Array(length), Array(length), Array(length)
            pending = [
                shared.read_into(in_stream, offset, stream=stream),
                shared.submit_read_into(submitted, offset),
            ]
            shared.read_into(read, offset)
            assert [one.result(60).bytes for one in pending] == [length, length]
            for array in (in_stream, submitted, read):
                assert numpy.array_equal(array.get(), values[offset : offset + length])
        return True

    assert all(together(work))
    shared.close()
