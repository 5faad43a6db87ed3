"""Distributed checkpoints, beside PyTorch's own reader and writer."""

import itertools
import os
import resource
import socket
import threading

import numpy
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed.checkpoint as dcp  # noqa: E402
from test_torch import DEVICE, DTYPES, random  # noqa: E402
from test_torch_save import equal  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

import gpunvme  # noqa: E402
from gpunvme import checkpoint  # noqa: E402
from gpunvme.checkpoint import Reader, Writer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def state(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(640, 1280), torch.nn.Linear(1280, 32)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(640, device=DEVICE)).sum().backward()
    optimizer.step()
    large = random((1000, 3000), torch.bfloat16)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "large": large,
        "view": large[10:500],
        "transposed": random((300, 400), torch.float32).T,
        "dtypes": {str(dtype): random((3, 70_000), dtype) for dtype in DTYPES},
        "step": seed,
        "text": "x" * seed,
        "scalar": torch.tensor(float(seed), device=DEVICE),
    }


@pytest.mark.parametrize("writer", [Writer, dcp.FileSystemWriter])
@pytest.mark.parametrize("reader", [Reader, dcp.FileSystemReader])
def test_both_read_what_both_write(folder, writer, reader):
    saved, loaded = state(1), state(2)
    dcp.save(saved, storage_writer=writer(folder / "c"))
    dcp.load(loaded, storage_reader=reader(folder / "c"))
    assert equal(loaded, saved)


def test_the_path_of_a_checkpoint_may_be_bytes(folder):
    path = os.fsencode(folder / "c")
    saved, loaded = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    dcp.save(saved, storage_writer=Writer(path))
    dcp.load(loaded, storage_reader=Reader(path))
    assert equal(loaded, saved)


def matrix(value):
    return {"w": torch.full((300, 300), value, device=DEVICE)}


def loaded_from(path, reader=Reader):
    loaded = matrix(0.0)
    dcp.load(loaded, storage_reader=reader(path))
    return loaded


@pytest.mark.parametrize("before", [Writer, dcp.FileSystemWriter])
def test_a_save_that_does_not_end_leaves_no_mixture(folder, monkeypatch, before):
    """What is there stays, to be read by both readers, until the next save that ends."""
    path = folder / "c"
    dcp.save(matrix(1.0), storage_writer=before(path))
    perform = checkpoint.perform

    def killed(items, *, write=False, require=None):
        perform(items, write=write, require=require)
        if write:
            for reader in (Reader, dcp.FileSystemReader):
                assert equal(loaded_from(path, reader), matrix(1.0))
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gpunvme.checkpoint.perform", killed)
        with pytest.raises(BaseException) as raised:
            dcp.save(matrix(2.0), storage_writer=Writer(path))
    assert "KeyboardInterrupt" in str(raised.value) or raised.type is KeyboardInterrupt
    assert equal(loaded_from(path), matrix(1.0)) and len(list(path.glob("*.distcp"))) == 2
    dcp.save(matrix(3.0), storage_writer=Writer(path))
    for reader in (Reader, dcp.FileSystemReader):
        assert equal(loaded_from(path, reader), matrix(3.0))
    assert sorted(name.suffix for name in path.iterdir()) == ["", ".distcp"], "what is left of others goes"


def test_what_a_save_left_in_a_folder_without_a_checkpoint_goes_with_the_next(folder):
    """As on a node with a folder of its own, where another node's has the metadata."""

    class OfAnotherNode(Writer):
        def finish(self, metadata, results):
            pass

    for value in (1.0, 2.0):
        dcp.save(matrix(value), storage_writer=OfAnotherNode(folder / "c"))
        assert len(list((folder / "c").iterdir())) == 1


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_while_a_checkpoint_takes_the_place_of_another_leaves_one_of_them(
    own_volume, monkeypatch, moment
):
    path, rename = own_volume.path / "c", os.rename
    dcp.save(matrix(1.0), storage_writer=Writer(path))

    def crash(*paths):
        if moment == "after":
            rename(*paths)
        own_volume.kill()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", crash)
        with pytest.raises(BaseException):  # noqa: B017 (PyTorch wraps it)
            dcp.save(matrix(2.0), storage_writer=Writer(path))
    own_volume.unmount()
    own_volume.mount()
    found = loaded_from(path)
    assert equal(found, matrix(1.0)) or (moment == "after" and equal(found, matrix(2.0)))


def test_metadata_are_whole_when_they_are_synced(folder, monkeypatch):
    """And get their name afterwards, by which the ones before are replaced."""
    fsync, rename, events = os.fsync, os.rename, []

    def synced(descriptor):
        fsync(descriptor)
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))

    def renamed(old, new):
        events.append(("rename", os.fspath(old), os.stat(old).st_size))
        assert os.path.exists(new) == (value == 2.0), "what is replaced is there until then"
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    for value in (1.0, 2.0):
        events.clear()
        dcp.save(matrix(value), storage_writer=Writer(folder / "c"))
        at = next(at for at, event in enumerate(events) if event[0] == "rename")
        _, temporary, size = events[at]
        assert ("sync", temporary, size) in events[:at]
        assert size == os.path.getsize(folder / "c" / ".metadata")
        assert ("sync", str(folder / "c")) in [event[:2] for event in events[at:]]


def test_a_checkpoint_may_have_more_files_than_a_process_may_open(folder):
    saved = {f"t{at}": random((3, at + 1), torch.float32) for at in range(300)}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(folder / "c", single_file_per_rank=False))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        dcp.load(loaded, storage_reader=Reader(folder / "c"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert equal(loaded, saved)


def test_tensors_are_read_where_they_lie(folder):
    saved, target = {"a": random((512, 1024), torch.float32)}, {"a": torch.zeros(512, 1024, device=DEVICE)}
    dcp.save(saved, storage_writer=Writer(folder / "c"))
    before, mount = target["a"].data_ptr(), gpunvme.Mount(folder)
    read = sum(mount.stats()["read"].values())
    dcp.load(target, storage_reader=Reader(folder / "c"))
    assert target["a"].data_ptr() == before and equal(target, saved)
    # What the kernel has read ahead is in its page cache, and not read again.
    assert 0 < sum(mount.stats()["read"].values()) - read <= saved["a"].nbytes
    if DEVICE == "cuda":
        dcp.load(target, storage_reader=Reader(folder / "c", require="bounce"))


@pytest.mark.parametrize("writer", [Writer, dcp.FileSystemWriter])
def test_many_tensors_that_are_alike_are_looked_at_once(folder, writer, monkeypatch):
    looked = []
    layout = checkpoint.layout
    monkeypatch.setattr(checkpoint, "layout", lambda *given: looked.append(given) or layout(*given))
    saved = {str(at): random((8, 8), torch.float32) for at in range(40)}
    saved["other"] = random((4, 16), torch.float32)
    dcp.save(saved, storage_writer=writer(folder / "c"))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    dcp.load(loaded, storage_reader=Reader(folder / "c"))
    assert equal(loaded, saved) and len(looked) == 2


class Late(Writer):
    """Writes when it is told to."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.now = threading.Event()

    def write_data(self, *args):
        assert self.now.wait(60)
        return super().write_data(*args)


@pytest.mark.parametrize("snapshot_on_gpu", [False, True])
def test_an_asynchronous_save_holds_what_was_when_it_began(folder, snapshot_on_gpu):
    with _group():
        saved = state(3) | {"array": numpy.arange(4)}
        expected = {key: value.clone() for key, value in saved["model"].items()}
        writer = Late(folder / "c", snapshot_on_gpu=snapshot_on_gpu)
        future = dcp.async_save(saved, storage_writer=writer)
        with torch.no_grad():
            for value in saved["model"].values():
                value.zero_()
        saved["array"][:] = 0
        writer.now.set()
        future.result()
        loaded = {"model": state(4)["model"], "array": None}
        dcp.load(loaded, storage_reader=Reader(folder / "c"))
        assert equal(dict(loaded["model"]), expected) and loaded["array"].tolist() == [0, 1, 2, 3]


def test_a_checkpoint_that_was_saved_outlives_the_daemon(own_volume):
    saved, loaded = ({"a": torch.full((300, 300), value, device=DEVICE)} for value in (7.0, 0.0))
    dcp.save(saved, storage_writer=Writer(own_volume.path / "c"))
    own_volume.kill()
    own_volume.unmount()
    own_volume.mount()
    dcp.load(loaded, storage_reader=Reader(own_volume.path / "c"))
    assert torch.equal(loaded["a"], saved["a"])


def test_a_checkpoint_elsewhere_is_refused(tmp_path):
    with pytest.raises(CheckpointException, match="not on a gpunvme mount"):
        dcp.save({"a": torch.ones(3)}, storage_writer=Writer(tmp_path / "c"))


@pytest.mark.parametrize("reader", [Reader, dcp.FileSystemReader])
def test_views_are_saved_as_what_they_show(folder, reader):
    base = torch.randn(700, 512, device=DEVICE)
    numbers = torch.randn(40_000, dtype=torch.complex64, device=DEVICE)
    saved = {
        "rows": base[100:300],
        "columns": base[:, 1:300],
        "transposed": base.T,
        "expanded": base[:1].expand(300, 512),
        "column": base[:, :1].expand(700, 200),
        "conjugated": numbers.conj(),
        "negated": numbers.conj().imag,
        "empty": base[:0],
        "parameter": torch.nn.Parameter(base[300:]),
        "small": base[0, :3],
    }
    dcp.save(saved, storage_writer=Writer(folder / "c"))
    parts = sum(file.stat().st_size for file in (folder / "c").glob("*.distcp"))
    assert parts < sum(tensor.nbytes for tensor in saved.values()) + len(saved) * (64 << 10)
    loaded = {key: torch.zeros(value.shape, dtype=value.dtype, device=DEVICE) for key, value in saved.items()}
    dcp.load(loaded, storage_reader=reader(folder / "c"))
    for key, value in saved.items():
        assert torch.equal(loaded[key].resolve_conj(), value.resolve_conj().resolve_neg()), key


def test_a_save_makes_few_requests_of_many_tensors(folder):
    """What surrounds tensors goes with them, in requests of its own, and does not wait for theirs."""
    saved = {f"{at}": random((200, 100), torch.float32) for at in range(100)}
    with gpunvme.Mount(folder) as mount:

        def calls():
            dcp.save(saved, storage_writer=Writer(folder / "c"))
            return sum(mount.stats()["calls"].values())

        # On a GPU each tensor is a transfer of its own.
        assert -calls() + calls() < 20 + (len(saved) if DEVICE == "cuda" else 0)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 3)])
def test_a_checkpoint_is_read_by_another_number_of_ranks(folder, ranks):
    saving, loading = ranks
    _run(saving, _save_shards, folder)
    _run(loading, _load_shards, folder)


class _group:
    """A group of this process alone, or of several."""

    def __init__(self, rank=0, size=1, port=None):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or _free_port())}
        self.rank, self.size = rank, size

    def __enter__(self):
        torch.distributed.init_process_group("gloo", rank=self.rank, world_size=self.size)

    def __exit__(self, *_):
        torch.distributed.destroy_process_group()


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _run(size, work, folder):
    torch.multiprocessing.spawn(_rank, (size, _free_port(), work, str(folder)), nprocs=size)


def _rank(rank, size, port, work, folder):
    with _group(rank, size, port):
        work(folder, size)


def _shards(size, value):
    """A matrix in rows, and one in columns, over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(1200 * 700, dtype=torch.float32).reshape(1200, 700)
    return {
        "rows": distribute_tensor(whole * value, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole * value * 2, mesh, [Shard(1)]),
    }


def _save_shards(folder, size):
    """Saves by both writers; and asynchronously, while training goes on."""
    state = _shards(size, 1)
    dcp.save(state, storage_writer=Writer(f"{folder}/ours"))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{folder}/stock"))
    saving = dcp.async_save(state, storage_writer=Writer(f"{folder}/asynchronous", snapshot_on_gpu=True))
    for tensor in state.values():
        tensor.zero_()
    saving.result()


def _load_shards(folder, size):
    for name, reader in itertools.product(("ours", "stock", "asynchronous"), (Reader, dcp.FileSystemReader)):
        loaded, expected = _shards(size, 0), _shards(size, 1)
        dcp.load(loaded, storage_reader=reader(f"{folder}/{name}"))
        for key in loaded:
            assert torch.equal(loaded[key].to_local(), expected[key].to_local()), (name, key)
