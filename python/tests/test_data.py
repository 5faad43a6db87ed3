"""Data sets of samples, and batches of them, byte for byte beside ordinary reading."""

import io
import itertools
import os
import pickle
import resource
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from test_torch import DEVICE  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import gpunvme  # noqa: E402
from gpunvme import Error  # noqa: E402
from gpunvme.data import Batches, Files, Records, Sample, Tars  # noqa: E402

EXAMPLES = Path(__file__).parents[1] / "examples"


def contents(lengths, seed=1):
    random = numpy.random.default_rng(seed)
    return [random.bytes(length) for length in lengths]


def read(batch):
    """The bytes of each sample of a batch."""
    return [bytes(view.cpu().numpy()) for view in batch]


@pytest.fixture
def files(folder):
    """Files of all sorts of lengths, and what is in them."""
    content = contents([0, 1, 63, 64, 4095, 4096, 65_535, 65_536, 110 << 10, 1 << 20, 3, 70_001])
    paths = [folder / f"{at:02}" for at in range(len(content))]
    for path, each in zip(paths, content, strict=True):
        path.write_bytes(each)
    return paths, content


@pytest.mark.parametrize("workers", [0, 2])
def test_files_arrive_whole_and_with_what_goes_with_them(files, workers):
    paths, content = files
    labels = [f"label {at}" for at in range(len(paths))]
    torch.manual_seed(3)
    loader = DataLoader(Files(paths, labels), 5, shuffle=True, collate_fn=list, num_workers=workers)
    seen = {}
    for batch in Batches(loader, DEVICE):
        assert batch.memory.device.type == DEVICE
        for sample, value in zip(batch.samples, read(batch), strict=True):
            seen[sample.path] = (sample.extra, value)
    assert seen == {
        str(path): (label, value) for path, label, value in zip(paths, labels, content, strict=True)
    }


def test_large_samples_lie_on_blocks_and_small_ones_as_any_dtype_needs(files):
    paths, content = files
    (batch,) = Batches([list(Files(paths))], DEVICE)
    for view, value in zip(batch, content, strict=True):
        place = view.data_ptr() - batch.memory.data_ptr()
        assert place % (4096 if len(value) >= 65_536 else 64) == 0
    assert read(batch) == content and len(batch) == len(content)


def test_records_of_several_files_are_one_tensor(folder):
    rows = numpy.random.default_rng(5).standard_normal((1000, 3, 7)).astype(numpy.float32)
    for at, part in enumerate(numpy.split(rows, [10, 10, 700])):
        (folder / f"{at}").write_bytes(b"head" + part.tobytes())
    records = Records(sorted(folder.iterdir()), 3 * 7 * 4, header=4)
    assert len(records) == 1000 and records[999].extra == 999
    with pytest.raises(IndexError):
        records[1000]
    loader = DataLoader(records, 64, shuffle=True, collate_fn=list)
    seen = numpy.zeros_like(rows)
    for batch in Batches(loader, DEVICE, ahead=3):
        stacked = batch.stack(torch.float32, (3, 7))
        assert stacked.shape == (len(batch), 3, 7)
        assert stacked.untyped_storage().data_ptr() == batch.memory.untyped_storage().data_ptr()
        seen[[sample.extra for sample in batch.samples]] = stacked.cpu().numpy()
    assert (seen == rows).all()


def test_a_stack_that_cannot_be_is_refused_in_words(files):
    paths, _ = files
    (batch,) = Batches([list(Files(paths[:3]))], DEVICE)
    with pytest.raises(ValueError, match="3 lengths"):
        batch.stack()
    (batch,) = Batches([[Sample(str(paths[5]), 0, 10), Sample(str(paths[5]), 11, 10)]], DEVICE)
    with pytest.raises(ValueError, match="whole number"):
        batch.stack(torch.float32)
    with pytest.raises(ValueError, match="not of shape"):
        batch.stack(torch.uint8, (3, 3))
    assert batch.stack(torch.int16).shape == (2, 5)


def test_records_that_do_not_fit_are_refused_by_name(folder):
    path = folder / "records"
    path.write_bytes(bytes(1001))
    with pytest.raises(ValueError, match=f"{path}: 1 bytes are left behind 10 records"):
        Records([path], 100)
    with pytest.raises(ValueError, match="at least one byte"):
        Records([path], 0)
    with pytest.raises(ValueError, match="bytes are left"):
        Records([path], 100, header=2000)


def test_shards_of_tar(folder):
    content = contents([100, 70_000, 0, 512, 200_000] * 4)
    names = [f"sample{at:03}.{'bin' if at % 2 else 'txt'}" for at in range(len(content))]
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            folder_entry = tarfile.TarInfo("a folder")
            folder_entry.type = tarfile.DIRTYPE
            archive.addfile(folder_entry)
            for name, value in list(zip(names, content, strict=True))[shard::2]:
                entry = tarfile.TarInfo(name)
                entry.size = len(value)
                archive.addfile(entry, io.BytesIO(value))
    shards = sorted(folder.glob("*.tar"))
    samples = pickle.loads(pickle.dumps(Tars(shards)))
    seen = {}
    for batch in Batches(DataLoader(samples, 6, shuffle=True, collate_fn=list), DEVICE):
        for sample, value in zip(batch.samples, read(batch), strict=True):
            seen[sample.extra] = value
    assert seen == dict(zip(names, content, strict=True))
    only = Tars(shards, lambda name: name.endswith(".bin"))
    assert len(only) == 10 and all(sample.extra.endswith(".bin") for sample in only)


def test_shards_that_are_none_are_refused(folder):
    (folder / "no.tar").write_bytes(b"not a tar" * 100)
    with pytest.raises(tarfile.TarError):
        Tars([folder / "no.tar"])
    with tarfile.open(folder / "cut.tar", "w") as archive:
        entry = tarfile.TarInfo("member")
        entry.size = 100_000
        archive.addfile(entry, io.BytesIO(bytes(100_000)))
    os.truncate(folder / "cut.tar", 50_000)
    with pytest.raises(tarfile.TarError):
        Tars([folder / "cut.tar"])
    # What is no header ends a shard for tarfile, and the samples behind it would be missing.
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name in "abcd":
            entry = tarfile.TarInfo(name)
            entry.size = 700
            archive.addfile(entry, io.BytesIO(bytes(700)))
    (folder / "four.tar").write_bytes(whole.getvalue())
    assert len(Tars([folder / "four.tar"])) == 4
    third = 2 * (512 + 1024)
    for name, content in [
        ("in the third header", whole.getvalue()[: third + 100]),
        ("between members", whole.getvalue()[:third]),
        ("damaged", whole.getvalue()[:third] + b"\xff" * 512 + whole.getvalue()[third + 512 :]),
    ]:
        (folder / "part.tar").write_bytes(content)
        with pytest.raises(tarfile.TarError):
            Tars([folder / "part.tar"])
            pytest.fail(name)


def test_an_error_names_its_file_and_comes_in_its_turn(files, tmp_path):
    paths, content = files
    missing = paths[0].with_name("missing")
    batches = Batches([[Sample(str(paths[5]))], [Sample(str(paths[9])), Sample(str(missing))]], DEVICE)
    steps = iter(batches)
    assert read(next(steps)) == [content[5]]
    with pytest.raises(FileNotFoundError, match=str(missing)):
        next(steps)
    with pytest.raises(EOFError, match=f"{paths[5]}: the file ended 1 bytes too early"):
        list(Batches([[Sample(str(paths[5]), 96, 4001)]], DEVICE))
    with pytest.raises(EOFError, match="no sample at 5000"):
        list(Batches([[Sample(str(paths[5]), 5000)]], DEVICE))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"x")
    with pytest.raises(Error, match=str(elsewhere)):
        list(Batches([[Sample(str(elsewhere))]], DEVICE))


def test_what_a_loader_raises_comes_behind_the_batches_before(files):
    paths, content = files

    def loader():
        yield list(Files(paths[:2]))
        yield list(Files(paths[2:4]))
        raise LookupError("the third")

    for ahead in (1, 2, 5):
        steps = iter(Batches(loader(), DEVICE, ahead=ahead))
        assert [read(next(steps)), read(next(steps))] == [content[:2], content[2:4]]
        with pytest.raises(LookupError, match="the third"):
            next(steps)
        assert list(steps) == []
    assert readers_end()


def test_an_epoch_goes_on_where_it_was_left(files):
    paths, _ = files

    def loader():
        generator = torch.Generator().manual_seed(9)
        return DataLoader(Files(paths), 2, shuffle=True, generator=generator, collate_fn=list)

    whole = [read(batch) for batch in Batches(loader(), DEVICE)]
    rest = Batches(loader(), DEVICE, skip=4)
    assert len(rest) == len(whole) - 4
    assert [read(batch) for batch in rest] == whole[4:]
    assert len(list(rest)) == len(whole), "the next epoch is whole"


def threads_of_readers():
    """Names of the threads that read batches, of Python's and native ones."""

    def name(thread):
        try:
            return (thread / "comm").read_text().strip()
        except OSError:
            return ""

    names = [name(thread) for thread in Path("/proc/self/task").iterdir()]
    names += [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("gpunvme-read", "gpunvme-batch"))]


def readers_end():
    """Whether those threads end in a while."""
    end = time.monotonic() + 10
    while threads_of_readers() and time.monotonic() < end:
        time.sleep(0.05)
    return not threads_of_readers()


def test_leaving_in_the_middle_ends_the_threads_and_closes_the_files(files):
    paths, _ = files
    batches = Batches([[Sample(str(path))] for path in paths * 20], DEVICE, ahead=4)
    descriptors = len(os.listdir("/proc/self/fd"))
    for at, _ in enumerate(batches):
        assert threads_of_readers()
        if at == 7:
            break
    del _
    assert readers_end()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 3


def test_what_is_left_of_a_batch_is_not_read_when_the_iteration_is_given_up(files):
    paths, _ = files
    # Each by a path of its own, and so a file of its own.
    many = [Sample(f"{paths[8].parent}/{'./' * at}{paths[8].name}") for at in range(1500)]
    with gpunvme.Mount(paths[0]) as mount:
        steps = iter(Batches([[Sample(str(paths[8]))], many], DEVICE))
        before = mount.stats()["calls"]["read"]
        next(steps)
        steps.close()
        assert mount.stats()["calls"]["read"] < before + len(many)
    assert readers_end()


def test_an_interrupt_ends_an_iteration_and_its_threads(files):
    paths, _ = files
    begun = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        for _ in Batches(itertools.repeat(list(Files(paths))), DEVICE):
            pass
    assert time.monotonic() - begun < 20
    assert readers_end()


def test_batches_of_more_files_than_descriptors_are_read(folder):
    content = contents([1000] * 300)
    paths = [folder / f"{at:03}" for at in range(len(content))]
    for path, each in zip(paths, content, strict=True):
        path.write_bytes(each)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        got = [read(batch) for batch in Batches([list(Files(paths))] * 3, DEVICE)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert got == [content] * 3


def torchrun(folder, ranks, *options):
    """What the training example says in the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "1", EXAMPLES / "train.py", folder, *options]
    # Ranks that begin again must not find the addresses of those that died.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks of NCCL need two GPUs")
def test_training_goes_on_after_a_rank_was_killed_and_with_other_ranks(folder):
    (folder / "straight").mkdir()
    (folder / "killed").mkdir()
    straight = torchrun(folder / "straight", 2, "--steps", 24, "--every", 8)
    killed = torchrun(folder / "killed", 2, "--steps", 24, "--every", 8, "--die-at", 19)
    assert "resumed at step 16 with 2 ranks" in killed and "resumed" not in straight
    assert killed.splitlines()[-1] == straight.splitlines()[-1], "the same weights, to the bit"
    more = torchrun(folder / "killed", 1, "--steps", 32, "--every", 8)
    assert "resumed at step 24 with 1 ranks" in more


def test_training_goes_on_from_an_older_checkpoint_where_the_newest_is_cut(folder):
    torchrun(folder, 1, "--steps", 16, "--every", 8)
    metadata = folder / "step-16" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:1000])
    said = torchrun(folder, 1, "--steps", 16, "--every", 8)
    assert f"{metadata.parent} is no checkpoint" in said and "resumed at step 8 with 1 ranks" in said


def test_ray_places_the_reading(files):
    pytest.importorskip("ray", reason="Ray is not installed")
    paths, content = files
    paths[0].unlink()  # the mean of nothing is none
    command = [sys.executable, str(EXAMPLES / "ray_means.py"), str(paths[0].parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [
        f"{path} {numpy.frombuffer(value, numpy.uint8).mean():.3f}"
        for path, value in list(zip(paths, content, strict=True))[1:]
    ]
    assert [line for line in done.stdout.splitlines() if line.startswith(str(paths[0].parent))] == expected


def test_one_path_is_no_list_of_paths(folder):
    path = folder / "file"
    for kind in (Files, Tars, lambda paths: Records(paths, 4)):
        for one in (path, str(path), os.fsencode(path)):
            with pytest.raises(TypeError, match=f"'{path}' is one path: give a list"):
                kind(one)


def test_paths_may_be_bytes_here_too(files):
    paths, content = files
    (batch,) = Batches([list(Files([os.fsencode(path) for path in paths]))], DEVICE)
    assert read(batch) == content and batch.samples[0].path == str(paths[0])


def test_batches_of_other_things_are_refused_in_words(files):
    paths, _ = files
    with pytest.raises(TypeError, match=r"DataLoader\(…, collate_fn=list\)"):
        Batches(DataLoader(Records(paths[5:6], 64), 4), DEVICE)
    for others in [[str(paths[0])], [Files(paths)[0], 7], Files(paths)[0]]:
        with pytest.raises(
            TypeError, match=r"in the place of a Sample: use DataLoader\(…, collate_fn=list\)"
        ):
            list(Batches([others], DEVICE))


def test_where_there_is_no_cuda_torch_says_so(files, monkeypatch):
    def init():
        raise RuntimeError("No CUDA GPUs are available")

    paths, _ = files
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
        list(Batches([list(Files(paths))]))


def test_no_fewer_than_no_batches_are_left(files):
    assert len(Batches([[]] * 3, DEVICE, skip=5)) == 0
    assert len(Batches([[]] * 3, DEVICE, skip=1)) == 2


def test_an_error_of_tar_names_its_shard(folder):
    path = folder / "no.tar"
    path.write_bytes(b"not a tar" * 100)
    with pytest.raises(tarfile.ReadError, match=f"^{path}: ") as refused:
        Tars([path])
    assert isinstance(refused.value.__cause__, tarfile.ReadError)
    with tarfile.open(path, "w") as archive:
        entry = tarfile.TarInfo("member")
        entry.size = 100_000
        archive.addfile(entry, io.BytesIO(bytes(100_000)))
    os.truncate(path, 50_000)
    with pytest.raises(tarfile.ReadError, match=f"^{path}: it ends within member$"):
        Tars([path])


def test_data_sets_and_batches_show_how_much_is_in_them(files):
    paths, content = files
    assert repr(Files(paths)) == f"Files({len(paths)} files)"
    assert repr(Records(paths[5:6], 64)) == "Records(64 records of 64 bytes in 1 files)"
    (batch,) = Batches([list(Files(paths[4:5]))], DEVICE)
    assert repr(batch) == f"Batch(1 samples, {len(content[4])} bytes on {batch.memory.device})"
