"""What the command ``gpunvme doctor`` says, for programs."""

import json
import os
import shutil
import subprocess
from typing import Any

from gpunvme._types import AnyPath


def doctor(device: AnyPath | None = None, *, gpu: "int | str | None" = None) -> dict[str, Any]:
    """Which route this machine can take between an SSD and a GPU, and what would make it faster.

    It runs the command ``gpunvme doctor --json``, which has to be installed; its reference says what is
    in the answer.

    Args:
        device: an SSD, or with ``gpu`` a directory of a mount; without it all SSDs of this machine.
        gpu: the number or UUID of a GPU, to prove each route by taking it.

    Raises:
        FileNotFoundError: the command is not installed.
        RuntimeError: what it could not do.
    """
    command = shutil.which("gpunvme")
    if command is None:
        raise FileNotFoundError("the command gpunvme is not in PATH: install it (scripts/install)")
    arguments = [command, "--json", "doctor"]
    if gpu is not None:
        arguments += ["--gpu", str(gpu)]
    if device is not None:
        arguments.append(os.fsdecode(device))
    # The exit status tells the route; what counts is whether there is an answer.
    ran = subprocess.run(arguments, capture_output=True, text=True, check=False)
    try:
        answer = json.loads(ran.stdout)
    except json.JSONDecodeError:
        raise RuntimeError(ran.stderr.strip() or f"{command} said nothing") from None
    if not isinstance(answer, dict):
        raise RuntimeError(f"{command} said {answer!r}")
    return answer
