"""NIXL's plugins GDS and GDS_MT: GPU memory written to a file and read back, in many descriptors.

usage: cufile-nixl.py FOLDER
"""

import os
import sys
import time

import torch
from nixl_cu13._api import nixl_agent, nixl_agent_config

COUNT, SIZE = 96, 256 << 10


def transfer(agent, operation, memory, file, backend):
    request = agent.initialize_xfer(operation, memory, file, agent.name, backends=[backend])
    state = agent.transfer(request)
    while state == "PROC":
        time.sleep(0)
        state = agent.check_xfer_state(request)
    assert state == "DONE", f"{operation}: {state}"
    agent.release_xfer_handle(request)


def run(backend, folder):
    agent = nixl_agent(backend, nixl_agent_config(backends=[]))
    agent.create_backend(backend)
    path = os.path.join(folder, backend)
    number = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0))
    os.ftruncate(number, COUNT * SIZE)
    data = torch.randint(0, 255, (COUNT, SIZE), dtype=torch.uint8, device="cuda")
    copy = torch.zeros_like(data)
    # The file backwards, so that no two descriptors can be merged.
    places = [((COUNT - 1 - at) * SIZE, SIZE, number) for at in range(COUNT)]
    file = agent.register_memory([(0, COUNT * SIZE, number, "")], "FILE", backends=[backend])
    for operation, tensor in ("WRITE", data), ("READ", copy):
        memory = agent.register_memory(tensor, backends=[backend])
        local = agent.get_xfer_descs([(row.data_ptr(), SIZE, 0) for row in tensor], "VRAM")
        transfer(agent, operation, local, agent.get_xfer_descs(places, "FILE"), backend)
        agent.deregister_memory(memory, backends=[backend])
    agent.deregister_memory(file, backends=[backend])
    assert torch.equal(data, copy), f"{backend}: what was read is not what was written"
    with open(path, "rb") as plain:
        assert plain.read() == data.flip(0).cpu().numpy().tobytes(), f"{backend}: the file differs"
    os.close(number)
    print(f"{backend}: {COUNT} descriptors of {SIZE >> 10} KiB written and read, equal")


for name in "GDS", "GDS_MT":
    run(name, sys.argv[1])
