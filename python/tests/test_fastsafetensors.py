"""The copier for fastsafetensors, beside PyTorch's own loader of the format."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("fastsafetensors", reason="fastsafetensors is not installed")

from fastsafetensors.loader import BaseSafeTensorsFileLoader  # noqa: E402
from fastsafetensors.st_types import Device  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from test_torch import DEVICE, random, same  # noqa: E402

import gpunvme.fastsafetensors  # noqa: E402


def load(path):
    device = Device.from_str("cuda:0" if DEVICE == "cuda" else "cpu")
    loader = BaseSafeTensorsFileLoader(None, device, "gpunvme", set_numa=False)
    loader.add_filenames({0: [str(path)]})
    buffer = loader.copy_files_to_device()
    tensors = {name: buffer.get_tensor(name).clone() for name in loader.get_keys()}
    buffer.close()
    loader.close()
    return tensors


def test_the_copier_brings_what_the_file_has(folder):
    torch.manual_seed(9)
    saved = {f"l{at}": random((64, 1000 + at), torch.bfloat16) for at in range(20)}
    save_file({name: tensor.cpu() for name, tensor in saved.items()}, folder / "m.safetensors")
    loaded = load(folder / "m.safetensors")
    assert loaded.keys() == saved.keys() and all(same(loaded[name], saved[name]) for name in saved)


def test_a_file_elsewhere_is_refused(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    freed = []
    framework = SimpleNamespace(
        alloc_tensor_memory=lambda length, device: SimpleNamespace(get_base_address=lambda: 1 << 40),
        free_tensor_memory=lambda buffer, device: freed.append(buffer),
    )
    metadata = SimpleNamespace(header_length=16, size_bytes=16 + 4096, src=str(tmp_path / "m.safetensors"))
    copier = gpunvme.fastsafetensors.Copier(metadata, Device.from_str("cpu"), framework)
    with pytest.raises(gpunvme.Error, match="not on a gpunvme mount"):
        load(tmp_path / "m.safetensors")
    with pytest.raises(gpunvme.Error, match="not on a gpunvme mount"):
        copier.submit_io(False, 0)
    assert freed == []  # none was made
