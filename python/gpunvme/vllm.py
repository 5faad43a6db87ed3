"""A loader for vLLM, which finds it by itself where both packages are installed:

    vllm serve /data/model --load-format gpunvme

Weights are read from the model's safetensors files straight into GPU memory, some at a time. Which files and
which weights those are, vLLM's own loader decides. They must lie on a mount of gpunvme.
"""

import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader import default_loader, register_model_loader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from gpunvme.safetensors import iter_tensors, safe_open

__all__ = ["Loader", "register", "weights"]


class Loader(default_loader.DefaultModelLoader):  # type: ignore[misc]
    """vLLM's loader of safetensors, with another way of reading them."""

    def __init__(self, load_config: Any) -> None:
        as_safetensors = copy.copy(load_config)
        as_safetensors.load_format = "safetensors"
        super().__init__(as_safetensors)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        # The stock loader has no other place where one could step in: it takes this function from its
        # module, after it has found the files and before it names the weights.
        stock = default_loader.safetensors_weights_iterator
        default_loader.safetensors_weights_iterator = weights
        try:
            iterator: Iterator[tuple[str, torch.Tensor]] = super()._get_weights_iterator(source)
        finally:
            default_loader.safetensors_weights_iterator = stock
        return iterator


def weights(
    hf_weights_files: list[str],
    use_tqdm_on_load: bool,
    safetensors_load_strategy: str | None = None,
    local_expert_ids: set[int] | None = None,
    **_: Any,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights in files, in the place of vLLM's ``safetensors_weights_iterator``.

    Args:
        hf_weights_files: files of safetensors.
        use_tqdm_on_load: whether bars show how far it is.
        safetensors_load_strategy: how vLLM would bring files into the page cache, which is not used.
        local_expert_ids: the experts of this rank, others being left out; or all.
    """
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    for file in sorted(hf_weights_files):
        names = None
        if local_expert_ids is not None:
            with safe_open(file) as opened:
                found = opened.keys()
            names = [name for name in found if not should_skip_weight(name, local_expert_ids)]
        yield from iter_tensors(file, device, names=names, progress=None if use_tqdm_on_load else False)


def register() -> None:
    """Makes ``gpunvme`` a load format; with ``GPUNVME_FASTSAFETENSORS=1`` in the environment the load format
    ``fastsafetensors`` reads by gpunvme too. vLLM calls it in each of its processes."""
    register_model_loader("gpunvme")(Loader)
    if os.environ.get("GPUNVME_FASTSAFETENSORS") == "1":
        from gpunvme.fastsafetensors import stand_in

        # Those that vLLM has fastsafetensors choose from.
        stand_in("gds", "nogds", "unified")
