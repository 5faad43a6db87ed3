"""Tensors of PyTorch: on a GPU where there is one that PyTorch reaches, else in host memory."""

import ctypes
import gc
import threading
import time

import numpy
import pytest
from conftest import needs_cuda
from raw_cuda import Stream
from test_gpu import pinned

import gpunvme
import gpunvme.safetensors as ours

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
stock = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
on_gpu = pytest.mark.skipif(not CUDA, reason="PyTorch reaches no GPU")

DTYPES = [torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


def random(shape, dtype, device=DEVICE):
    if isinstance(shape, int):
        shape = (shape,)
    size = int(numpy.prod(shape)) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape).to(device)


def same(one, other):
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*as_bytes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(folder, dtype):
    tensor = random((3, 1000), dtype)
    with gpunvme.open(folder / "file", "w") as f:
        assert f.write_from(tensor, 3).bytes == tensor.nbytes
        again = torch.empty_like(tensor)
        done = f.read_into(again, 3)
    assert done.bytes == tensor.nbytes and same(tensor, again)
    assert (folder / "file").read_bytes()[3:] == tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_views_are_read_in_place_or_refused_by_name(stored):
    path, values = stored(10_000)
    tensor = torch.zeros((100, 100), dtype=torch.uint8, device=DEVICE)
    with gpunvme.open(path) as f:
        f.read_into(tensor[10:20], 500)
        assert numpy.array_equal(tensor[10:20].cpu().numpy().reshape(-1), values[500:1500])
        assert not tensor[:10].any() and not tensor[20:].any()
        for view in (tensor[:, :50], tensor.T, tensor[::2]):
            with pytest.raises(ValueError, match=r"Tensor is a strided view \(shape"):
                f.read_into(view)
        with pytest.raises(ValueError, match="resolve_conj"):
            f.write_from(torch.zeros(4, dtype=torch.complex64, device=DEVICE).conj())
        f.read_into([(row[:50], at * 100) for at, row in enumerate(tensor)])
        assert numpy.array_equal(tensor[:, :50].cpu().numpy(), values.reshape(100, 100)[:, :50])
        leaf = torch.nn.Parameter(torch.zeros(10, device=DEVICE))
        assert f.read_into(leaf).bytes == 40
        assert (
            f.read_rows(torch.empty((3, 8), dtype=torch.uint8, device=DEVICE), torch.tensor([8, 0, 16])).bytes
            == 24
        )


@on_gpu
def test_a_write_waits_for_the_kernels_before_it(folder):
    """Many kernels make the numbers; what is written are those of the last."""
    matrix = torch.eye(4096, device="cuda")
    with gpunvme.open(folder / "file", "w") as f:
        for round in range(5):
            tensor = torch.zeros(4096, 4096, device="cuda")
            for _ in range(20):
                tensor = (tensor + 1) @ matrix
            f.write_from(tensor)
            read = numpy.fromfile(folder / "file", dtype="<f4")
            assert (read == 20).all(), round


@on_gpu
def test_a_read_into_memory_that_was_just_freed_comes_after_its_last_use(stored):
    """A caching allocator gives out memory that kernels in the stream still write to."""
    path, values = stored(64 << 20)
    torch.cuda.empty_cache()
    matrix = torch.eye(4096, device="cuda")
    product, reused = torch.empty_like(matrix), 0
    with gpunvme.open(path) as f:
        for _ in range(5):
            busy = torch.zeros(4096, 4096, device="cuda")
            address = busy.data_ptr()
            for _ in range(20):
                busy.add_(1)
                torch.matmul(matrix, matrix, out=product)
                busy.fill_(7)
            del busy
            tensor = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            reused += tensor.data_ptr() == address
            f.read_into(tensor)
            torch.cuda.synchronize()
            assert numpy.array_equal(tensor.cpu().numpy(), values)
            del tensor
    assert reused


@on_gpu
def test_streams_order_reads_and_writes(stored):
    path, values = stored(16 << 20)
    stream = torch.cuda.Stream()
    with gpunvme.open(path) as f, gpunvme.open(path.parent / "copy", "w") as copy:
        with torch.cuda.stream(stream):
            tensor = torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
            read = f.read_into(tensor, stream=stream)
            tensor += 1  # after the read
            write = copy.write_from(tensor, stream=torch.cuda.current_stream())
            tensor.zero_()  # after the write
        stream.synchronize()
        assert read.result().bytes == write.result().bytes == 16 << 20
        assert not tensor.any()
    assert (path.parent / "copy").read_bytes() == (values + numpy.uint8(1)).tobytes()


class OfTorch(Stream):
    """A stream with what one of PyTorch has."""

    stream_id = 7

    @property
    def cuda_stream(self):
        return self.handle.value


@needs_cuda
def test_pinned_tensors_are_read_and_written_in_the_order_of_a_stream(stored):
    """Only a GPU's memory is recorded in the stream: PyTorch refuses that of the host."""
    path, values = stored(100_000)
    stream, memory = OfTorch(), pinned(100_000, 0)
    tensor = torch.frombuffer((ctypes.c_uint8 * 100_000).from_address(memory.value), dtype=torch.uint8)
    with gpunvme.open(path) as f, gpunvme.open(path.parent / "copy", "w") as copy:
        read, write = f.read_into(tensor, stream=stream), copy.write_from(tensor, stream=stream)
        assert read.result(30).bytes == write.result(30).bytes == 100_000
    assert (path.parent / "copy").read_bytes() == tensor.numpy().tobytes() == values.tobytes()


@needs_cuda
def test_what_cannot_be_recorded_in_a_stream_is_not_put_there(stored):
    """A request whose call failed would use memory that nothing keeps."""
    path, _ = stored(100_000)

    class Refusing(torch.Tensor):
        is_cuda = True

        def detach(self):
            return self

        def get_device(self):
            return 0

        def record_stream(self, stream):
            raise LookupError("no such stream")

    stream, memory = OfTorch(), pinned(100_000, 0)
    tensor = torch.frombuffer((ctypes.c_uint8 * 100_000).from_address(memory.value), dtype=torch.uint8)
    with gpunvme.open(path) as f:
        with pytest.raises(LookupError, match="no such stream"):
            f.read_into(tensor.as_subclass(Refusing), stream=stream)
        stream.synchronize()
        time.sleep(0.2)
    assert not tensor.any()


@on_gpu
def test_a_tensor_that_is_freed_in_flight_is_not_given_to_others(stored):
    path, _ = stored(64 << 20)
    side = torch.cuda.Stream()
    with gpunvme.open(path) as f:
        for _ in range(10):
            tensor = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            f.read_into(tensor, stream=side)
            submitted = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            f.submit_read_into(submitted)
            del tensor, submitted
            gc.collect()
            others = [torch.full((64 << 20,), 3, dtype=torch.uint8, device="cuda") for _ in range(2)]
            torch.cuda.synchronize()
            assert all(bool((other == 3).all()) for other in others)
            del others


@on_gpu
def test_threads_with_streams_of_their_own(stored):
    path, values = stored(32 << 20)
    wrong = []

    def work(at: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for round in range(20):
                offset = (at * 7919 + round * 104_729) % (28 << 20)
                tensor = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
                f.read_into(tensor, offset)
                if not numpy.array_equal(tensor.cpu().numpy(), values[offset : offset + (1 << 20)]):
                    wrong.append((at, round))

    with gpunvme.open(path) as f:
        threads = [threading.Thread(target=work, args=(at,)) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@on_gpu
def weights(seed: int = 0) -> dict:
    torch.manual_seed(seed)
    shapes = [(), (0,), (7,), (33, 65), (1024, 1024), (3, 5, 7, 11)]
    return {
        f"l{i}.{j}": random(shape, dtype) for i, dtype in enumerate(DTYPES) for j, shape in enumerate(shapes)
    }


def test_models_are_those_of_safetensors(folder):
    tensors = weights()
    stock.save_file({name: t.cpu() for name, t in tensors.items()}, folder / "stock.safetensors")
    loaded = ours.load_file(folder / "stock.safetensors", DEVICE)
    expected = stock.load_file(folder / "stock.safetensors", DEVICE)
    assert loaded.keys() == expected.keys()
    assert all(same(loaded[name], expected[name]) for name in loaded)
    assert all(t.device.type == DEVICE for t in loaded.values())
    ours.save_file(tensors, folder / "ours.safetensors", {"format": "pt"})
    again = stock.load_file(folder / "ours.safetensors", DEVICE)
    assert again.keys() == tensors.keys() and all(same(again[name], tensors[name]) for name in again)


def test_slices_of_tensors(folder):
    tensor = random((64, 300, 17), torch.bfloat16)
    ours.save_file({"w": tensor}, folder / "m.safetensors")
    with ours.safe_open(folder / "m.safetensors", "pt", DEVICE) as f:
        part = f.get_slice("w")
        for index in [(slice(3, 9),), (slice(None), slice(10, 20)), (..., 3), (5, slice(1, 4), slice(2, 9))]:
            assert same(part[index], tensor[index])
        assert same(f.get_tensor("w"), tensor)


def test_tensors_without_memory_are_refused(stored):
    from torch._subclasses import FakeTensorMode

    path, _ = stored(1000)
    gone = torch.zeros(100, device=DEVICE)
    gone.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.empty(200)[100:]
    with gpunvme.open(path, "r+") as f:
        for tensor in (torch.empty(100, device="meta"), torch.empty(200, device="meta")[100:], gone, fake):
            for call in (f.read_into, f.write_from, f.submit_read_into):
                with pytest.raises((TypeError, RuntimeError)):
                    call(tensor)
        assert f.read_into(torch.empty((0, 5), device=DEVICE)).bytes == 0


class Subclass(torch.Tensor):
    pass


def test_tensors_are_taken_whatever_they_are_besides_memory(folder):
    whole = torch.arange(4096, dtype=torch.float32, device=DEVICE)
    content = whole.cpu().numpy().tobytes()
    tensors = [
        (whole, content),
        (whole.clone().requires_grad_(), content),
        (whole.clone().requires_grad_() * 1, content),
        (torch.nn.Parameter(whole.clone()), content),
        (torch.nn.Buffer(whole.clone()), content),
        (whole.clone().as_subclass(Subclass), content),
        (whole.reshape(64, 1, 64).transpose(0, 1), content),
        (whole[100:200], content[400:800]),
        (whole[7], content[28:32]),
        (torch.empty((5, 0), device=DEVICE).T, b""),
        (torch.zeros(100, dtype=torch.uint8, device=DEVICE).view(torch.float4_e2m1fn_x2), bytes(100)),
        (torch.zeros(8, dtype=torch.complex64, device=DEVICE), bytes(64)),
    ]
    if CUDA:
        tensors.append((whole.cpu().pin_memory(), content))
    if hasattr(torch, "quantize_per_tensor"):  # PyTorch has said that it will go
        tensors.append((torch.quantize_per_tensor(torch.zeros(100), 1.0, 0, torch.qint8), bytes(100)))
    for tensor, expected in tensors:
        with gpunvme.open(folder / "file", "w") as f:
            assert f.write_from(tensor).bytes == f.read_into(tensor).bytes == len(expected)
        assert (folder / "file").read_bytes() == expected


def test_plain_tensors_are_asked_in_c(stored, monkeypatch):
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this PyTorch has no exchange API")

    def asked(self):
        raise AssertionError("a tensor was asked in Python")

    path, values = stored(1000)
    tensors = [torch.zeros(1000, dtype=torch.uint8, device=DEVICE)]
    tensors.append(torch.nn.Parameter(torch.zeros_like(tensors[0]), requires_grad=False))
    with gpunvme.open(path) as f, monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "is_contiguous", asked)
        for tensor in tensors:
            f.read_into(tensor)
        with pytest.raises(AssertionError, match="in Python"):
            f.read_into(tensors[0].as_subclass(Subclass))
    assert all(numpy.array_equal(tensor.cpu().numpy(), values) for tensor in tensors)


def test_tensors_that_are_no_memory_are_refused_by_name(stored):
    """DLPack's C exchange API tells of some of them as of others."""
    zeros = torch.zeros(100, device=DEVICE)
    given_up, cut = zeros.clone()[10:], zeros.clone()
    given_up.untyped_storage().resize_(0)
    cut.untyped_storage().resize_(396)
    lies_nowhere = "Tensor on .* has no memory that can be reached"
    path, _ = stored(1000)

    def refuse(tensor, error, told):
        for call in (f.read_into, f.write_from, f.submit_read_into):
            with pytest.raises(error, match=told):
                call(tensor)
        return tensor

    with gpunvme.open(path, "r+") as f:
        refuse(zeros.to(torch.complex64).conj(), ValueError, "resolve_conj")
        refuse(torch._neg_view(zeros.bfloat16()), ValueError, "resolve_neg")
        refuse(zeros.reshape(20, 5).T, ValueError, r"shape \[5, 20\], strides \[1, 5\]")
        refuse(zeros[0].expand(5), ValueError, r"shape \[5\], strides \[0\]")
        for tensor in (given_up, cut, zeros.to("meta"), zeros.to("meta")[5:]):
            refuse(tensor, TypeError, lies_nowhere)
        refuse(zeros.reshape(10, 10).to_sparse(), ValueError, "layout torch.sparse_coo")
        refuse(zeros.reshape(10, 10).to_sparse_csr(), ValueError, "layout torch.sparse_csr")
        torch.vmap(lambda row: refuse(row, TypeError, lies_nowhere))(zeros.reshape(10, 10))


def test_a_read_into_a_tensor_is_a_change_in_place(stored):
    path, _ = stored(1000)
    weights = torch.ones(3, device=DEVICE, requires_grad=True)
    saved = torch.ones(3, device=DEVICE)
    product = (weights * saved).sum()
    with gpunvme.open(path, "r+") as f:
        f.write_from(saved)
        before = saved._version
        f.read_into(saved)
        assert saved._version > before
        with torch.inference_mode():
            untracked = torch.zeros(3, device=DEVICE)
        f.read_into(untracked)
    with pytest.raises(RuntimeError, match="inplace operation"):
        product.backward()


def test_a_tensor_that_gets_other_memory_in_flight_hurts_nothing(stored):
    path, _ = stored(64 << 20)
    with gpunvme.open(path) as f:
        for _ in range(5):
            tensor = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
            pending = f.submit_read_into(tensor)
            tensor.data = torch.zeros(1, dtype=torch.uint8, device=DEVICE)
            gc.collect()
            assert pending.result(60).bytes == 64 << 20
            assert not tensor.any()
