"""Sets that a program stages, from a folder and over a real mount."""

import asyncio
import os
import signal
import subprocess
import threading
import time

import pytest
from conftest import program

import gpunvme


@pytest.fixture
def source(tmp_path):
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "one").write_bytes(b"1" * 100_000)
    (source / "deep" / "two").write_bytes(b"2" * 3_000_000)
    return source


def test_a_set_is_staged_once(folder, source):
    seen = []
    there = gpunvme.stage(source, folder, progress=lambda done, of: seen.append((done, of)))
    assert there == folder.joinpath("file", *source.parts[1:])
    assert (there / "deep" / "two").read_bytes() == b"2" * 3_000_000
    assert seen[-1] == (3_100_000, 3_100_000)
    before = (there / "one").stat().st_ino
    assert gpunvme.stage(source.as_uri(), folder, progress=lambda done, of: seen.append((done, of))) == there
    assert seen[-1] == (0, 0) and (there / "one").stat().st_ino == before
    assert gpunvme.stage(os.fsencode(source), os.fsencode(folder)) == there


def test_the_root_comes_from_the_environment(folder, source, monkeypatch):
    with pytest.raises(ValueError, match="GPUNVME_STAGE"):
        gpunvme.stage(source)
    monkeypatch.setenv("GPUNVME_STAGE", str(folder))
    there = gpunvme.stage(source, include=["deep/*"], pin=True)
    assert [entry.name for entry in there.iterdir() if entry.name[0] != "."] == ["deep"]


def test_what_the_command_says_is_raised(folder, source):
    with pytest.raises(RuntimeError, match="it has no manifest"):
        gpunvme.stage(source, folder, published=True)
    with pytest.raises(ValueError, match="no names of objects"):
        gpunvme.stage("s3://bucket/../other", folder)


def test_a_pattern_alone_is_no_list_of_letters(folder, source):
    with pytest.raises(TypeError, match="give a list of patterns"):
        gpunvme.stage(source, folder, include="*.bin")


def test_lines_that_are_no_progress_are_what_the_command_says(folder, source, tmp_path, monkeypatch):
    """What a store answers can be in them."""
    command = tmp_path / "bin" / "gpunvme"
    command.parent.mkdir()
    command.write_text("""#!/bin/sh
printf '{ not JSON\\n{"done": 1}\\n{"done": 1, "of": 2}\\n\\377 no text\\n' >&2
exit 1
""")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    seen = []
    with pytest.raises(RuntimeError, match=r'(?s)^{ not JSON\n{"done": 1}\n. no text$'):
        gpunvme.stage(source, folder, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 2)]


@pytest.mark.parametrize("kind", ["interrupt", "error"])
def test_a_command_that_nobody_waits_for_any_more_is_ended(folder, source, tmp_path, monkeypatch, kind):
    command = tmp_path / "bin" / "gpunvme"
    command.parent.mkdir()
    command.write_text("""#!/bin/sh
printf '{"done": 1, "of": 2}\n' >&2
exec sleep 30
""")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)

    def progress(done, of):
        if kind == "error":
            raise LookupError("no bar")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    begun = time.monotonic()
    with pytest.raises(LookupError if kind == "error" else KeyboardInterrupt):
        gpunvme.stage(source, folder, progress=progress)
    assert time.monotonic() - begun < 20


def test_a_quota_has_older_sets_go(folder, source, tmp_path):
    root = folder / "limited"
    first = gpunvme.stage(source, root)
    other = tmp_path / "other"
    other.mkdir()
    (other / "three").write_bytes(b"3" * 2_000_000)
    with pytest.raises(RuntimeError, match="comes to 2000000 bytes, and the quota is 1048576"):
        gpunvme.stage(other, root, quota="1M")
    assert (first / "one").exists()
    second = gpunvme.stage(other, root, quota=5_000_000)
    assert (second / "three").stat().st_size == 2_000_000 and not (first / "one").exists()
    assert asyncio.run(gpunvme.stage_async(other, root, quota="4M")) == second


def test_asyncio_goes_on_meanwhile(folder, source):
    async def both():
        first, second = await asyncio.gather(
            gpunvme.stage_async(source, folder), gpunvme.stage_async(source / "deep", folder / "other")
        )
        assert (first / "one").exists() and (second / "two").stat().st_size == 3_000_000
        with pytest.raises(RuntimeError, match="there is no object"):
            await gpunvme.stage_async(source / "none", folder)

    before = threading.active_count()
    asyncio.run(both())
    assert threading.active_count() == before


def test_a_run_goes_on_on_a_fresh_node_with_other_ranks(folder, own_volume, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if torch.cuda.device_count() == 1:
        pytest.skip("two ranks of NCCL need two GPUs")
    from test_data import torchrun

    lost, fresh, straight = own_volume.path / "run", folder / "run", folder / "straight"
    for place in (lost, straight):
        place.mkdir()
    torchrun(lost, 2, "--steps", 16, "--every", 8)
    store = tmp_path / "store" / "run"
    command = program("gpunvme")
    for step in ("step-8", "step-16"):
        subprocess.run([command, "publish", lost / step, store / step, "--keep", "1"], check=True)
    assert [found.parent.name for found in store.glob("*/gpunvme-manifest.json")] == ["step-16"]
    own_volume.kill()
    subprocess.run([command, "hydrate", "--published", store / "step-16", fresh / "step-16"], check=True)
    resumed = torchrun(fresh, 2, "--steps", 24, "--every", 8)
    assert "resumed at step 16 with 2 ranks" in resumed
    never_lost = torchrun(straight, 2, "--steps", 24, "--every", 8)
    assert resumed.splitlines()[-1] == never_lost.splitlines()[-1], "the same weights, to the bit"
    assert "resumed at step 24 with 1 ranks" in torchrun(fresh, 1, "--steps", 32, "--every", 8)
