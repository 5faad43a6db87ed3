"""Files of safetensors, beside the package of that name."""

import json
import os
import struct

import numpy
import pytest
from conftest import needs_cuda
from raw_cuda import Array
from safetensors import numpy as stock
from safetensors import safe_open

import gpunvme
import gpunvme.safetensors as ours
from gpunvme import _arrays as arrays

RANDOM = numpy.random.default_rng(5)
KINDS = ["?", "u1", "i1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8", "<c8"]


def model(seed: int = 0, largest: int = 3 << 20) -> dict[str, numpy.ndarray]:
    """Arrays of all dtypes and some shapes."""
    tensors: dict[str, numpy.ndarray] = {}
    random = numpy.random.default_rng(seed)
    for number, kind in enumerate(KINDS):
        for shape in [(), (0,), (3,), (5, 7, 11), (largest // 64 + number,)]:
            size = int(numpy.prod(shape))
            values = random.integers(0, 2, size, "u1") if kind == "?" else random.integers(0, 100, size)
            tensors[f"layer.{number}.{len(shape)}.{size}"] = values.astype(kind).reshape(shape)
    return tensors


def same(one: dict[str, numpy.ndarray], other: dict[str, numpy.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].tobytes() == other[name].tobytes()
        for name in one
    )


def test_what_the_package_saves_is_loaded(folder):
    tensors = model()
    stock.save_file(tensors, folder / "m.safetensors")
    assert same(ours.load_file(folder / "m.safetensors", framework="np"), tensors)
    some = ours.load_file(folder / "m.safetensors", framework="np", names=["layer.3.1.3", "layer.0.0.1"])
    assert same(some, {name: tensors[name] for name in ["layer.3.1.3", "layer.0.0.1"]})
    with pytest.raises(KeyError, match=r"nothing\.here"):
        ours.load_file(folder / "m.safetensors", framework="np", names=["nothing.here"])


def test_what_is_saved_the_package_loads(folder):
    tensors = model(1)
    ours.save_file(tensors, folder / "m.safetensors", {"format": "np", "epoch": "7"})
    assert same(stock.load_file(folder / "m.safetensors"), tensors)
    with safe_open(folder / "m.safetensors", "np") as f:
        assert f.metadata() == {"format": "np", "epoch": "7"}
    (length,) = struct.unpack("<Q", (folder / "m.safetensors").read_bytes()[:8])
    assert (8 + length) % 4096 == 0
    ours.save_file({}, folder / "empty.safetensors")
    assert (
        ours.load_file(folder / "empty.safetensors", framework="np")
        == stock.load_file(folder / "empty.safetensors")
        == {}
    )


def test_a_file_is_replaced_as_a_whole_or_not_at_all(folder):
    path = folder / "m.safetensors"
    ours.save_file({"a": numpy.ones(1000)}, path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="strided view"):
        ours.save_file({"a": numpy.zeros((100, 100))[:, ::2]}, path)
    with pytest.raises(ValueError, match="no name for the dtype"):
        ours.save_file({"a": numpy.zeros(3, "U5")}, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in folder.iterdir()] == ["m.safetensors"]
    ours.save_file({"b": numpy.zeros(10)}, path)
    assert stock.load_file(path).keys() == {"b"}


def test_a_scalar_has_no_dimension(folder):
    stock.save_file({"s": numpy.array(3.0)}, folder / "m.safetensors")
    with ours.safe_open(folder / "m.safetensors", "np") as f:
        assert f.get_tensor("s").shape == f.get_slice("s")[...].shape == ()
    assert ours.load_file(folder / "m.safetensors", framework="np")["s"].shape == ()


@pytest.mark.parametrize("shape", [(40,), (6, 50), (300, 3000), (4, 30, 20), (3, 200, 4000), (2, 3, 4, 5)])
def test_slices_are_those_of_the_package(folder, shape):
    values = RANDOM.integers(0, 1 << 15, shape).astype("<i2")
    stock.save_file({"before": numpy.zeros(3, "u1"), "w": values}, folder / "m.safetensors")
    with ours.safe_open(folder / "m.safetensors", "np") as f:
        part = f.get_slice("w")
        assert (part.get_shape(), part.get_dtype()) == (list(shape), "I16")
        indices = [
            ...,
            0,
            -1,
            slice(1, 3),
            slice(None, -1),
            slice(2, 2),
            (..., 0),
            (..., slice(1, 3)),
            (slice(1, 2), ...),
        ]
        if len(shape) > 1:
            indices += [(slice(None), slice(2, 4)), (1, slice(None, 3)), (slice(0, 2), -1), (0, 1)]
        if len(shape) > 2:
            indices += [
                (slice(1, 3), slice(2, 4), slice(1, 2)),
                (1, ..., 1),
                (slice(None), 1, slice(1, None)),
            ]
        for index in indices:
            got = part[index]
            assert got.shape == values[index].shape and numpy.array_equal(got, values[index]), index
        with pytest.raises(IndexError, match="step 1"):
            part[::2]
        with pytest.raises(IndexError, match="out of range"):
            part[shape[0]]
        with pytest.raises(IndexError, match="dimensions"):
            part[(0,) * 5]
        with pytest.raises(IndexError, match="neither"):
            part["a"]


def test_only_what_a_slice_needs_is_read(folder):
    values = numpy.zeros((64, 1 << 17), "u1")
    ours.save_file({"w": values}, folder / "m.safetensors")
    mount = gpunvme.Mount(folder)
    with ours.safe_open(folder / "m.safetensors", "np") as f:
        before = sum(mount.stats()["read"].values())
        f.get_slice("w")[:, 4096:8192]
        assert sum(mount.stats()["read"].values()) - before == 64 * 4096


def test_a_sharded_model_is_loaded_by_its_index(folder):
    shards = [model(seed, 1 << 18) for seed in range(3)]
    shards = [{f"{at}.{name}": array for name, array in shard.items()} for at, shard in enumerate(shards)]
    weights, tensors = {}, {}
    for at, shard in enumerate(shards):
        name = f"model-0000{at + 1}-of-00003.safetensors"
        stock.save_file(shard, folder / name)
        weights |= dict.fromkeys(shard, name)
        tensors |= shard
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}))
    assert same(ours.load_file(index, framework="np"), tensors)
    assert same(ours.load_file(folder, framework="np"), tensors)
    one = next(iter(shards[1]))
    assert same(ours.load_file(folder, framework="np", names=[one]), {one: tensors[one]})
    index.write_text(json.dumps({"weight_map": weights | {"lost": "model-00001-of-00003.safetensors"}}))
    with pytest.raises(ValueError, match="'lost'"):
        ours.load_file(folder, framework="np")
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ValueError, match="no file beside it"):
        ours.load_file(folder, framework="np")
    index.write_text("[]")
    with pytest.raises(ValueError, match="not the index"):
        ours.load_file(folder, framework="np")


def header(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        header(b"", length=1 << 62),
        header(b"", length=100),
        header(b"[]"),
        header(b"{" * 100_000),
        header(b"{nonsense}"),
        header(b'{"a":5}'),
        header(b'{"a":{"dtype":"F32","shape":[1]}}'),
        header(b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', b"1234"),
        header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234"),
        header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', b"12345678"),
        header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"12345678"),
        header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"123"),
        header(b'{"a":{"dtype":"U8","shape":[-1,-1],"data_offsets":[0,1]}}', b"1"),
        header(b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', b"1"),
        header(b'{"a":{"dtype":"U8","shape":"x","data_offsets":[0,1]}}', b"1"),
        header(b'{"a":{"dtype":[],"shape":[1],"data_offsets":[0,1]}}', b"1"),
        header(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":{"0":1}}}', b"1"),
        header(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"1",
        ),
    ],
)
def test_a_file_that_is_none_is_refused(folder, content):
    (folder / "m.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="not a file of safetensors"):
        ours.load_file(folder / "m.safetensors", framework="np")


def test_words_that_are_not_known_are_refused(folder):
    with pytest.raises(ValueError, match="framework"):
        ours.load_file(folder / "m", framework="tf")
    with pytest.raises(ValueError, match="no arrays on cuda"):
        ours.load_file(folder / "m", "cuda", framework="np")
    with pytest.raises(FileNotFoundError):
        ours.load_file(folder / "m", framework="np")
    with pytest.raises(ValueError, match="which one"):
        ours.load_file(folder, framework="np")


@needs_cuda
def test_device_memory_is_saved_from_where_it_lies(folder):
    values = {"a": numpy.arange(1_000_000, dtype="<f4"), "b": numpy.arange(7, dtype="u1")}
    arrays = {name: Array(value.shape, value.dtype).set(value) for name, value in values.items()}
    ours.save_file(arrays, folder / "m.safetensors", require="bounce")
    assert same(stock.load_file(folder / "m.safetensors"), values)


def test_tensors_come_one_after_the_other_with_little_read_ahead(folder, monkeypatch):
    tensors = {f"t{at:03}": RANDOM.integers(0, 256, 50_000, "u1") for at in range(100)}
    tensors["empty"] = numpy.zeros((0, 3), "<f4")
    stock.save_file(tensors, folder / "m.safetensors")
    monkeypatch.setattr("gpunvme._batches.BATCH", 100_000)
    made = 0
    original = arrays.NumPy.empty

    def empty(self, shape, dtype):
        nonlocal made
        made += 1
        return original(self, shape, dtype)

    monkeypatch.setattr(arrays.NumPy, "empty", empty)
    loaded = {}
    for name, tensor in ours.iter_tensors(folder / "m.safetensors", framework="np"):
        loaded[name] = tensor
        assert made - len(loaded) <= 12
    assert same(loaded, tensors)
    # What is left of it may go unread.
    next(ours.iter_tensors(folder / "m.safetensors", framework="np"))


def test_names_and_metadata_that_the_format_has_not_are_refused(folder):
    array = numpy.zeros(3, "f4")
    for tensors, metadata in [
        ({"__metadata__": array}, None),
        ({1: array}, None),
        ({None: array}, None),
        ({"\ud800": array}, None),
        ({"a": array}, {"step": 1}),
        ({"a": array}, {"step": None}),
        ({"a": array}, {3: "x"}),
    ]:
        with pytest.raises((TypeError, ValueError)):
            ours.save_file(tensors, folder / "m.safetensors", metadata)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'.encode("utf-16"),
        b'{"a": {"dtype": "U8", "shape": "", "data_offsets": [0, 1]}}',
        b'{"a": {"dtype": "U8", "shape": {}, "data_offsets": [0, 1]}}',
        b'{"a": {"dtype": "U8", "shape": [1], "shape": [1], "data_offsets": [0, 1]}}',
        b'{"\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        b'{"__metadata__": ["x"], "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        b'{"__metadata__": {"x": 1}, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        json.dumps({"a": {"dtype": "U8", "shape": [2**62] * 60_000, "data_offsets": [0, 1]}}).encode(),
        json.dumps({"a": {"dtype": "U8", "shape": [2**63], "data_offsets": [0, 1]}}).encode(),
    ],
    ids=range(9),
)
def test_crafted_headers_are_refused_at_once(folder, header):
    (folder / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"x")
    with pytest.raises(ValueError, match="not a file of safetensors"):
        ours.load_file(folder / "m.safetensors", framework="np")


@pytest.mark.parametrize("dtype, bits", [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)])
def test_a_tensor_of_parts_of_bytes_is_refused_when_it_is_asked_for(folder, dtype, bits):
    path, last = folder / "m.safetensors", bits  # of eight items, in bytes
    header = {
        "a": {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, last]},
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [last, last + 3]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(last) + b"xyz")
    with safe_open(path, "np") as theirs:
        assert sorted(theirs.keys()) == ["a", "b"], "a file of the package's"
    with ours.safe_open(path, "np") as file:
        assert file.keys() == ["a", "b"] and file.get_slice("a").get_dtype() == dtype
        assert file.get_tensor("b").tobytes() == b"xyz"
        with pytest.raises(ValueError, match=f"no dtype for {dtype}"):
            file.get_tensor("a")
    assert ours.load_file(path, framework="np", names=["b"])["b"].tobytes() == b"xyz"
    with pytest.raises(ValueError, match=f"no dtype for {dtype}"):
        ours.load_file(path, framework="np")
    # Seven items of so many bits end within a byte.
    text = text.replace(b"[2, 4]", b"[1, 7]")
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(last) + b"xyz")
    with pytest.raises(ValueError, match="lies where it cannot"):
        ours.safe_open(path, "np")


def test_an_index_of_other_things_is_refused(folder):
    (folder / "m.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(ValueError, match="not the index"):
        ours.load_file(folder, framework="np")


class Model:
    def state_dict(self):
        return {}


def test_what_are_no_tensors_is_refused_by_name_before_anything_is_written(folder, monkeypatch):
    path = folder / "m.safetensors"
    array = numpy.zeros((4, 6), "f4")
    monkeypatch.setattr(ours, "replaced", lambda path: pytest.fail("something was to be written"))
    for tensors, told in [
        (path, r"mapping of names to tensors, not PosixPath: save_file\(tensors, filename\)"),
        ([array], "mapping of names to tensors, not list"),
        (Model(), r"not Model: give its \.state_dict\(\)"),
        ({"a": array, "step": 7}, "'step' is no tensor or array: it is of builtins.int"),
        ({"a": array, "b": [array]}, "'b' is no tensor or array: it is of builtins.list"),
    ]:
        with pytest.raises(TypeError, match=told):
            ours.save_file(tensors, path)
    with pytest.raises(TypeError, match="metadata has to be a mapping of texts to texts, not list"):
        ours.save_file({"a": array}, path, ["x"])
    for tensor, told in [
        (
            array[:, ::2],
            r"'b' is a strided view \(shape \[4, 3\], strides \[24, 8\]\).* numpy.ascontiguousarray",
        ),
        (array.T, "'b' is a strided view"),
        (numpy.zeros(3, "U5"), "'b': safetensors has no name for the dtype"),
    ]:
        with pytest.raises(ValueError, match=told):
            ours.save_file({"a": array, "b": tensor}, path)


def test_one_text_is_no_list_of_names(folder):
    stock.save_file({"a": numpy.zeros(3), "b": numpy.ones(3)}, folder / "m.safetensors")
    with pytest.raises(TypeError, match="names is one text, 'ab'"):
        ours.load_file(folder / "m.safetensors", framework="np", names="ab")


def test_paths_may_be_bytes(folder):
    path = os.fsencode(folder / "m.safetensors")
    ours.save_file({"a": numpy.ones(9)}, path)
    assert ours.load_file(path, framework="np")["a"].sum() == 9
    assert ours.load_file(os.fsencode(folder), framework="np").keys() == {"a"}
    with ours.safe_open(path, "np") as f, gpunvme.open(path) as plain:
        assert plain.name == os.fsdecode(path)
        assert f.get_tensor("a").sum() == 9


def test_an_open_file_shows_what_is_in_it(folder):
    path = folder / "m.safetensors"
    stock.save_file({"a": numpy.zeros((3, 4), "f4")}, path)
    with ours.safe_open(path, "np") as f:
        assert "a" in f and "b" not in f and 1 not in f
        assert repr(f) == f"safe_open('{path}': 1 tensors)"
        assert f.get_slice("a").shape == (3, 4)
        assert repr(f.get_slice("a")) == "Slice(F32 of shape [3, 4])"
    assert repr(f) == f"safe_open('{path}': 1 tensors)"
