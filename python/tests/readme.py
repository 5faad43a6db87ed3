"""Runs the README's programs that need no other package, in an environment that has none.

usage: readme.py MOUNT
"""

import re
import sys
from pathlib import Path

readme = (Path(__file__).parents[1] / "README.md").read_text()
programs = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
plain = [program for program in programs if "torch" not in program]
assert plain, "the README has no such program"
for program in plain:
    exec(compile(program.replace('"/data', f'"{sys.argv[1]}'), "the README", "exec"), {})
