"""LMCache's cuFile backend: chunks written from GPU memory and read back in the order of a stream.

LMCache itself needs packages of its own; its backend needs PyTorch and cufile-python, and is loaded
without the rest. usage: cufile-lmcache.py FOLDER
"""

import importlib
import importlib.util
import os
import sys
import types

import torch

CHUNKS, SIZE = 64, 1 << 20

# Its packages without what they import.
for name in "lmcache", "lmcache.v1", "lmcache.v1.gpu_connector":
    found = [os.path.join(path, *name.split(".")) for path in sys.path]
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path for path in found if os.path.isdir(path)]
cufile = importlib.import_module("lmcache.v1.gpu_connector.gds_backends.cufile")

backend = cufile.Backend()
backend.validate_environment()
data = torch.randint(0, 255, (CHUNKS, SIZE), dtype=torch.uint8, device="cuda")
memory = torch.zeros_like(data)
stream = torch.cuda.Stream()
with backend.open_slab(sys.argv[1], CHUNKS * SIZE, True) as slab:
    backend.register_buffer(memory)
    backend.register_stream(stream.cuda_stream)
    begun = []
    with torch.cuda.stream(stream):
        memory.copy_(data)
        for at in range(CHUNKS):
            begun.append(slab.write_async(memory.data_ptr(), SIZE, (CHUNKS - 1 - at) * SIZE, at * SIZE, stream.cuda_stream))
        memory.zero_()
        for at in range(CHUNKS):
            begun.append(slab.read_async(memory.data_ptr(), SIZE, (CHUNKS - 1 - at) * SIZE, at * SIZE, stream.cuda_stream))
        copy = memory.clone()
    stream.synchronize()
    assert all(one.bytes_done == SIZE for one in begun), [one.bytes_done for one in begun]
    assert torch.equal(copy, data), "what was read is not what was written"
    backend.deregister_stream(stream.cuda_stream)
    backend.deregister_buffer(memory)
    with open(slab.path, "rb") as plain:
        assert plain.read() == data.flip(0).cpu().numpy().tobytes(), "the file differs"
backend.close_driver()
print(f"{CHUNKS} chunks of {SIZE >> 20} MiB written and read on a stream, equal")
