"""The loader for vLLM: with vLLM where that is installed, and else with what it uses of it, by signature."""

import importlib.metadata
import os
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from safetensors.torch import save_file  # noqa: E402


def stand_in() -> dict[str, types.ModuleType]:
    """vLLM 0.33's loader of safetensors, as far as the other one builds on it."""
    names = ["vllm", "vllm.model_executor", "vllm.model_executor.model_loader"]
    names += [f"{names[-1]}.default_loader", f"{names[-1]}.ep_weight_filter"]
    modules = {name: types.ModuleType(name) for name in names}
    package, default_loader, experts = (modules[name] for name in names[2:])
    package.loaders = {}
    package.default_loader = default_loader

    def register_model_loader(load_format):
        return lambda loader: package.loaders.setdefault(load_format, loader)

    def stock(files, use_tqdm_on_load, strategy=None, local_expert_ids=None, *, threads=1, block=1):
        raise AssertionError("the stock loader reads")

    class DefaultModelLoader:
        def Source(path, revision, prefix=""):
            return types.SimpleNamespace(path=path, prefix=prefix)

        def __init__(self, load_config):
            self.load_config, self.local_expert_ids = load_config, None

        def _get_weights_iterator(self, source):
            assert self.load_config.load_format == "safetensors"
            files = [os.path.join(source.path, name) for name in os.listdir(source.path)]
            iterator = default_loader.safetensors_weights_iterator(
                files, False, None, local_expert_ids=self.local_expert_ids, threads=2, block=3
            )
            return ((source.prefix + name, tensor) for name, tensor in iterator)

    package.register_model_loader = register_model_loader
    default_loader.safetensors_weights_iterator = stock
    default_loader.DefaultModelLoader = DefaultModelLoader
    experts.should_skip_weight = lambda name, local: (
        "experts." in name and int(name.split(".")[3]) not in local
    )
    return modules


@pytest.fixture
def vllm(monkeypatch):
    try:
        import vllm.model_executor.model_loader.default_loader  # noqa: F401
    except ImportError:
        for name, module in stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "gpunvme.vllm", raising=False)
    import gpunvme.vllm

    yield gpunvme.vllm
    sys.modules.pop("gpunvme.vllm", None)


def test_weights_are_read_by_the_loader_and_the_stock_one_is_left_as_it_was(vllm, folder):
    shards = [
        {"embed": torch.randn(100, 64), "layers.0.experts.0.weight": torch.randn(64, 64)},
        {"layers.0.experts.1.weight": torch.randn(64, 64).bfloat16(), "head": torch.zeros(0, 3)},
    ]
    for at, shard in enumerate(shards):
        save_file(shard, folder / f"model-{at}.safetensors")
    everything = {name: tensor for shard in shards for name, tensor in shard.items()}

    from vllm.model_executor.model_loader import default_loader

    stock = default_loader.safetensors_weights_iterator
    try:
        from vllm.config import LoadConfig
    except ImportError:
        LoadConfig = types.SimpleNamespace
    config = LoadConfig(load_format="gpunvme")
    loader = vllm.Loader(config)
    assert config.load_format == "gpunvme"
    source = default_loader.DefaultModelLoader.Source(str(folder), None, prefix="model.")
    loaded = {name: tensor.cpu() for name, tensor in loader._get_weights_iterator(source)}
    assert default_loader.safetensors_weights_iterator is stock
    assert loaded.keys() == {f"model.{name}" for name in everything}
    assert all(torch.equal(loaded[f"model.{name}"], tensor) for name, tensor in everything.items())
    loader.local_expert_ids = {1}
    some = dict(loader._get_weights_iterator(source))
    assert some.keys() == {"model.embed", "model.layers.0.experts.1.weight", "model.head"}


def test_vllm_finds_the_loader_by_its_entry_point(vllm):
    vllm.register()
    vllm.register()
    from vllm.model_executor import model_loader

    known = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", None) or model_loader.loaders
    assert known["gpunvme"] is vllm.Loader
    try:
        found = importlib.metadata.distribution("gpunvme").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed as a wheel")
    assert [point.value for point in found if point.group == "vllm.general_plugins"] == [
        "gpunvme.vllm:register"
    ]
