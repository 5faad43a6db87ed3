"""Many files that are opened and read in one call each, as the batches of a data set are."""

import errno
import os
import resource
import time
from contextlib import contextmanager

import numpy
import pytest
from conftest import needs_cuda
from raw_cuda import Array

import gpunvme
from gpunvme import Error
from gpunvme._native import BatchReader

#: What each file's place in the memory is a multiple of.
STEP = 4096


@pytest.fixture
def many(folder):
    """300 files of many lengths, some of them empty, and what is in them."""
    random = numpy.random.default_rng(7)
    content = [random.bytes(int(length)) for length in random.integers(0, 150_000, 300)]
    content[0] = content[17] = content[299] = b""
    paths = [folder / f"{at:03}" for at in range(len(content))]
    for path, each in zip(paths, content, strict=True):
        path.write_bytes(each)
    return paths, content


def placed(sizes):
    """Whole files, one behind the other in memory, and how much memory that takes."""
    parts, end = [], 0
    for size in sizes:
        parts.append([(end, 0, size)] if size else [])
        end += -(-size // STEP) * STEP
    return parts, end


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def limited(descriptors):
    """This process may have so many descriptors and no more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def read(reader, paths, memory=bytearray):
    """The bytes of files."""
    with reader.open(paths) as files:
        parts, end = placed(files.sizes)
        target = memory(end)
        assert files.read_into(target, parts) == files.sizes
    got = target.get().tobytes() if isinstance(target, Array) else bytes(target)
    return [got[part[0][0] :][: part[0][2]] if part else b"" for part in parts]


@pytest.mark.parametrize("threads", [1, 8])
def test_many_files_arrive_whole_and_are_closed(many, threads):
    paths, content = many
    before = descriptors()
    mount = gpunvme.Mount(paths[0])
    reader = BatchReader(threads)
    for _ in range(3):
        assert read(reader, paths) == content
    assert read(reader, []) == []
    mount.close()
    del reader
    assert descriptors() <= before + 1


@needs_cuda
def test_many_files_arrive_whole_on_a_gpu(many):
    paths, content = many
    assert read(BatchReader(8), paths, Array) == content


def test_parts_of_one_file_are_one_request(stored):
    path, values = stored(1 << 20)
    with gpunvme.Mount(path) as mount:
        parts = [(at * 64, (at * 7919) % (1 << 20) // 64 * 64, 64) for at in range(100)]
        memory = numpy.zeros(6400, numpy.uint8)
        before = mount.stats()["calls"]["read"]
        with BatchReader(8).open([path]) as files:
            assert files.read_into(memory, [parts]) == [6400]
        assert mount.stats()["calls"]["read"] == before + 1
    for at, offset, length in parts:
        assert (memory[at : at + length] == values[offset : offset + length]).all()


def test_a_file_in_the_middle_that_cannot_be_opened_is_named(many, tmp_path):
    paths, _ = many
    reader, before = BatchReader(8), descriptors()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"x")
    for wrong, kind in [
        (paths[0].with_name("missing"), FileNotFoundError),
        (paths[0].parent, Error),
        (elsewhere, Error),
    ]:
        with pytest.raises(kind) as failed:
            reader.open([*paths[:150], wrong, *paths[150:]])
        assert failed.value.filename == str(wrong)
        del failed
    # What is kept of the mount takes a few.
    assert descriptors() <= before + 4


def test_the_first_of_several_wrong_files_is_named(many):
    paths, _ = many
    missing = [paths[0].with_name(f"missing{at}") for at in range(50)]
    for _ in range(20):
        with pytest.raises(FileNotFoundError) as failed:
            BatchReader(8).open([*paths[:20], *missing])
        assert failed.value.filename == str(missing[0])


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's rights are taken on by root alone")
def test_a_file_that_may_not_be_read_is_named(many, folder, monkeypatch):
    paths, _ = many
    paths[100].chmod(0o600)
    # The folders above are root's alone.
    monkeypatch.chdir(folder)
    reader = BatchReader(8)
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionError) as failed:
            reader.open([path.name for path in paths])
    finally:
        os.seteuid(0)
    assert failed.value.filename == paths[100].name


def test_a_file_that_became_shorter_is_read_as_far_as_it_goes(many):
    paths, content = many
    at = next(at for at in range(100, 300) if len(content[at]) > 10_000)
    with BatchReader(8).open(paths) as files:
        parts, end = placed(files.sizes)
        os.truncate(paths[at], 5000)
        memory = bytearray(end)
        moved = files.read_into(memory, parts)
    assert moved == [*files.sizes[:at], 5000, *files.sizes[at + 1 :]]
    place = parts[at][0][0]
    assert memory[place : place + 5000] == content[at][:5000]
    assert not any(memory[place + 5000 : place + len(content[at])])


def test_a_demand_is_obeyed(many):
    paths, _ = many
    with BatchReader(8).open(paths) as files:
        parts, end = placed(files.sizes)
        memory = numpy.zeros(end, numpy.uint8)
        with pytest.raises(Error) as failed:
            files.read_into(memory, parts, require="direct")
        assert failed.value.reason == "route-not-available" and failed.value.filename == str(paths[1])
        with pytest.raises(ValueError, match="closed"):
            files.read_into(memory, parts)
    assert not memory.any()


def test_nothing_is_in_flight_when_one_in_the_middle_has_failed(many):
    paths, _ = many
    for _ in range(10):
        # None stays open, so that another can be put in the place of one.
        with limited(3):
            reader = BatchReader(8)
        files = reader.open(paths)
        parts, end = placed(files.sizes)
        other = paths[0].with_name("other")
        other.write_bytes(b"other")
        os.replace(other, paths[100])
        memory = numpy.zeros(end, numpy.uint8)
        with pytest.raises(Error, match="another file") as failed:
            files.read_into(memory, parts)
        assert failed.value.filename == str(paths[100]) and failed.value.errno == errno.ESTALE
        memory[:] = 77
        time.sleep(0.01)
        assert (memory == 77).all()


def test_parts_beside_the_memory_are_refused(many):
    paths, _ = many
    with BatchReader(8).open(paths[1:3]) as files:
        for parts in ([[(0, 0, 101)], []], [[(1 << 64) - 1, 0, 2], []], [[(100, 0, 1)], []]):
            with pytest.raises((ValueError, TypeError, OverflowError)):
                files.read_into(bytearray(100), parts)
        with pytest.raises(ValueError, match="as many"):
            files.read_into(bytearray(100), [[]])
        assert files.read_into(bytearray(100), [[(0, 0, 50)], [(50, 0, 50)]]) == [50, 50]


def test_more_files_than_descriptors_are_read(many):
    paths, content = many
    with limited(descriptors() + 100):
        readers = [BatchReader(4), BatchReader(4)]
        # The second finds no room to keep a file open.
        first, second = (reader.open(paths) for reader in readers)
        assert descriptors() <= 100
        for files in (second, first):
            parts, end = placed(files.sizes)
            memory = bytearray(end)
            assert files.read_into(memory, parts) == files.sizes
            for part, each in zip(parts, content, strict=True):
                assert not part or memory[part[0][0] :][: part[0][2]] == each


def test_no_descriptor_at_all_is_an_error_that_names_a_file(many):
    paths, content = many
    mount = gpunvme.Mount(paths[0])
    reader = BatchReader(4)
    read(reader, paths[:8])
    with limited(max(map(int, os.listdir("/proc/self/fd")))):
        with pytest.raises(Error) as failed:
            reader.open(paths)
        assert failed.value.errno == errno.EMFILE and failed.value.filename in map(str, paths)
    assert read(reader, paths) == content
    mount.close()


def test_a_reader_that_was_stopped_begins_nothing(many):
    paths, _ = many
    reader = BatchReader(8)
    files = reader.open(paths)
    reader.stop()
    memory = bytearray(placed(files.sizes)[1])
    with pytest.raises(Error) as failed:
        files.read_into(memory, placed(files.sizes)[0])
    assert failed.value.errno == errno.ECANCELED and not any(memory)
    with pytest.raises(Error):
        reader.open(paths)
