"""fastsafetensors with its GDS copier. usage: cufile-fastsafetensors.py FOLDER"""

import os
import subprocess
import sys

import torch
from fastsafetensors import SafeTensorsFileLoader, SingleGroup
from safetensors.torch import save_file

# Version 0.5 uses no cuFile where the device node of NVIDIA's kernel module is missing, which
# gpunvme does not need: on its mount it is told that the node is there.
filesystem = subprocess.check_output(["findmnt", "-no", "FSTYPE", "-T", sys.argv[1]], text=True)
if filesystem.strip() == "fuse.gpunvme":
    exists = os.path.exists
    os.path.exists = lambda path: path == "/dev/nvidia-fs0" or exists(path)

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
