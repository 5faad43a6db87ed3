"""Requests of event loops."""

import asyncio
import gc
import os
import threading
import time
import weakref

import numpy
import pytest
from conftest import needs_cuda
from raw_cuda import Array, Stream
from test_gpu import Gate

import gpunvme
from gpunvme._file import _Waiting


def make(kind: str, length: int):
    return numpy.zeros(length, numpy.uint8) if kind == "host" else Array(length)


def read_back(array) -> numpy.ndarray:
    return array if isinstance(array, numpy.ndarray) else array.get()


KINDS = pytest.mark.parametrize("kind", ["host", pytest.param("gpu", marks=needs_cuda)])


@KINDS
def test_many_requests_are_awaited_together(stored, kind):
    path, values = stored(8 << 20)

    async def main() -> None:
        with gpunvme.open(path) as f:
            arrays = [make(kind, 10_000) for _ in range(500)]
            threads = threading.active_count()
            done = await asyncio.gather(
                *(f.read_into_async(array, at * 10_000) for at, array in enumerate(arrays))
            )
            assert threading.active_count() == threads
            assert [d.bytes for d in done] == [10_000] * 500
            together = numpy.concatenate([read_back(array) for array in arrays])
            assert numpy.array_equal(together, values[: 500 * 10_000])

    asyncio.run(main())
    asyncio.run(main())  # another loop


@KINDS
def test_the_loop_goes_on_meanwhile(stored, kind):
    path, _ = stored(64 << 20)

    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        with gpunvme.open(path) as f:
            task = asyncio.create_task(tick())
            await f.read_into_async(make(kind, 64 << 20))
            task.cancel()
        assert ticks > 10

    asyncio.run(main())


@needs_cuda
def test_the_loop_goes_on_while_the_memory_s_stream_has_work_to_do(stored):
    path, values = stored(100_000)
    stream, gate = Stream(), Gate()
    array = Array(100_000, stream=stream.handle.value)

    async def main() -> None:
        with gpunvme.open(path) as f:
            await f.read_into_async(array)
            array.set(numpy.zeros(100_000))
            gate.close(stream)
            begun = time.monotonic()
            task = asyncio.create_task(f.read_into_async(array))
            await asyncio.sleep(0.1)
            assert not task.done() and time.monotonic() - begun < Gate.LIMIT / 2
            gate.open()
            assert (await asyncio.wait_for(task, 30)).bytes == 100_000
        assert numpy.array_equal(array.get(), values)

    asyncio.run(main())


@KINDS
def test_written_bytes_arrive(folder, kind):
    async def main() -> None:
        values = numpy.arange(100_000, dtype=numpy.uint32).view(numpy.uint8)
        array = values if kind == "host" else Array(values.size).set(values)
        with gpunvme.open(folder / "file", "w") as f:
            done = await f.write_from_async(array, 5)
            assert done.bytes == 400_000
        assert (folder / "file").read_bytes()[5:] == values.tobytes()

    asyncio.run(main())


def test_what_nobody_expects_costs_no_other_request_its_result(stored):
    path, values = stored(100)

    async def main() -> None:
        with gpunvme.open(path) as f:
            _, waiting = _Waiting.here()
            stray, wanted = numpy.zeros(100, numpy.uint8), numpy.zeros(100, numpy.uint8)
            f._submit_to(False, stray, 0, None, (waiting.completions, 1 << 60))
            task = asyncio.create_task(f.read_into_async(wanted))
            await asyncio.sleep(0)
            time.sleep(0.5)  # the loop takes both at once
            assert (await asyncio.wait_for(task, 20)).bytes == 100
            assert numpy.array_equal(wanted, values) and numpy.array_equal(stray, values)

    asyncio.run(main())


def test_errors_are_raised_where_it_is_awaited(stored):
    path, _ = stored(100)

    async def main() -> None:
        with gpunvme.open(path) as f:
            with pytest.raises(gpunvme.Error) as refused:
                await f.write_from_async(b"abc")
            assert refused.value.filename == str(path)
            with pytest.raises(TypeError, match="holds no memory"):
                await f.read_into_async(5)
            with pytest.raises(gpunvme.Error):
                await f.read_into_async(bytearray(10), require="p2p")
            assert (await f.read_into_async(bytearray(10))).bytes == 10

    asyncio.run(main())


@needs_cuda
def test_a_cancelled_task_keeps_the_memory_until_the_transfer_is_over(stored):
    path, _ = stored(32 << 20)

    async def main() -> None:
        with gpunvme.open(path) as f:
            before = Array.freed
            task = asyncio.create_task(f.read_into_async(Array(32 << 20)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            gc.collect()
            for _ in range(1000):
                if Array.freed == before + 1:
                    break
                await asyncio.sleep(0.01)
                gc.collect()
            assert Array.freed == before + 1
            assert (await f.read_into_async(Array(10))).bytes == 10

    asyncio.run(main())


def test_a_loop_that_ends_leaves_no_descriptor(stored):
    path, _ = stored(100_000)

    async def main() -> None:
        with gpunvme.open(path) as f:
            await f.read_into_async(bytearray(100_000))
            f.read_into_async(bytearray(10)).close()

    asyncio.run(main())
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        asyncio.run(main())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_loops_that_were_closed_with_requests_in_flight_let_go_of_them(stored):
    path, _ = stored(64 << 20)
    memory = []

    async def leave(f) -> None:
        array = numpy.zeros(64 << 20, numpy.uint8)
        memory.append(weakref.ref(array))
        task = asyncio.create_task(f.read_into_async(array))
        await asyncio.sleep(0)
        task.cancel()

    async def small(f) -> None:
        assert (await f.read_into_async(bytearray(10))).bytes == 10

    def kept() -> int:
        asyncio.run(small(f))
        gc.collect()
        return sum(array() is not None for array in memory)

    descriptors = []
    with gpunvme.open(path) as f:
        for _ in range(2):
            for _ in range(5):
                asyncio.run(leave(f))
            end = time.monotonic() + 60
            while kept() and time.monotonic() < end:
                time.sleep(0.01)
            assert kept() == 0
            descriptors.append(len(os.listdir("/proc/self/fd")))
    # Those that stay are of what is copied through.
    assert descriptors[1] <= descriptors[0] + 1


def test_a_task_that_nobody_holds_is_finished(stored):
    path, values = stored(1 << 20)
    array = numpy.zeros(1 << 20, numpy.uint8)
    done = []

    async def read(f) -> None:
        done.append(await f.read_into_async(array))

    async def main(f) -> None:
        asyncio.ensure_future(read(f))  # noqa: RUF006
        while not done:
            gc.collect()
            await asyncio.sleep(0)

    with gpunvme.open(path) as f:
        asyncio.run(main(f))
    assert numpy.array_equal(array, values)
