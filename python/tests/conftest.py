"""A volume in an image file, mounted for all tests, and a folder of it for each."""

import gc
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import raw_cuda

needs_cuda = pytest.mark.skipif(
    raw_cuda.driver() is None, reason="there is no CUDA, not even the software driver"
)


def program(name: str) -> str:
    folder = os.environ.get("GPUNVME_BIN")
    found = shutil.which(name, path=folder) if folder else shutil.which(name)
    assert found, f"{name}: set GPUNVME_BIN to the folder that scripts/build prints"
    return found


class Volume:
    """A formatted image, mounted."""

    def __init__(self, folder: Path, size: int = 4 << 30) -> None:
        self.image, self.path = folder / "image", folder / "mnt"
        with open(self.image, "wb") as image:
            image.truncate(size)
        self.path.mkdir()
        subprocess.run([program("mkfs.gpunvme"), "--quiet", "--force", self.image], check=True)
        self.mount()

    def mount(self) -> None:
        subprocess.run([program("mount.gpunvme"), self.image, self.path], check=True)

    def kill(self) -> None:
        """Ends the daemon as a crash does: what it did not write to the image is lost."""
        for daemon in self._daemons():
            os.kill(daemon, signal.SIGKILL)
        while self._daemons():
            time.sleep(0.01)

    def _daemons(self) -> list[int]:
        def command_line(process: Path) -> str:
            try:
                return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                return ""

        every = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        lines = {int(process.name): command_line(process) for process in every}
        return [number for number, line in lines.items() if "mount" in line and str(self.image) in line]

    def unmount(self) -> None:
        # Exceptions that tests looked at hold the files of their frames.
        gc.collect()
        subprocess.run(["umount", self.path], check=True)


@pytest.fixture
def own_volume(tmp_path: Path) -> Iterator[Volume]:
    """A volume that a test may take away."""
    volume = Volume(tmp_path)
    yield volume
    subprocess.run(["umount", "--lazy", volume.path], check=False, capture_output=True)


@pytest.fixture(scope="session")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = os.environ.get("GPUNVME_TEST_MOUNT")
    if place:
        yield Path(place)
        return
    volume = Volume(tmp_path_factory.mktemp("volume"))
    yield volume.path
    volume.unmount()


@pytest.fixture
def folder(volume: Path, request: pytest.FixtureRequest) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    folder = volume / name
    folder.mkdir()
    return folder


@pytest.fixture
def stored(folder: Path) -> Callable[..., tuple[Path, numpy.ndarray]]:
    """Makes a file of random bytes, and returns its path and what is in it."""

    def make(length: int, name: str = "file", seed: int = 1) -> tuple[Path, numpy.ndarray]:
        values = numpy.random.default_rng(seed).integers(0, 256, length, numpy.uint8)
        path = folder / name
        path.write_bytes(values.tobytes())
        return path, values

    return make


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts as scripts/test adds up."""
    of = {name: len(terminalreporter.getreports(name)) for name in ("passed", "failed", "error", "skipped")}
    terminalreporter.write_line(
        f"{of['passed']} passed, {of['failed'] + of['error']} failed, {of['skipped']} skipped"
    )
