"""The package's adapters beside the interfaces of their hosts, as ``signatures`` describes them: neither is
imported, so that this is tested where the hosts are not installed."""

import ast
import importlib
import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import signatures

PACKAGE = Path(__file__).parents[1] / "gpunvme"
HOSTS = {file.stem: json.loads(file.read_text())["interfaces"] for file in signatures.FOLDER.glob("*.json")}

#: Adapter: its file, and the host with the class that it is derived from, or the function it stands in for.
ADAPTERS = {
    "Loader": ("vllm.py", "vllm", "DefaultModelLoader"),
    "weights": ("vllm.py", "vllm", "safetensors_weights_iterator"),
    "Backend": ("lmcache/gds_backends/gpunvme.py", "lmcache", "GDSBackend"),
    "Handle": ("lmcache/gds_backends/gpunvme.py", "lmcache", "GDSHandle"),
    "Request": ("lmcache/gds_backends/gpunvme.py", "lmcache", "Submission"),
    "Storage": ("lmcache/storage.py", "lmcache", "StoragePluginInterface"),
    "Copier": ("fastsafetensors.py", "fastsafetensors", "CopierInterface"),
    "Reader": ("checkpoint.py", "torch", "FileSystemReader"),
    "Writer": ("checkpoint.py", "torch", "FileSystemWriter"),
}
#: Functions of hosts that adapters call, with as many arguments.
CALLS = [
    ("vllm", "register_model_loader", 1),
    ("vllm", "should_skip_weight", 2),
    ("fastsafetensors", "validated_byte_ranges", 2),
    ("fastsafetensors", "register_copier_constructor", 2),
]
#: Parameters that are the adapter's own, by which programs make it; hosts do not.
MADE_BY_PROGRAMS = {"Reader", "Writer", "Copier", "Handle", "Request"}


def adapter(name: str) -> ast.stmt:
    tree = ast.parse((PACKAGE / ADAPTERS[name][0]).read_text())
    (found,) = (part for part in tree.body if getattr(part, "name", None) == name)
    return found


def inherited(host: dict[str, Any], name: str) -> dict[str, Any]:
    """All methods of a host's class and of its bases, and those that stay abstract."""
    if name not in host:
        return {"methods": {}, "abstract": set()}
    bases = [inherited(host, base) for base in host[name]["bases"]]
    own, abstract = host[name]["methods"], set(host[name]["abstract"])
    methods = {key: value for base in bases for key, value in base["methods"].items()} | own
    left = {key for base in bases for key in base["abstract"]} - set(own)
    return {"methods": methods, "abstract": left | abstract}


def lacks(ours: str, theirs: str) -> list[str]:
    """Why a function cannot be called as the host's."""
    mine, host = (list(signatures.signature(of).parameters.values()) for of in (ours, theirs))
    kinds = {parameter.kind for parameter in mine}
    complaints = []
    for at, parameter in enumerate(host):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            fits = parameter.kind in kinds
        elif parameter.kind == parameter.KEYWORD_ONLY:
            fits = parameter.VAR_KEYWORD in kinds or parameter.name in [one.name for one in mine]
        elif at < len(mine) and mine[at].kind == parameter.POSITIONAL_OR_KEYWORD:
            required = mine[at].default is inspect.Parameter.empty
            optional = parameter.default is not inspect.Parameter.empty
            fits = mine[at].name == parameter.name and not (required and optional)
        else:
            fits = {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD} <= kinds
        if not fits:
            complaints.append(f"the host's parameter {parameter} has no match")
    ordinary = [one for one in mine if one.default is one.empty and one.kind == one.POSITIONAL_OR_KEYWORD]
    known = {parameter.name for parameter in host}
    return complaints + [
        f"the parameter {one} is not the host's" for one in ordinary if one.name not in known
    ]


def differences(name: str, ours: ast.stmt, host: dict[str, Any]) -> list[str]:
    """What an adapter lacks of its host's interface."""
    theirs = ADAPTERS[name][2]
    if not isinstance(ours, ast.ClassDef):
        return [f"{name}: {why}" for why in lacks(signatures.parameters(ours), host[theirs])]
    interface = inherited(host, theirs)
    found = {method.name: signatures.parameters(method) for method in signatures.methods(ours)}
    # Names that a class gives to what it has.
    names = {target.id for part in ours.body if isinstance(part, ast.Assign) for target in part.targets}
    complaints = [f"{name}.{one} is missing" for one in sorted(interface["abstract"] - set(found) - names)]
    for method in found.keys() & interface["methods"].keys():
        if method != "__init__" or name not in MADE_BY_PROGRAMS:
            complaints += [
                f"{name}.{method}: {why}" for why in lacks(found[method], interface["methods"][method])
            ]
    return complaints


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_has_the_methods_and_parameters_of_its_host(name):
    _, host, theirs = ADAPTERS[name]
    ours = adapter(name)
    assert differences(name, ours, HOSTS[host]) == []
    if isinstance(ours, ast.ClassDef):
        assert [ast.unparse(base).split(".")[-1] for base in ours.bases] == [theirs]


def test_what_adapters_call_takes_as_much():
    for host, function, count in CALLS:
        signatures.signature(HOSTS[host][function]).bind(*range(count))


def test_methods_that_adapters_override_are_there():
    """Methods that would not be called if the host named them otherwise, though nothing asks for them."""
    expected = {
        "Loader": {"_get_weights_iterator"},
        "Copier": {"set_byte_ranges"},
        "Reader": {"read_data"},
        "Writer": {"write_data", "finish", "stage"},
        "Storage": {
            "batched_get_blocking",
            "batched_get_non_blocking",
            "batched_async_contains",
            "touch_cache",
        },
        "Request": {"bytes_done"},
    }
    for name, overridden in expected.items():
        _, host, theirs = ADAPTERS[name]
        ours = adapter(name)
        assert isinstance(ours, ast.ClassDef)
        assert overridden <= {method.name for method in signatures.methods(ours)}
        assert overridden <= inherited(HOSTS[host], theirs)["methods"].keys(), name


def test_what_is_missing_is_found():
    host = HOSTS["fastsafetensors"]
    whole = adapter("Copier")
    assert isinstance(whole, ast.ClassDef)
    without = ast.parse(ast.unparse(whole)).body[0]
    assert isinstance(without, ast.ClassDef)
    without.body = [part for part in without.body if getattr(part, "name", None) != "submit_io"]
    assert differences("Copier", without, host) == ["Copier.submit_io is missing"]
    for change, why in [
        (("noalign: bool=False, ", ""), "the host's parameter noalign"),
        (("use_buf_register: bool", "registered: bool"), "the host's parameter use_buf_register"),
        (("max_copy_block_size: int", "max_copy_block_size: int, more: int"), "the parameter more is not"),
    ]:
        text = ast.unparse(whole)
        assert change[0] in text
        changed = ast.parse(text.replace(*change)).body[0]
        assert any(why in complaint for complaint in differences("Copier", changed, host)), change


def test_the_copier_takes_the_place_of_those_that_a_program_names(monkeypatch):
    """With what the adapter imports of fastsafetensors."""
    registered: dict[str, Any] = {}

    def register(name: str, copier: type) -> Any:
        return lambda constructor: registered.setdefault(name, constructor)

    parts = {
        "": {},
        ".common": {"SafeTensorsMetadata": object},
        ".copier": {},
        ".copier.base": {"CopierInterface": object, "validated_byte_ranges": lambda metadata, ranges: ranges},
        ".copier.registry": {"register_copier_constructor": register},
        ".frameworks": {"FrameworkOpBase": object},
        ".st_types": {"Device": object, "DeviceType": object, "DType": type("DType", (), {"AUTO": 0})},
    }
    for name, content in parts.items():
        module = types.ModuleType(f"fastsafetensors{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "gpunvme.fastsafetensors", raising=False)
    adapter = importlib.import_module("gpunvme.fastsafetensors")
    assert registered.keys() == {"gpunvme"}
    adapter.stand_in("gds", "nogds")
    assert registered.keys() == {"gpunvme", "gds", "nogds"}
    assert all(
        constructor(device=None, max_threads=3) is adapter.Copier for constructor in registered.values()
    )
    monkeypatch.delitem(sys.modules, "gpunvme.fastsafetensors")
