"""fastsafetensors with its GDS copier. usage: cufile-fastsafetensors.py FOLDER"""

import os
import sys

import torch
from fastsafetensors import SafeTensorsFileLoader, SingleGroup
from safetensors.torch import save_file

path = os.path.join(sys.argv[1], "model.safetensors")
tensors = {f"layer{at}": torch.randn(1000 + at, 777) for at in range(16)}
save_file(tensors, path)
loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cuda:0"), nogds=False, debug_log=False)
loader.add_filenames({0: [path]})
files = loader.copy_files_to_device()
for name, tensor in tensors.items():
    assert torch.equal(files.get_tensor(name).cpu(), tensor), f"{name} came back changed"
files.close()
loader.close()
print(f"{len(tensors)} tensors loaded, equal")
