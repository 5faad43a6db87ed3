"""What the package brings on a GPU, beside what a user would take instead, in one run. Prints a table.

usage: bench.py VOLUME PEER [WORK]...

VOLUME is a folder on a mount of gpunvme, PEER one on another filesystem. Works: call, rows, safetensors,
checkpoint, chunks, files, ranks (one on each of several GPUs); without any all are done.
"""

import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

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


class Segment(ctypes.Structure):
    _fields_ = (("file_offset", ctypes.c_uint64), ("address", ctypes.c_void_p), ("len", ctypes.c_uint64))


class Library:
    """The C library, by ctypes, with one file open: what the package is measured against."""

    def __init__(self, volume: Path, path: Path) -> None:
        self.c = ctypes.CDLL(str(Path(os.environ.get("GPUNVME_BIN", "/usr/local/lib")) / "libgpunvme.so"))
        self.mount, self.transfers, self.file = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        c = self.c
        assert c.gpunvme_mount_open(str(volume).encode(), ctypes.byref(self.mount)) == 0
        assert c.gpunvme_transfers_open(self.mount, None, ctypes.byref(self.transfers)) == 0
        assert c.gpunvme_file_open(str(path).encode(), os.O_RDONLY, 0, ctypes.byref(self.file)) == 0
        self.function = c.gpunvme_gpu_read
        self.function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t, ctypes.c_uint32, ctypes.c_void_p]

    def read(self, segments: object, count: int) -> None:
        """Reads segments, at an address."""
        assert self.function(self.transfers, self.file, segments, count, 0, None) == 0

    def __enter__(self) -> "Library":
        return self

    def __exit__(self, *_: object) -> None:
        self.c.gpunvme_file_close(self.file)
        self.c.gpunvme_transfers_close(self.transfers)
        self.c.gpunvme_mount_close(self.mount)


def table(offsets: numpy.ndarray, addresses: numpy.ndarray, lengths: numpy.ndarray | int) -> numpy.ndarray:
    """Segments for the C library."""
    segments = numpy.empty((len(offsets), 3), numpy.uint64)
    segments[:, 0], segments[:, 1], segments[:, 2] = offsets, addresses, lengths
    return segments


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
    ours.read_bytes()
    row(
        f"load {name}",
        "gpunvme, resident",
        rate(lambda: gpunvme.safetensors.load_file(ours, "cuda"), cold=False),
    )
    with gpunvme.safetensors.safe_open(ours) as f:
        entries = list(f._header.entries.values())
    with Library(volume, ours) as library:

        def by_c() -> list[torch.Tensor]:
            result = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in entries]
            segments = table(
                numpy.array([entry.offset for entry in entries]),
                numpy.array([tensor.data_ptr() for tensor in result]),
                numpy.array([entry.length for entry in entries]),
            )
            library.read(segments.ctypes.data, len(segments))
            return result

        row(f"load {name}", "the C library with ctypes", rate(by_c))
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
    with gpunvme.open(path) as f, Library(volume, path) as library:
        for length in (512, 4096):
            offsets = numpy.random.default_rng(length).integers(0, (4 << 30) // length, count) * length
            target = torch.empty((count, length), dtype=torch.uint8, device="cuda")
            segments = table(offsets, target.data_ptr() + numpy.arange(count) * length, length)
            works = {
                "gpunvme": lambda: f.read_rows(target, offsets),  # noqa: B023
                "the C library with ctypes": lambda: library.read(segments.ctypes.data, count),  # noqa: B023
            }
            # In turns: what else the machine does differs from second to second.
            taken: dict[str, list[float]] = {who: [] for who in works}
            for _ in range(25):
                for who, work in works.items():
                    taken[who].append(seconds(work, 1, cold=False))
            for who, times in taken.items():
                rates = f"{count / statistics.median(times) / 1e6:.3f} million rows/s"
                row(
                    f"{count} rows of {length} B, one call",
                    who,
                    f"{rates}, at best {count / min(times) / 1e6:.3f}",
                )
            assert f.read_rows(target, offsets).bytes == target.nbytes
            at = int(offsets[7]) % block.nbytes
            assert torch.equal(target[7], block[at : at + length])


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

    segment = Segment(0, target.data_ptr(), 4096)
    by = ctypes.byref(segment)
    with gpunvme.open(path) as f, Library(volume, path) as library:

        def by_c(at: int) -> None:
            segment.file_offset = at
            library.read(by, 1)

        works = {"gpunvme": lambda at: f.read_into(target, at), "the C library with ctypes": by_c}
        taken: dict[str, list[float]] = {who: [] for who in works}
        for _ in range(RUNS):
            for who, work in works.items():
                taken[who].append(each(work))
        for who, times in taken.items():
            row("4 KiB, one call", who, f"{statistics.median(times):.2f} us, at best {min(times):.2f}")


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


def rank(volume: Path, peer: Path) -> None:
    """What one of several ranks does for :func:`ranks`, begun by torchrun."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from gpunvme.checkpoint import Reader, Writer

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    me, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(me)
    state = {f"layers.{at}.{me}": torch.randn(2048, 8192, device="cuda") for at in range(60)}
    target = {key: torch.empty_like(tensor) for key, tensor in state.items()}
    size = world * sum(tensor.nbytes for tensor in state.values())
    name = f"checkpoint of {size / 1e9:.1f} GB, {world} GPUs"

    def rate(work: Callable[[], object]) -> str:
        taken = []
        for _ in range(3):
            if me == 0:
                drop_caches()
            dist.barrier()
            begun = time.perf_counter()
            work()
            dist.barrier()
            taken.append(time.perf_counter() - begun)
        return f"{size / statistics.median(taken) / 1e9:.2f} GB/s"

    figures = [
        ("save", "gpunvme", rate(lambda: dcp.save(state, storage_writer=Writer(volume / "c")))),
        ("save", "PyTorch", rate(lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(peer / "c")))),
        ("load", "gpunvme", rate(lambda: dcp.load(target, storage_reader=Reader(volume / "c")))),
    ]
    assert all(torch.equal(target[key], state[key]) for key in state)
    stock = rate(lambda: dcp.load(target, storage_reader=dcp.FileSystemReader(peer / "c")))
    figures.append(("load", "PyTorch", stock))
    if me == 0:
        for what, who, figure in figures:
            print(f"{what} {name}|{who}|{figure}")
    dist.destroy_process_group()


def ranks(volume: Path, peer: Path) -> None:
    """A distributed checkpoint by a rank on each GPU."""
    count = torch.cuda.device_count()
    if count < 2:
        row("checkpoint by several ranks", "not here", f"{count} GPU")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += [__file__, str(volume), str(peer), "rank"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    for line in done.stdout.splitlines():
        if line.count("|") == 2:
            row(*line.split("|"))


class Ordinary(Dataset[torch.Tensor]):
    """Files as one reads them without us, in workers."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.paths[index].read_bytes()), dtype=torch.uint8)


def files(volume: Path, peer: Path) -> None:
    """Small files in batches on the GPU."""
    from gpunvme.data import Batches, Files

    count, length, size = 8000, 110 << 10, 256
    content = numpy.random.default_rng(1).bytes(length)
    paths: dict[Path, list[Path]] = {}
    for folder in (volume, peer):
        paths[folder] = [folder / f"{at:05}" for at in range(count)]
        for path in paths[folder]:
            path.write_bytes(content)
    name = f"{count} files of 110 KiB, batches of {size}"

    def ours() -> None:
        loader = DataLoader(Files(paths[volume]), size, shuffle=True, collate_fn=list)
        for batch in Batches(loader, "cuda"):
            batch.stack()

    def stock() -> None:
        loader = DataLoader(Ordinary(paths[peer]), size, shuffle=True, num_workers=8, pin_memory=True)
        for batch in loader:
            batch.to("cuda", non_blocking=True)

    def rate(work: Callable[[], object], cold: bool = True) -> str:
        return f"{count * length / seconds(work, 3, cold) / 1e9:.2f} GB/s"

    row(name, "gpunvme.data", rate(ours))
    row(name, "DataLoader, 8 workers, pinned, cold", rate(stock))
    row(name, "DataLoader, 8 workers, pinned, resident", rate(stock, cold=False))


WORKS = {
    "call": call,
    "rows": rows,
    "safetensors": safetensors,
    "checkpoint": checkpoint,
    "chunks": chunks,
    "files": files,
    "ranks": ranks,
}


def main() -> None:
    volume, peer = Path(sys.argv[1]), Path(sys.argv[2])
    if sys.argv[3:] == ["rank"]:
        rank(volume, peer)
        return
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
