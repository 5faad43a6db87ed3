"""Models that are loaded while they arrive, from a folder and from a store that speaks S3."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import numpy
import pytest
from conftest import needs_cuda
from raw_cuda import Array
from safetensors import numpy as stock
from test_safetensors import model, same

import gpunvme
from gpunvme import _arrays as arrays

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
                tag = hashlib.md5(whole).hexdigest()
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
            f"<ETag>&quot;{hashlib.md5(body).hexdigest()}&quot;</ETag><Size>{len(body)}</Size></Contents>"
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
    read = []
    submit = gpunvme.File.submit_read_into

    class Watched:
        def __init__(self, pending, pairs):
            self.pending, self.pairs = pending, pairs

        def result(self):
            return self.pending.result()

    def submitted(self, pairs, **others):
        pending = submit(self, pairs, **others)
        if not store.gate.is_set():
            pending.result()
            read.extend(tensor.copy() for tensor, _ in pairs)
            if len(read) >= 6:
                store.gate.set()
        return pending

    monkeypatch.setattr(gpunvme.File, "submit_read_into", submitted)
    seen = []
    loaded = gpunvme.load("s3://bucket/set", folder, framework="np", progress=lambda *far: seen.append(far))
    assert len(read) >= 6, "the store waits for that before it gives the last part"
    assert same(loaded, tensors)
    assert all(
        any((value == known).all() for known in tensors.values() if value.shape == known.shape)
        for value in read
    )
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
    loaded = gpunvme.load(source, folder, framework="np", require="bounce")
    assert len(made) == len(tensors)
    assert same({name: tensor.get() for name, tensor in loaded.items()}, tensors)
