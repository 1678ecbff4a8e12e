"""The source of one transformer block, whole, so that a change of what is printed is reviewed.

`python tests/unit/codegen/test_codegen_golden.py` rewrites it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from autopar.compiler import PlanOptions, load_source, plan_source

GOLDEN = Path(__file__).parents[2] / "golden" / "llama_tiny_block.py.txt"
PINS = (("tensor", "2"), ("micro_batches", "2"), ("recompute", "none"))


def program():
    options = PlanOptions(global_batch=2, pins=PINS)
    return plan_source(load_source("llama_tiny"), "local:2@node=0.01", options).files()


@pytest.fixture(scope="module")
def files():
    return program()


def test_the_block_is_the_golden_text(files):
    text = f"run: python {Path(__file__).name}, and review"
    assert files["block_1.py"] == GOLDEN.read_text(), text


def test_every_file_parses_and_has_one_forward(files):
    for name, text in files.items():
        if name.startswith(("block_", "stage_")):
            functions = [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
            assert functions.count("forward") == 1, name


def test_every_collective_has_a_line_and_a_reason(files):
    lines = files["block_1.py"].splitlines()
    moves = [i for i, line in enumerate(lines) if "= comm." in line]
    assert len(moves) == 4
    assert all(
        lines[i - 1].strip().startswith("# ") and " on tensor: " in lines[i - 1] for i in moves
    )


def test_equal_blocks_share_a_file(files):
    assert sorted(name for name in files if name.startswith("block_")) == [
        "block_0.py",
        "block_1.py",
        "block_2.py",
    ]
    assert files["stage_0.py"].count("block_1.forward(") == 4


if __name__ == "__main__":
    GOLDEN.write_text(program()["block_1.py"])
