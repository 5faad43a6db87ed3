"""PyTorch's GdsFile: storages saved and loaded, with and without registration; and a checkpoint
whose storages are written and read so, as PyTorch's recipe for it has it.

usage: cufile-torch.py FOLDER
"""

import os
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda import gds
from torch.utils.serialization import config

path = os.path.join(sys.argv[1], "storages")
storages = [torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda") for size in (4096, 1 << 20, (16 << 20) + 512)]
gds.gds_register_buffer(storages[1].untyped_storage())
file = gds.GdsFile(path, os.O_CREAT | os.O_RDWR)
offset, places = 0, []
for tensor in storages:
    file.save_storage(tensor.untyped_storage(), offset)
    places.append(offset)
    offset += (tensor.numel() + 4095) // 4096 * 4096
for tensor, place in zip(storages, places):
    copy = torch.empty_like(tensor)
    file.load_storage(copy.untyped_storage(), place)
    assert torch.equal(copy, tensor), f"storage at {place} came back changed"
del file
gds.gds_deregister_buffer(storages[1].untyped_storage())
with open(path, "rb") as plain:
    for tensor, place in zip(storages, places):
        plain.seek(place)
        assert plain.read(tensor.numel()) == tensor.cpu().numpy().tobytes(), f"the file differs at {place}"
print("3 storages, saved and loaded, equal")

# The recipe: a file that torch.save lays out and leaves empty, its storages filled by cuFile.
config.save.storage_alignment = 4096
path = os.path.join(sys.argv[1], "checkpoint.pt")
state = {f"layer{at}": torch.randn(1000 + at, 777, device="cuda") for at in range(8)}
with torch.serialization.skip_data():
    torch.save(state, path)
with FakeTensorMode():
    places = {name: tensor.untyped_storage()._checkpoint_offset for name, tensor in torch.load(path).items()}
file = gds.GdsFile(path, os.O_RDWR)
for name, tensor in state.items():
    file.save_storage(tensor.untyped_storage(), places[name])
copies = {name: torch.empty_like(tensor) for name, tensor in state.items()}
for name, tensor in copies.items():
    file.load_storage(tensor.untyped_storage(), places[name])
del file
plain = torch.load(path, map_location="cpu")
for name, tensor in state.items():
    assert torch.equal(copies[name], tensor), f"{name} came back changed"
    assert torch.equal(plain[name], tensor.cpu()), f"torch.load finds another {name}"
print(f"{len(state)} tensors of a checkpoint, saved and loaded, equal")
