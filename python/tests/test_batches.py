"""How tensors become requests."""

from dataclasses import dataclass
from typing import Any

from gpunvme._batches import BATCH, batches


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
