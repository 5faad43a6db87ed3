"""State dicts, beside ``torch.save`` and ``torch.load``."""

from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from test_torch import DEVICE, DTYPES, random, same  # noqa: E402

import gpunvme.torch  # noqa: E402


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


class Holder:
    def __init__(self):
        self.tensor = torch.ones(5)


def test_tensors_in_other_objects_are_refused_and_the_file_stays(folder):
    gpunvme.torch.save({"a": torch.ones(3)}, folder / "state.pt")
    before = (folder / "state.pt").read_bytes()
    with pytest.raises(Exception, match="Holder"):
        gpunvme.torch.save({"a": Holder()}, folder / "state.pt")
    assert (folder / "state.pt").read_bytes() == before
    assert [entry.name for entry in folder.iterdir()] == ["state.pt"]


def test_a_file_elsewhere_is_refused(tmp_path):
    with pytest.raises(gpunvme.Error, match="not on a gpunvme mount"):
        gpunvme.torch.save({}, tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())
    torch.save({}, tmp_path / "state.pt")
    with pytest.raises(gpunvme.Error, match="not on a gpunvme mount"):
        gpunvme.torch.load(tmp_path / "state.pt")
