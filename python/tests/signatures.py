"""Describes the interfaces that the package's adapters implement: from the packages that have them, without
importing anything.

usage: signatures.py [--check] PATH...

PATH is a wheel (``pip download --no-deps vllm``), or a folder with what was in one. Writes
``signatures/PACKAGE.json`` beside this file; with --check it says what is no longer so, and writes nothing.
"""

import ast
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("signatures")
#: Of each package, where in it the classes and functions are.
WANTED = {
    "fastsafetensors": {
        "copier/base.py": ["CopierInterface", "validated_byte_ranges"],
        "copier/registry.py": ["register_copier_constructor"],
    },
    "lmcache": {
        "v1/gpu_connector/gds_backends/base.py": ["GDSBackend", "GDSHandle", "Submission"],
        "v1/storage_backend/abstract_backend.py": ["StorageBackendInterface", "StoragePluginInterface"],
    },
    "torch": {
        "distributed/checkpoint/filesystem.py": ["FileSystemReader", "FileSystemWriter", "_FileSystemWriter"],
        "distributed/checkpoint/storage.py": ["StorageReader", "StorageWriter"],
    },
    "vllm": {
        "model_executor/model_loader/__init__.py": ["register_model_loader"],
        "model_executor/model_loader/base_loader.py": ["BaseModelLoader"],
        "model_executor/model_loader/default_loader.py": ["DefaultModelLoader"],
        "model_executor/model_loader/ep_weight_filter.py": ["should_skip_weight"],
        "model_executor/model_loader/weight_utils.py": ["safetensors_weights_iterator"],
    },
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters(function: Function) -> str:
    """The parameters of a function, with their names and kinds; a default is shown as ``...``."""
    arguments = function.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(...) for default in arguments.kw_defaults]
    return ast.unparse(arguments)


def signature(of: str) -> inspect.Signature:
    """The reverse of :func:`parameters`."""
    return inspect.signature(eval(f"lambda {of}: None"))


def methods(of: ast.ClassDef) -> Iterator[Function]:
    yield from (part for part in of.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))


def described(part: ast.stmt) -> Any:
    """A function as its parameters; a class with its bases, its methods, and which of them are abstract."""
    if not isinstance(part, ast.ClassDef):
        assert isinstance(part, Function)
        return parameters(part)
    found = [
        method for method in methods(part) if method.name == "__init__" or not method.name.startswith("__")
    ]
    return {
        "bases": [ast.unparse(base).split(".")[-1] for base in part.bases],
        "methods": {method.name: parameters(method) for method in found},
        "abstract": [
            method.name
            for method in found
            if any(ast.unparse(decorator).endswith("abstractmethod") for decorator in method.decorator_list)
        ],
    }


def package(path: Path) -> dict[str, Any]:
    """The description of the package that is in a wheel or a folder."""
    place = path if path.is_dir() else zipfile.Path(path)
    (meta,) = (entry for entry in place.iterdir() if entry.name.endswith(".dist-info"))
    name, version = re.findall(r"^(?:Name|Version): (.*)$", (meta / "METADATA").read_text(), re.MULTILINE)[:2]
    interfaces = {}
    for file, wanted in WANTED[name].items():
        for part in ast.parse((place / name / file).read_text()).body:
            if getattr(part, "name", None) in wanted:
                interfaces[part.name] = described(part)  # type: ignore[attr-defined]
    return {"package": name, "version": version, "interfaces": interfaces}


def main(check: bool, paths: list[Path]) -> int:
    differing = 0
    for path in paths:
        now = package(path)
        file = FOLDER / f"{now['package']}.json"
        if not check:
            file.write_text(json.dumps(now, indent=2) + "\n")
            continue
        known = json.loads(file.read_text())
        for name in known["interfaces"] | now["interfaces"]:
            if known["interfaces"].get(name) != now["interfaces"].get(name):
                differing += 1
                print(f"{now['package']} {now['version']}: {name} is not as in {known['version']}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv, [Path(path) for path in sys.argv[1:] if path != "--check"]))
