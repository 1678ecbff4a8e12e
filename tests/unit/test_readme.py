"""What the README names is there: files, commands, public names, rules of the API example."""

from __future__ import annotations

import re
from pathlib import Path

import autopar
from autopar.cli import COMMANDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_every_file_it_names_is_there():
    named = re.findall(r"`((?:autopar|solvers|model_zoo|benchmarks)/[\w/.]*)`", TEXT)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_command_is_in_the_table():
    table = TEXT.split("## Command line")[1].split("##")[0]
    assert set(re.findall(r"`autopar ([\w-]+)", table)) == set(COMMANDS)


def test_every_public_name_it_uses_is_there():
    named = set(re.findall(r"\bautopar\.(\w+)\(", TEXT))
    assert {"parallelize", "measured_cluster", "launch"} <= named
    assert named <= set(autopar.__all__)


def test_its_python_is_python():
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        compile(block, "README.md", "exec")
