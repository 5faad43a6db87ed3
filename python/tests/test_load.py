"""Models that are loaded while they arrive, from a folder and from a store that speaks S3."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy
import pytest
from conftest import needs_cuda, program
from raw_cuda import Array, View
from safetensors import numpy as stock
from test_safetensors import model, same

import gpunvme
from gpunvme import _arrays as arrays
from gpunvme._follow import Follower, Lent

#: Bytes of a part of an object, where the command has its usual memory.
PART = 16 << 20


class Store:
    """As much of S3 as the command asks for, and a gate before the last part of each long object."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        #: Reads that get a byte that is another one.
        self.damaged = 0
        #: What ETags end in: an MD5 has the command read a file of several parts once more.
        self.tag_end = ""
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                name = parts.path.removeprefix("/bucket").lstrip("/")
                if "list-type" in (query := parse_qs(parts.query)):
                    self.answer(200, store.listing(query.get("prefix", [""])[0]))
                elif name not in store.objects:
                    self.answer(404, b"")
                else:
                    self.give(store.objects[name])

            do_HEAD = do_GET

            def give(self, whole: bytes) -> None:
                tag = hashlib.md5(whole).hexdigest() + store.tag_end
                headers = {"ETag": f'"{tag}"', "Last-Modified": "Tue, 24 Nov 2026 08:00:00 GMT"}
                if "Range" not in self.headers:
                    self.answer(200, whole, headers)
                    return
                first, last = (int(at) for at in self.headers["Range"].removeprefix("bytes=").split("-"))
                if first > 0 and last + 1 == len(whole):
                    store.gate.wait(60)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(whole)}"
                part = whole[first : last + 1]
                if store.damaged > 0:
                    store.damaged -= 1
                    # In a header: its length, or a letter of its text.
                    at = store.damaged % 2 * 20
                    part = part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :]
                self.answer(206, part, headers)

            def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def listing(self, prefix: str) -> bytes:
        found = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2026-11-24T08:00:00.000Z</LastModified>"
            f"<ETag>&quot;{hashlib.md5(body).hexdigest()}{self.tag_end}&quot;</ETag><Size>{len(body)}</Size></Contents>"
            for name, body in sorted(self.objects.items())
            if name.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()


@pytest.fixture
def store(monkeypatch) -> Iterator[Store]:
    store = Store()
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{store.server.server_address[1]}")
    for name, value in [
        ("ALLOW_HTTP", "true"),
        ("REGION", "here"),
        ("ACCESS_KEY_ID", "a"),
        ("SECRET_ACCESS_KEY", "b"),
    ]:
        monkeypatch.setenv(f"AWS_{name}", value)
    yield store
    store.gate.set()
    store.server.shutdown()


@contextmanager
def killed_at_the_end(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """A test that fails while its process is stopped, or waits, would wait for it for ever."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def large(seed: int, parts: int = 3) -> dict[str, numpy.ndarray]:
    """Tensors that take so many parts of an object, more or less."""
    random = numpy.random.default_rng(seed)
    values = {f"t{at:02}": random.integers(0, 256, PART // 4, "u1") for at in range(parts * 4)}
    return values | {"none": numpy.zeros((0, 3), "<f4"), "one": numpy.array(7, "<i8")}


def test_tensors_are_read_before_the_last_bytes_have_come(folder, store, monkeypatch):
    tensors = large(1)
    store.objects["set/model.safetensors"] = stock.save(tensors)
    store.objects["set/about.txt"] = b"what it is"
    store.gate.clear()
    whole = store.objects["set/model.safetensors"]
    copied = []
    copy = Lent.copy_into

    def watched(self, pairs):
        copy(self, pairs)
        assert all(bytes(memory) == whole[offset : offset + len(memory)] for memory, offset in pairs)
        copied.extend(len(memory) for memory, _ in pairs)
        if sum(copied) > 2 * PART:
            store.gate.set()

    monkeypatch.setattr(Lent, "copy_into", watched)
    seen = []
    loaded = gpunvme.load("s3://bucket/set", folder, framework="np", progress=lambda *far: seen.append(far))
    assert sum(copied) > 2 * PART, "the store waits for that before it gives the last part"
    assert same(loaded, tensors)
    there = folder / "s3" / "bucket" / "set"
    assert (there / "model.safetensors").read_bytes() == store.objects["set/model.safetensors"]
    assert (there / "about.txt").exists() and seen[-1][0] == seen[-1][1] > 2 * PART
    # What is there is read from there.
    monkeypatch.undo()
    store.objects = {}
    assert same(gpunvme.load(there, folder / "again", framework="np"), tensors)


def test_a_sharded_model_is_what_its_index_says(folder, tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    shards = {f"model-{at}-of-3.safetensors": large(at, 1) for at in range(1, 4)}
    shards = {
        file: {f"{file[6]}.{name}": tensor for name, tensor in tensors.items()}
        for file, tensors in shards.items()
    }
    index = {name: file for file, tensors in shards.items() for name in tensors}
    for file, tensors in shards.items():
        stock.save_file(tensors, source / file)
    stock.save_file({"not": numpy.ones(3)}, source / "consolidated.safetensors")
    with pytest.raises(ValueError, match="which one is meant"):
        gpunvme.load(source, folder / "many", framework="np")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    expected = {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}
    for _ in range(2):
        assert same(gpunvme.load(source, folder, framework="np"), expected)
    one = gpunvme.load(source / "model-2-of-3.safetensors", folder / "one", framework="np")
    assert same(one, shards["model-2-of-3.safetensors"])

    missing = source / "model-3-of-3.safetensors"
    missing.rename(tmp_path / "away")
    with pytest.raises(ValueError, match="which is not there"):
        gpunvme.load(source, folder / "less", framework="np")
    stock.save_file({"other": numpy.ones(3)}, missing)
    with pytest.raises(ValueError, match="index says that it has"):
        gpunvme.load(source, folder / "other", framework="np")


def test_what_arrives_damaged_is_never_what_is_returned(folder, store):
    tensors = large(2)
    store.objects["set/model.safetensors"] = stock.save(tensors)
    for damaged in (1, 2, 3):
        store.damaged = damaged
        assert same(gpunvme.load("s3://bucket/set", folder / str(damaged), framework="np"), tensors)
        assert store.damaged == 0
    store.damaged = 1000
    with pytest.raises(RuntimeError, match="its MD5 is"):
        gpunvme.load("s3://bucket/set", folder / "again", framework="np")


def test_what_is_no_model_is_refused(folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "notes.txt").write_text("nothing else")
    with pytest.raises(ValueError, match="there is no model"):
        gpunvme.load(source, folder, framework="np")
    for name, content in [
        ("empty", b""),
        ("wild", b"\xff" * 100_000),
        ("long", (1 << 40).to_bytes(8, "little") + b"{}"),
    ]:
        place = tmp_path / name
        place.mkdir()
        (place / "m.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="not a file of safetensors"):
            gpunvme.load(place, folder / name, framework="np")
    with pytest.raises(RuntimeError, match="there is no object"):
        gpunvme.load(tmp_path / "none", folder, framework="np")
    stock.save_file(model(), source / "m.safetensors")
    with pytest.raises(OSError, match="not on a gpunvme mount"):
        gpunvme.load(source, tmp_path / "elsewhere", framework="np")


def read_from_device(volume: Path) -> int:
    """Bytes that the daemon has read from its device."""
    with gpunvme.Mount(volume) as mount:
        return mount.stats()["device_requests"]["read"]["bytes"]


def test_a_first_load_reads_nothing_back_from_the_volume(folder, tmp_path):
    tensors = large(4, 5)
    source = tmp_path / "source"
    source.mkdir()
    stock.save_file(tensors, source / "m.safetensors")
    before = read_from_device(folder)
    assert same(gpunvme.load(source, folder, framework="np"), tensors)
    assert read_from_device(folder) - before < 1 << 20, "of 80 MiB"
    assert same(gpunvme.load(source, folder, framework="np"), tensors), "and the second reads the volume"
    assert read_from_device(folder) - before > 5 * PART


def test_what_had_arrived_before_is_read_from_the_volume(folder, store):
    tensors = large(5)
    store.objects["set/model.safetensors"] = stock.save(tensors)
    store.tag_end = "-4"
    store.gate.clear()
    there = folder / "s3" / "bucket" / "set"
    arguments = [program("gpunvme"), "hydrate", "s3://bucket/set", there]
    with killed_at_the_end(subprocess.Popen(arguments)) as hydrate:
        manifest = there / ".gpunvme-stage" / "manifest"
        deadline = time.monotonic() + 60
        while not manifest.exists() or manifest.read_text().count('"part"') < 2:
            assert hydrate.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    store.gate.set()
    before = read_from_device(folder)
    assert same(gpunvme.load("s3://bucket/set", folder, framework="np"), tensors)
    read = read_from_device(folder) - before
    assert 2 * PART - (1 << 20) < read < 3 * PART + (1 << 20), "the parts that were there"
    assert (there / "model.safetensors").read_bytes() == store.objects["set/model.safetensors"]


def shards(place: Path, count: int) -> dict[str, numpy.ndarray]:
    """Makes a model of so many files."""
    place.mkdir()
    tensors = {
        f"t{at:03}": numpy.random.default_rng(at).integers(0, 256, 20_000, "u1") for at in range(count)
    }
    index = {name: f"{name}.safetensors" for name in tensors}
    for name, tensor in tensors.items():
        stock.save_file({name: tensor}, place / index[name])
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tensors


def test_a_slow_program_holds_half_of_the_memory_and_reads_the_rest(folder, tmp_path, monkeypatch):
    tensors = shards(tmp_path / "source", 60)
    most, held, count = 0, set(), 0
    listen, give_back, copy = Follower._maps, Follower.give_back, Lent.copy_into

    def maps(self, part, descriptors):
        nonlocal most, count
        held.add(part["buffer"])
        most, count = max(most, len(held)), count + 1
        return listen(self, part, descriptors)

    def gives_back(self, buffer):
        held.discard(buffer)
        give_back(self, buffer)

    def slow(self, pairs):
        if count < 60:
            monkeypatch.setattr(Lent, "copy_into", copy)
            time.sleep(3)
        copy(self, pairs)

    monkeypatch.setattr(Follower, "_maps", maps)
    monkeypatch.setattr(Follower, "give_back", gives_back)
    monkeypatch.setattr(Lent, "copy_into", slow)
    assert same(gpunvme.load(tmp_path / "source", folder, framework="np"), tensors)
    assert most == 8 and 8 <= count < 60 and not held


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_what_becomes_of_the_program_never_stops_the_files(folder, tmp_path, sent):
    count = 400  # more than the socket has room to tell of
    tensors = shards(tmp_path / "source", count)
    script = f"""
import os, sys, gpunvme
from gpunvme._follow import Lent
copy = Lent.copy_into
def ends(self, pairs):
    Lent.copy_into = copy
    os.kill(os.getpid(), {int(sent)})
    copy(self, pairs)
Lent.copy_into = ends
loaded = gpunvme.load(sys.argv[1], sys.argv[2], framework="np")
sys.stdout.buffer.write(b"".join(loaded[name].tobytes() for name in sorted(loaded)))
"""
    arguments = [sys.executable, "-c", script, tmp_path / "source", folder]
    with killed_at_the_end(subprocess.Popen(arguments, stdout=subprocess.PIPE)) as process:
        there = folder.joinpath("file", *(tmp_path / "source").parts[1:])
        deadline = time.monotonic() + 60
        while len(list(there.glob("*.safetensors"))) < count:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if sent == signal.SIGSTOP:
            assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT) is not None
            process.send_signal(signal.SIGCONT)
            assert process.communicate()[0] == b"".join(tensors[name].tobytes() for name in sorted(tensors))
        assert process.wait() == (0 if sent == signal.SIGSTOP else -sent)
    assert all(
        file.read_bytes() == (tmp_path / "source" / file.name).read_bytes()
        for file in there.glob("*.safetensors")
    )


class Part(View):
    """Bytes of an array, of which there are parts."""

    def __init__(self, of, first=0, last=None):
        last = of.nbytes if last is None else last
        super().__init__(of, shape=(last - first,), typestr="|u1", data=(of.address.value + first, False))
        self.first, self.last = first, last

    def __len__(self):
        return self.last - self.first

    def __getitem__(self, at):
        return Part(self.of, self.first + at.start, self.first + at.stop)


@needs_cuda
def test_it_arrives_in_gpu_memory(folder, tmp_path, monkeypatch):
    tensors = large(3, 2)
    del tensors["none"]
    source = tmp_path / "source"
    source.mkdir()
    stock.save_file(tensors, source / "m.safetensors")
    made = []

    def empty(self, shape, dtype):
        made.append(Array(shape, arrays._NUMPY[dtype]))
        return made[-1]

    monkeypatch.setattr(arrays.NumPy, "empty", empty)
    monkeypatch.setattr(arrays.NumPy, "bytes_of", lambda self, array: Part(array))
    before = read_from_device(folder)
    for _ in range(2):
        loaded = gpunvme.load(source, folder, framework="np", require="bounce")
        if made[len(tensors) :] == []:
            assert read_from_device(folder) - before < 1 << 20, "it came from where it arrived"
        assert same({name: tensor.get() for name, tensor in loaded.items()}, tensors)
    assert len(made) == 2 * len(tensors)
