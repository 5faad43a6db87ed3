"""PyTorch's GdsFile: storages saved and loaded, with and without registration.

usage: cufile-torch.py FOLDER
"""

import os
import sys

import torch
from torch.cuda import gds

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
