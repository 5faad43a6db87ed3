"""State dicts, beside ``torch.save`` and ``torch.load``."""

import errno
import os
import traceback
import zipfile
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from test_torch import DEVICE, DTYPES, random, same  # noqa: E402

import gpunvme.safetensors  # noqa: E402
import gpunvme.torch  # noqa: E402
from gpunvme import _replace  # noqa: E402


def state():
    torch.manual_seed(3)
    base = random((100, 64), torch.float32)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 32)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(base.abs().clamp(0, 1)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "shared": [base, base[10:20], base.T],
        "empty": torch.zeros(0, 3, device=DEVICE),
        "scalar": torch.tensor(3.5, device=DEVICE),
        "pair": (random(5, torch.int64), "text", 7),
        "parameter": torch.nn.Parameter(random(9, torch.float32), requires_grad=False),
        "dtypes": OrderedDict((str(dtype), random((3, 7), dtype)) for dtype in DTYPES),
        "large": random(3_000_001, torch.bfloat16),
    }


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and one.stride() == other.stride() and same(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return one == other


def test_what_is_saved_torch_loads(folder):
    saved = state()
    gpunvme.torch.save(saved, folder / "state.pt")
    loaded = torch.load(folder / "state.pt", map_location=DEVICE, weights_only=True)
    assert equal(loaded, saved)
    first, second, third = loaded["shared"]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() == third.data_ptr()
    assert [entry.name for entry in folder.iterdir()] == ["state.pt"]


def test_what_torch_saves_is_loaded(folder):
    saved = state()
    torch.save(saved, folder / "state.pt")
    loaded = gpunvme.torch.load(folder / "state.pt", DEVICE)
    assert equal(loaded, saved)
    first, second, third = loaded["shared"]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() == third.data_ptr()
    assert first.device.type == DEVICE


def test_a_state_dict_keeps_the_versions_of_its_modules(folder):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    torch.save(model.state_dict(), folder / "m.pt")
    loaded = gpunvme.torch.load(folder / "m.pt", DEVICE)
    assert loaded._metadata == torch.load(folder / "m.pt", weights_only=True)._metadata
    assert loaded._metadata["1"] == {"version": 2}


def test_a_file_that_is_replaced_meanwhile_is_one_or_the_other(folder, monkeypatch):
    def save(step):
        gpunvme.torch.save({"step": step, "w": torch.full((1000,), float(step))}, folder / "latest.pt")

    save(1)
    read = gpunvme.torch.records

    def records(*arguments):
        save(2)
        return read(*arguments)

    monkeypatch.setattr(gpunvme.torch, "records", once(records, read))
    loaded = gpunvme.torch.load(folder / "latest.pt", DEVICE)
    assert (loaded["w"] == loaded["step"]).all()


def once(first, then):
    """A function that is the first one when it is called first."""
    functions = [first]
    return lambda *arguments: (functions.pop() if functions else then)(*arguments)


class Holder:
    def __init__(self):
        self.tensor = torch.ones(5)


def test_tensors_in_other_objects_are_refused_and_the_file_stays(folder):
    gpunvme.torch.save({"a": torch.ones(3)}, folder / "state.pt")
    before = (folder / "state.pt").read_bytes()
    told = r"state\.pt: .* other objects than tensors and plain values \(.*Holder\): .*add_safe_globals"
    with pytest.raises(ValueError, match=told) as refused:
        gpunvme.torch.save({"a": Holder()}, folder / "state.pt")
    assert ".tmp" not in str(refused.value)
    assert (folder / "state.pt").read_bytes() == before
    assert [entry.name for entry in folder.iterdir()] == ["state.pt"]


def test_a_file_elsewhere_is_refused(tmp_path):
    with pytest.raises(gpunvme.Error, match="not on a gpunvme mount"):
        gpunvme.torch.save({}, tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())
    torch.save({}, tmp_path / "state.pt")
    with pytest.raises(gpunvme.Error, match="not on a gpunvme mount"):
        gpunvme.torch.load(tmp_path / "state.pt")


@pytest.mark.parametrize("saving", [gpunvme.torch.save, torch.save])
def test_conjugated_and_negated_views_keep_their_values(folder, saving):
    values = torch.view_as_complex(torch.arange(6.0).reshape(3, 2)).to(DEVICE)
    for tensor in [values.conj(), values.conj().imag, values.conj().real]:
        saving({"a": tensor}, folder / "state.pt")
        loaded = gpunvme.torch.load(folder / "state.pt", DEVICE)["a"]
        assert torch.equal(loaded, tensor)
        assert (loaded.is_conj(), loaded.is_neg()) == (tensor.is_conj(), tensor.is_neg())


def rewritten(path, compression, change=lambda name, data: data):
    """The records of a file of torch.save, written anew."""
    other = path.with_name("rewritten.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w", compression) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, change(entry.filename, source.read(entry)))
    return other


def test_what_only_pytorch_can_read_is_refused_by_name(folder):
    path = folder / "state.pt"
    torch.save({"a": torch.arange(1000.0), "b": torch.ones(3)}, path)
    # Records that are not aligned: PyTorch may say wrongly where they begin.
    try:
        loaded = gpunvme.torch.load(rewritten(path, zipfile.ZIP_STORED))
    except ValueError as error:
        assert "the bytes of a tensor are not there" in str(error)
    else:
        assert equal(loaded, torch.load(path, weights_only=True))
    with pytest.raises(ValueError, match="its tensors are compressed"):
        gpunvme.torch.load(rewritten(path, zipfile.ZIP_DEFLATED))
    cut = rewritten(path, zipfile.ZIP_STORED, lambda name, data: data[:100] if name.endswith("/0") else data)
    with pytest.raises(ValueError, match=r"rewritten.pt: the bytes of a tensor are not there"):
        gpunvme.torch.load(cut)
    big = rewritten(path, zipfile.ZIP_STORED, lambda name, data: b"big" if "byteorder" in name else data)
    with pytest.raises(ValueError, match="another byte order"):
        gpunvme.torch.load(big)
    torch.save({"a": Holder()}, path)
    with pytest.raises(ValueError, match=r"state.pt: it has other objects than tensors and plain values"):
        gpunvme.torch.load(path)
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"state.pt: no file of torch.save, or one of PyTorch before 1.6"):
        gpunvme.torch.load(path)
    torch.save({"a": torch.eye(4).to_sparse()}, path)
    with pytest.raises(ValueError, match="sparse"):
        gpunvme.torch.load(path)
    torch.save({"a": torch.ones(3)}, path)
    with pytest.raises(ValueError, match="sparse"):
        gpunvme.torch.save({"a": torch.empty(3, device="meta")}, path)
    assert torch.load(path)["a"].sum() == 3


SAVES = [
    pytest.param(lambda path: gpunvme.torch.save({"a": torch.ones(9)}, path), id="torch"),
    pytest.param(lambda path: gpunvme.safetensors.save_file({"a": torch.ones(9)}, path), id="safetensors"),
]


@pytest.mark.parametrize("save", SAVES)
def test_a_file_that_is_replaced_keeps_its_mode_and_its_link(folder, save):
    real, link = folder / "real", folder / "link"
    real.write_bytes(b"old")
    real.chmod(0o640)
    link.symlink_to(real)
    save(link)
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o640 and real.stat().st_size > 36
    save(folder / ("x" * 255))
    assert sorted(len(entry.name) for entry in folder.iterdir()) == [4, 4, 255]


@pytest.mark.parametrize("save", SAVES)
def test_threads_that_save_one_file_leave_a_whole_one(folder, save):
    path = folder / "shared"
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(save, [path] * 30))
    assert [entry.name for entry in folder.iterdir()] == ["shared"]


def test_nothing_that_others_put_in_the_folder_is_written_to(folder, monkeypatch):
    victim = folder / "victim"
    victim.write_bytes(b"precious")
    monkeypatch.setattr(_replace.secrets, "token_hex", lambda count: "guessed")
    (folder / ".gpunvme-guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        gpunvme.torch.save({"a": torch.ones(9)}, folder / "state.pt")
    assert victim.read_bytes() == b"precious" and (folder / ".gpunvme-guessed.tmp").is_symlink()


@pytest.mark.parametrize("save", SAVES)
def test_errors_name_the_path_that_was_given(folder, tmp_path, save, monkeypatch):
    (folder / "file").write_bytes(b"x")
    (folder / "folder").mkdir()
    monkeypatch.chdir(folder)
    for path, error in [
        ("", FileNotFoundError),
        ("folder", IsADirectoryError),
        ("new/", IsADirectoryError),
        ("missing/new", FileNotFoundError),
        ("file/new", NotADirectoryError),
        ("x" * 256, OSError),
        (str(tmp_path / "new"), gpunvme.Error),
    ]:
        with monkeypatch.context() as patched:
            patched.setattr(_replace.os, "chmod", lambda *_: pytest.fail("all of it was written"))
            with pytest.raises(error) as refused:
                save(path)
        assert refused.value.filename == path and ".tmp" not in f"{refused.value!r} {refused.value}"
    assert sorted(entry.name for entry in folder.iterdir()) == ["file", "folder"]

    def rename(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted", source, None, target)

    monkeypatch.setattr(_replace.os, "rename", rename)
    with pytest.raises(PermissionError) as refused:
        save("new")
    assert str(refused.value) == f"[Errno {errno.EPERM}] Operation not permitted: 'new'"


@pytest.mark.parametrize("save", SAVES)
def test_a_mount_that_goes_away_is_the_error(own_volume, save, monkeypatch):
    opened = gpunvme.torch.open_file
    path = own_volume.path / "file"

    def open_file(path, mode):
        file = opened(path, mode)
        own_volume.kill()
        return file

    monkeypatch.setattr(gpunvme.torch, "open_file", open_file)
    monkeypatch.setattr(gpunvme.safetensors, "open_file", open_file)
    with pytest.raises((OSError, RuntimeError)) as gone:
        save(path)
    # The first error, and not that of the cleaning up.
    assert traceback.extract_tb(gone.tb)[-1].name != "replaced"
    assert getattr(gone.value, "filename", None) in (None, str(path)) and ".tmp" not in str(gone.value)


def test_load_takes_the_arguments_of_torch_load(folder):
    path = os.fsencode(folder / "state.pt")
    gpunvme.torch.save({"a": torch.ones(3)}, path)
    for device in (DEVICE, torch.device(DEVICE)):
        loaded = gpunvme.torch.load(path, map_location=device, weights_only=True)
        assert loaded["a"].device.type == DEVICE
    with pytest.raises(TypeError, match="two names of one argument"):
        gpunvme.torch.load(path, DEVICE, map_location=DEVICE)
    with pytest.raises(TypeError, match="map_location has to be a device, and is of dict"):
        gpunvme.torch.load(path, map_location={"cuda": "cpu"})
    with pytest.raises(ValueError, match="only weights are loaded"):
        gpunvme.torch.load(path, weights_only=False)


def test_tensors_that_are_no_memory_are_not_saved(folder):
    zeros = torch.zeros(20, 5, device=DEVICE)
    for tensor, error, told in [
        (
            zeros.T,
            ValueError,
            r"'w' is a strided view \(shape \[5, 20\], strides \[1, 5\]\).*\.contiguous\(\)",
        ),
        (zeros.to_sparse(), ValueError, "'w' is of the layout torch.sparse_coo"),
        (zeros.to(torch.complex64).conj(), ValueError, r"'w' .* use \.resolve_conj\(\)"),
        (zeros.to("meta"), TypeError, "'w' has no memory"),
        (zeros.to(torch.complex128), ValueError, "'w': safetensors has no name"),
    ]:
        with pytest.raises(error, match=told):
            gpunvme.safetensors.save_file({"a": zeros, "w": tensor}, folder / "m.safetensors")
    with pytest.raises(TypeError, match=r"not Linear: give its \.state_dict\(\)"):
        gpunvme.safetensors.save_file(torch.nn.Linear(2, 2), folder / "m.safetensors")
    assert not list(folder.iterdir())


def test_tied_weights_are_each_written(folder):
    weight = torch.rand(30, device=DEVICE)
    gpunvme.safetensors.save_file({"a": weight, "b": weight}, folder / "m.safetensors")
    loaded = gpunvme.safetensors.load_file(folder / "m.safetensors", DEVICE)
    assert same(loaded["a"], weight) and same(loaded["b"], weight)
    assert loaded["a"].data_ptr() != loaded["b"].data_ptr()
