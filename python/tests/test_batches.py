"""How tensors become requests."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest

import gpunvme
from gpunvme._batches import BATCH, batches, perform


@dataclass
class Tensor:
    name: str
    is_cuda: bool


def test_a_request_has_tensors_of_gpus_or_of_the_host_of_one_file() -> None:
    first: Any = object()
    second: Any = object()
    items = [
        (first, Tensor("a", True), 0, 100),
        (first, Tensor("b", False), 100, 10),
        (first, Tensor("c", True), 110, 50),
        (first, Tensor("d", True), 160, BATCH),
        (second, Tensor("e", False), 0, 7),
    ]
    made = [(file, [tensor.name for tensor, _ in pairs], size) for file, pairs, size in batches(iter(items))]
    assert made == [
        (first, ["a", "c"], 150),
        (first, ["b"], 10),
        (first, ["d"], BATCH),
        (second, ["e"], 7),
    ]


def test_what_has_failed_is_over(folder: Path) -> None:
    """The memory of its other requests is the caller's again."""
    (folder / "short").write_bytes(bytes(100))
    (folder / "long").write_bytes(b"2" * (64 << 20))
    memory = numpy.zeros(64 << 20, "u1")
    with gpunvme.open(folder / "short") as short, gpunvme.open(folder / "long") as long:
        with pytest.raises(EOFError, match="ended 100 bytes too early"):
            perform([(short, numpy.zeros(200, "u1"), 0, 200), (long, memory, 0, memory.nbytes)])
        memory[:] = 1
        time.sleep(0.3)
        assert (memory == 1).all()


def test_arrays_of_gpus_go_with_one_another() -> None:
    class OfCuPy:
        __cuda_array_interface__ = None

    file: Any = object()
    items = [(file, OfCuPy(), 0, 1), (file, numpy.zeros(1), 1, 1), (file, OfCuPy(), 2, 1)]
    assert [size for _, _, size in batches(iter(items))] == [2, 1]


class Float8:
    """Looks as PyTorch 2.11's tensors of float8 on a GPU do: to look for the interface is an error."""

    is_cuda = True

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise KeyError("torch.float8_e4m3fn")


def test_a_data_type_that_the_array_interface_has_not_lies_on_its_gpu(folder: Path) -> None:
    with gpunvme.open(folder / "f", "w") as file:
        tensor, host = Float8(), bytearray(4)
        requests = list(batches([(file, tensor, 0, 4), (file, host, 4, 4)]))
    assert [(pairs, length) for _, pairs, length in requests] == [([(tensor, 0)], 4), ([(host, 4)], 4)]
