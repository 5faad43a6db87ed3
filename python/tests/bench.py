"""What the package brings on a GPU, beside what a user would take instead, in one run. Prints a table.

usage: bench.py VOLUME PEER [WORK]...

VOLUME is a folder on a mount of gpunvme, PEER one on another filesystem. Works: safetensors, chunks, rows,
call, checkpoint; without any all are done.
"""

import ctypes
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch

import gpunvme
import gpunvme.safetensors

RUNS = 5
ROWS: list[tuple[str, str, str]] = []


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def seconds(work: Callable[[], object], runs: int = RUNS, cold: bool = True) -> float:
    """The median of some runs."""
    taken = []
    for _ in range(runs):
        if cold:
            drop_caches()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
        del result
    return statistics.median(taken)


def row(work: str, who: str, figure: str) -> None:
    ROWS.append((work, who, figure))
    print(f"{work:42} {who:34} {figure}", flush=True)


def safetensors(volume: Path, peer: Path) -> None:
    import safetensors.torch

    torch.manual_seed(0)
    shape = (2048, 2604)  # 300 tensors of it in bfloat16 are 3.2 GB
    tensors = {f"layers.{at}.weight": torch.randn(shape, device="cuda").bfloat16() for at in range(300)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    ours, theirs = volume / "model.safetensors", peer / "model.safetensors"
    name = f"safetensors, {size / 1e9:.1f} GB, 300 tensors"

    def rate(work: Callable[[], object], cold: bool = True) -> str:
        return f"{size / seconds(work, cold=cold) / 1e9:.2f} GB/s"

    row(f"save {name}", "gpunvme", rate(lambda: gpunvme.safetensors.save_file(tensors, ours)))

    def stock_save() -> None:
        safetensors.torch.save_file(tensors, theirs)
        descriptor = os.open(theirs, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)

    row(f"save {name}", "safetensors and fsync", rate(stock_save))
    loaded = gpunvme.safetensors.load_file(ours, "cuda")
    expected = safetensors.torch.load_file(theirs, "cuda")
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[k], expected[k]) for k in loaded)
    del loaded, expected
    row(f"load {name}", "gpunvme", rate(lambda: gpunvme.safetensors.load_file(ours, "cuda")))
    row(f"load {name}", "load_file, cold", rate(lambda: safetensors.torch.load_file(theirs, "cuda")))
    row(
        f"load {name}",
        "load_file, resident",
        rate(lambda: safetensors.torch.load_file(theirs, "cuda"), cold=False),
    )
    try:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup
    except ImportError as error:
        row(f"load {name}", "fastsafetensors", f"not here: {error}")
        return

    def fast() -> dict[str, torch.Tensor]:
        loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cuda:0"), nogds=True)
        loader.add_filenames({0: [str(theirs)]})
        buffer = loader.copy_files_to_device()
        result = {key: buffer.get_tensor(key).clone() for key in loader.get_keys()}
        buffer.close()
        loader.close()
        return result

    try:
        row(f"load {name}", "fastsafetensors, its tensors copied", rate(fast))
    except Exception as error:
        row(f"load {name}", "fastsafetensors", f"failed: {error!r}")


def chunks(volume: Path, peer: Path) -> None:
    """Blocks of a KV cache: a file each, by 8 threads."""
    count, length = 128, (6 << 20) + 17
    tensors = [torch.randint(0, 256, (length,), dtype=torch.uint8, device="cuda") for _ in range(count)]
    pinned = [torch.empty(length, dtype=torch.uint8, pin_memory=True) for _ in range(8)]
    pool = ThreadPoolExecutor(8)
    name = f"{count} chunks of 6 MiB + 17, 8 threads"

    def ours_write(at: int) -> None:
        with gpunvme.open(volume / f"chunk{at}", "w") as f:
            f.write_from(tensors[at])

    def ours_read(at: int) -> torch.Tensor:
        target = torch.empty(length, dtype=torch.uint8, device="cuda")
        with gpunvme.open(volume / f"chunk{at}") as f:
            f.read_into(target)
        return target

    def hand_write(at: int) -> None:
        host = pinned[at % 8]
        host.copy_(tensors[at])
        with open(peer / f"chunk{at}", "wb", buffering=0) as f:
            f.write(memoryview(host.numpy()))
            os.fdatasync(f.fileno())

    def hand_read(at: int) -> torch.Tensor:
        host = pinned[at % 8]
        with open(peer / f"chunk{at}", "rb", buffering=0) as f:
            f.readinto(memoryview(host.numpy()))
        return host.to("cuda")

    def all_of(work: Callable[[int], object], of: range = range(count)) -> Callable[[], object]:
        # A thread has every eighth, and so a pinned buffer to itself.
        return lambda: list(pool.map(lambda first: [work(at) for at in of[first::8]], range(8)))

    def rate(work: Callable[[int], object]) -> str:
        return f"{count * length / seconds(all_of(work)) / 1e9:.2f} GB/s"

    mount = gpunvme.Mount(volume)
    row(f"write {name}", "gpunvme", rate(ours_write))
    row(f"write {name}", "pinned by hand, fdatasync", rate(hand_write))
    row(f"read {name}", "gpunvme", rate(ours_read))
    row(f"read {name}", "pinned by hand, cold", rate(hand_read))
    assert all(torch.equal(ours_read(at), tensors[at]) for at in range(count))
    mount.close()


def rows(volume: Path, peer: Path) -> None:
    """Rows of a table, from anywhere, in one call."""
    path, count = volume / "table", 20_000
    with gpunvme.open(path, "w") as f:
        block = torch.randint(0, 256, (256 << 20,), dtype=torch.uint8, device="cuda")
        for at in range(16):
            f.write_from(block, at * block.nbytes)
    with gpunvme.open(path) as f:
        for length in (512, 4096):
            offsets = numpy.random.default_rng(length).integers(0, (4 << 30) // length, count) * length
            target = torch.empty((count, length), dtype=torch.uint8, device="cuda")
            rate = count / seconds(lambda: f.read_rows(target, offsets), 15) / 1e6  # noqa: B023
            row(f"{count} rows of {length} B, one call", "gpunvme", f"{rate:.3f} million rows/s")
            at = int(offsets[7]) % block.nbytes
            assert torch.equal(target[7], block[at : at + length])


class Segment(ctypes.Structure):
    _fields_ = (("file_offset", ctypes.c_uint64), ("address", ctypes.c_void_p), ("len", ctypes.c_uint64))


def call(volume: Path, peer: Path) -> None:
    """One call of 4 KiB, in memory that does not move, and the same by the C library with ctypes."""
    path = volume / "call"
    path.write_bytes(os.urandom(64 << 20))
    target = torch.empty(4096, dtype=torch.uint8, device="cuda")
    calls = 20_000
    offsets = (numpy.random.default_rng(1).integers(0, 16_384, calls) * 4096).tolist()

    def each(work: Callable[[int], object]) -> float:
        for at in offsets[:1000]:
            work(at)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for at in offsets:
            work(at)
        return (time.perf_counter() - begun) / calls * 1e6

    with gpunvme.open(path) as f:
        ours = [each(lambda at: f.read_into(target, at)) for _ in range(RUNS)]
    row("4 KiB, one call", "gpunvme", f"{statistics.median(ours):.2f} us")
    library = Path(os.environ.get("GPUNVME_BIN", "/usr/local/lib")) / "libgpunvme.so"
    if not library.exists():
        row("4 KiB, one call", "the C library", f"not here: {library}")
        return
    c = ctypes.CDLL(str(library))
    mount, transfers, file = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    assert c.gpunvme_mount_open(str(volume).encode(), ctypes.byref(mount)) == 0
    assert (
        c.gpunvme_transfers_open(mount, ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.byref(transfers)) == 0
    )
    assert c.gpunvme_file_open(str(path).encode(), os.O_RDONLY, 0, ctypes.byref(file)) == 0
    segment = Segment(0, target.data_ptr(), 4096)
    read, by = c.gpunvme_gpu_read, ctypes.byref(segment)
    read.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t, ctypes.c_uint32, ctypes.c_void_p]

    def by_c(at: int) -> None:
        segment.file_offset = at
        assert read(transfers, file, by, 1, 0, None) == 0

    row(
        "4 KiB, one call",
        "the C library with ctypes",
        f"{statistics.median(each(by_c) for _ in range(RUNS)):.2f} us",
    )
    c.gpunvme_file_close(file)
    c.gpunvme_transfers_close(transfers)
    c.gpunvme_mount_close(mount)


def checkpoint(volume: Path, peer: Path) -> None:
    """A distributed checkpoint by one rank."""
    import torch.distributed.checkpoint as dcp

    from gpunvme.checkpoint import Reader, Writer

    torch.manual_seed(0)
    state = {f"layers.{at}": torch.randn(2048, 8192, device="cuda") for at in range(60)}
    size = sum(tensor.nbytes for tensor in state.values())
    name = f"checkpoint of {size / 1e9:.1f} GB"
    target = {key: torch.empty_like(tensor) for key, tensor in state.items()}

    def rate(work: Callable[[], object]) -> str:
        return f"{size / seconds(work, 3) / 1e9:.2f} GB/s"

    row(f"save {name}", "gpunvme", rate(lambda: dcp.save(state, storage_writer=Writer(volume / "c"))))
    stock = rate(lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(peer / "c")))
    row(f"save {name}", "PyTorch's writer", stock)
    row(f"load {name}", "gpunvme", rate(lambda: dcp.load(target, storage_reader=Reader(volume / "c"))))
    assert all(torch.equal(target[key], state[key]) for key in state)
    stock = rate(lambda: dcp.load(target, storage_reader=dcp.FileSystemReader(peer / "c")))
    row(f"load {name}", "PyTorch's reader", stock)


WORKS = {"safetensors": safetensors, "chunks": chunks, "rows": rows, "call": call, "checkpoint": checkpoint}


def main() -> None:
    volume, peer = Path(sys.argv[1]), Path(sys.argv[2])
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, medians of {RUNS}, cold unless said\n"
    )
    mount = gpunvme.Mount(volume)  # what transfers need stays ready
    for name, work in WORKS.items():
        if len(sys.argv) > 3 and name not in sys.argv[3:]:
            continue
        for folder in (volume / name, peer / name):
            folder.mkdir()
        try:
            work(volume / name, peer / name)
        except Exception as error:
            row(name, "failed", repr(error))
        torch.cuda.empty_cache()
        for folder in (volume / name, peer / name):
            shutil.rmtree(folder)
    mount.close()
    print("\n| work | with | |\n| --- | --- | --: |")
    for line in ROWS:
        print("| " + " | ".join(line) + " |")
    if any(who == "failed" for _, who, _ in ROWS):
        sys.exit(1)


if __name__ == "__main__":
    main()
