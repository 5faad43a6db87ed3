"""LMCache's own classes, on files of a mount."""

import asyncio
import threading
from types import SimpleNamespace

import numpy
import pytest
import raw_cuda
from conftest import needs_cuda
from raw_cuda import Array, Stream

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("lmcache.v1.storage_backend.local_cpu_backend", reason="LMCache is not installed")

from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.gpu_connector._gds_backends import available_backends, create_backend  # noqa: E402
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402
from lmcache.v1.storage_backend import storage_plugin_launcher  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402

import gpunvme.lmcache  # noqa: E402

SIZE = 3 << 20


@needs_cuda
def test_a_slab_is_written_and_read_in_the_order_of_streams(folder):
    gpunvme.lmcache.register()
    gpunvme.lmcache.register()
    assert available_backends().count("gpunvme") == 1
    backend = create_backend("gpunvme")
    with backend.open_slab(str(folder), 1 << 26, True) as slab:
        assert (folder / "lmcache_gds_slab.bin").stat().st_size == 1 << 26
        stream = Stream()
        raw = stream.handle.value
        backend.register_stream(raw)
        values = numpy.random.default_rng(8).integers(0, 256, SIZE, numpy.uint8)
        source, target = Array(SIZE).set(values), Array(SIZE).set(numpy.zeros(SIZE))
        base = source.address.value
        written = slab.write_async(base, SIZE - 4096, 1 << 20, 4096, raw)
        read = slab.read_async(target.address.value, SIZE - 4096, 1 << 20, 0, raw)
        stream.synchronize()
        assert written.bytes_done == read.bytes_done == SIZE - 4096
        assert numpy.array_equal(target.get()[:-4096], values[4096:])
        # What lies behind the slab is not there: fewer bytes, and no error.
        assert slab.read_async(base, 4096, 1 << 26, 0, raw).bytes_done == 0
        with pytest.raises(gpunvme.Error):
            slab.read_async(0x1000, 4096, 0, 0, raw)
        backend.deregister_stream(raw)
    slab.close()
    backend.close_driver()
    assert raw_cuda.driver() is not None


@pytest.fixture
def storage(folder):
    """The plugin, made as LMCache makes it."""
    config = LMCacheEngineConfig.from_defaults(local_cpu=True, max_local_cpu_size=0.25)
    config.storage_plugins = ["gpunvme"]
    config.extra_config = {
        "storage_plugin.gpunvme.module_path": "gpunvme.lmcache.storage",
        "storage_plugin.gpunvme.class_name": "Storage",
        "gpunvme.path": str(folder / "kv"),
    }
    metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.bfloat16, (2, 2, 16, 2, 8))
    host = LocalCPUBackend(config, metadata, "cpu")
    made: dict = {}
    storage_plugin_launcher(config, metadata, None, host, "cpu", made)
    yield made["gpunvme"]
    made["gpunvme"].close()


def key(number: int) -> CacheEngineKey:
    return CacheEngineKey("org/model", 1, 0, number, torch.bfloat16)


def test_chunks_are_put_found_read_and_removed(storage, folder):
    host, chunks = storage.get_allocator_backend(), []
    for number in range(8):
        chunk = host.allocate(torch.Size([2, 2, 256, 100 + number]), torch.bfloat16)
        chunk.tensor.copy_(torch.randn(chunk.tensor.shape))
        chunks.append(chunk)
    keys = [key(number) for number in range(8)]
    told, all_told = [], threading.Event()

    def tell(one):
        told.append(one)
        if len(told) == 8:
            all_told.set()

    for future in storage.batched_submit_put_task(keys, chunks, on_complete_callback=tell):
        future.result(30)
    assert all_told.wait(30) and set(told) == set(keys)
    assert [chunk.get_ref_count() for chunk in chunks] == [1] * 8
    assert storage.batched_submit_put_task(keys, chunks) == []  # they are there
    assert not any(storage.exists_in_put_tasks(one) for one in keys)
    assert storage.contains(keys[3]) and not storage.contains(key(100))
    assert storage.batched_contains([*keys, key(100)]) == 8
    assert asyncio.run(storage.batched_async_contains("lookup", [keys[0], key(100), keys[1]])) == 1

    # A chunk that is no tensor is not written, and is given back.
    odd = SimpleNamespace(
        tensor=None, ref_count_up=lambda: told.append("up"), ref_count_down=lambda: told.append("down")
    )
    (future,) = storage.batched_submit_put_task([key(50)], [odd])
    assert future.exception(30) is not None and told[-2:] == ["up", "down"]
    assert not storage.exists_in_put_tasks(key(50)) and not storage.contains(key(50))
    assert not storage.contains(CacheEngineKey("/a" * 120, 1, 0, 1, torch.bfloat16))

    read = storage.batched_get_blocking([*keys, key(100)])
    assert read[8] is None and storage.get_blocking(key(100)) is None
    more = asyncio.run(storage.batched_get_non_blocking("lookup", keys))
    for one, other in zip([*read[:8], *more], chunks * 2, strict=True):
        assert torch.equal(one.tensor, other.tensor) and one.metadata.fmt == other.metadata.fmt
        one.ref_count_down()
    assert storage.remove(keys[0]) and not storage.remove(keys[0]) and not storage.contains(keys[0])
    # A file that was cut is no chunk.
    with open(storage._path(keys[1]), "r+b") as file:
        file.truncate(5000)
    assert storage.get_blocking(keys[1]) is None
    # Nor is one whose header is damaged. None stands in the place of one that is missing before it.
    storage._path(keys[3]).write_bytes(b"{" + bytes(5000))
    assert storage.get_blocking(keys[3]) is None
    for missing in [keys[0], keys[1], keys[3]]:
        wanted = [keys[2], missing, keys[4]]
        (one,) = asyncio.run(storage.batched_get_non_blocking("lookup", wanted))
        assert torch.equal(one.tensor, chunks[2].tensor)
        one.ref_count_down()
    for chunk in chunks:
        chunk.ref_count_down()
    assert not list((folder / "kv").glob(".*")) and not list((folder / "kv").glob("*.tmp"))
