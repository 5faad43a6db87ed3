"""Zarr's own arrays, by the store."""

import asyncio
import os

import numpy
import pytest

zarr = pytest.importorskip("zarr", reason="Zarr is not installed")

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest  # noqa: E402
from zarr.core.buffer import cpu  # noqa: E402

import gpunvme  # noqa: E402
from gpunvme.zarr import Store  # noqa: E402

VALUES = numpy.random.default_rng(11).standard_normal((300, 200)).astype("f4")


@pytest.mark.parametrize("how", ["plain", "compressed", "sharded"])
def test_arrays_are_read_whole_and_in_parts(folder, how):
    more = {"compressors": None} if how == "plain" else {}
    if how == "sharded":
        more["shards"] = (256, 128)
    path = folder / "array.zarr"
    written = zarr.create_array(path, shape=(400, 200), chunks=(64, 64), dtype="f4", fill_value=7, **more)
    written[:300] = VALUES
    # What the page cache has is not asked of the mount.
    for file in path.rglob("*"):
        if file.is_file():
            with open(file, "rb") as plain:
                os.posix_fadvise(plain.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = gpunvme.Mount(folder).stats()["calls"]["read"]
    array = zarr.open_array(Store(path), mode="r")
    assert numpy.array_equal(array[:300], VALUES) and (array[300:] == 7).all()
    assert numpy.array_equal(array[65:130, 3:77], VALUES[65:130, 3:77])
    assert numpy.array_equal(array[[5, 250], :][:, [0, 199]], VALUES[[5, 250]][:, [0, 199]])
    assert gpunvme.Mount(folder).stats()["calls"]["read"] > before


def test_parts_of_values(folder):
    (folder / "value").write_bytes(bytes(range(100)))
    store, prototype = Store(folder), cpu.buffer_prototype

    async def main() -> None:
        whole = await store.get("value")
        assert whole.to_bytes() == bytes(range(100))
        parts = await store.get_partial_values(
            prototype,
            [
                ("value", RangeByteRequest(5, 8)),
                ("value", RangeByteRequest(90, 200)),
                ("value", OffsetByteRequest(97)),
                ("value", SuffixByteRequest(2)),
                ("value", SuffixByteRequest(1000)),
                ("missing", None),
                ("value/below", None),
                ("", None),
            ],
        )
        expected = [
            bytes(range(5, 8)),
            bytes(range(90, 100)),
            b"abc",
            b"bc",
            bytes(range(100)),
            None,
            None,
            None,
        ]
        assert [part and part.to_bytes() for part in parts] == expected
        with pytest.raises(TypeError):
            await store.get("value", prototype, 5)

    asyncio.run(main())


def test_chunks_come_into_gpu_memory(folder):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not cupy.cuda.is_available():
        pytest.skip("CuPy reaches no GPU")
    zarr.create_array(folder / "a", data=VALUES, chunks=(64, 64), compressors=None)
    with zarr.config.enable_gpu():
        loaded = zarr.open_array(Store(folder / "a"), mode="r")[:]
    assert isinstance(loaded, cupy.ndarray) and numpy.array_equal(cupy.asnumpy(loaded), VALUES)
