"""KvikIO reading one file of 2 GiB, warm, in GB/s: the median of five.

usage: cufile-speed.py FOLDER
"""

import os
import statistics
import sys
import time

import cupy
import kvikio
import kvikio.defaults

SIZE = 2 << 30
path = os.path.join(sys.argv[1], "long")
data = cupy.random.default_rng(1).integers(0, 255, SIZE, dtype=cupy.uint8)
with kvikio.CuFile(path, "w") as file:
    assert file.write(data) == SIZE
copy = cupy.empty_like(data)
usual = kvikio.defaults.get("num_threads"), kvikio.defaults.get("task_size")
print("usual: {} threads, tasks of {} bytes".format(*usual))
for threads, task in (usual, (1, 16 << 20), (4, 1 << 20), (8, 1 << 20), (4, 4 << 20), (8, 4 << 20), (16, 4 << 20), (16, 16 << 20)):
    with kvikio.defaults.set({"num_threads": threads, "task_size": task}), kvikio.CuFile(path, "r") as file:
        rates = []
        for _ in range(5):
            copy.fill(0)
            cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            assert file.read(copy) == SIZE
            rates.append(SIZE / (time.perf_counter() - start) / 1e9)
        assert bool((copy == data).all()), "the file came back changed"
        print(f"{threads} threads, tasks of {task / (1 << 20):g} MiB: {statistics.median(rates):.2f} GB/s")
os.unlink(path)
