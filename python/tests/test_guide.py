"""The programs of the guide and the package's README, as they stand there."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs/guide/python.md", ROOT / "python/README.md"]


def programs():
    """What begins with an import is a program of its own."""
    for page in PAGES:
        for at, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            if code.startswith(("import ", "from ")):
                yield pytest.param(code, id=f"{page.name}-{at}")


@pytest.mark.parametrize("code", list(programs()))
def test_a_program_of_the_guide_runs(code, folder):
    from safetensors.torch import save_file

    (folder / "model.bin").write_bytes(bytes(4 << 20))
    save_file({"layers.0.weight": torch.ones(64, 4096)}, folder / "model.safetensors")
    code = code.replace('"/data', f'"{folder}')
    if not torch.cuda.is_available():
        code = re.sub(r'"cuda(:0)?"', '"cpu"', code)
    exec(compile(code, "the guide", "exec"), {"__name__": "__main__"})
