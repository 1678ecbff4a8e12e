"""Who may import what, where torch and the environment may be touched, and how long a file may be.

The imports are read from the source, so that one inside a function counts as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for package in ("autopar", "solvers", "model_zoo")
    for path in (ROOT / package).rglob("*.py")
)
LONGEST_FILE = 450

NOUNS = {"ir", "errors"}
"""What every part of autopar may import."""

MAY_IMPORT = {
    "ir": set(),
    "errors": set(),
    "collecting": set(),
    "threads": set(),
    "progress": set(),
    "arguments": set(),
    "outputs": NOUNS | {"plan"},
    "capture": NOUNS,
    "rules": NOUNS,
    "costs": NOUNS,
    "schedules": NOUNS,
    "plan": NOUNS | {"schedules"},
    "report": NOUNS | {"plan", "schedules"},
    "search": NOUNS | {"collecting", "costs", "plan", "rules", "schedules", "threads"},
    # the kernel of a strategy is found again in the rules; the list of collectives has the weights
    # that a backward reads, which the saved activations are priced from
    "codegen": NOUNS | {"costs", "plan", "rules"},
    # a program brings its plan; the executor runs the plan's own action lists
    "runtime": NOUNS | {"plan", "schedules"},
    "sources": NOUNS,
    # measures the ops that the search prices, as capture says what they mean, and the collectives
    # that the runtime runs; profiles are written as plans are
    "profiler": NOUNS | {"capture", "costs", "plan", "runtime", "search"},
}
"""Parts of autopar, and the parts they may import besides themselves. Those that are not named here
are the edge: they call the stages."""

EDGE = {
    *("__init__", "__main__", "api", "cli", "commands"),
    *("compiler", "devices", "jobs", "local", "pinning", "profiling", "questions", "requests"),
}
COMMAND_LINE = {"__init__", "__main__", "cli", "commands", "requests"}
TORCH_PARTS = {"capture", "runtime", "sources"} | EDGE - COMMAND_LINE
TORCH_FILES = {
    "autopar/costs/measure.py",
    # these run ops and collectives; files and database of the profiler are read without torch
    *(
        f"autopar/profiler/{name}.py"
        for name in (
            "arguments",
            "between",
            "links",
            "optimizers",
            "ranks",
            "run",
            "timing",
        )
    ),
}

ENVIRONMENT = {
    "autopar/cli.py",
    "autopar/devices.py",
    "autopar/runtime/launch.py",
    "autopar/runtime/worker.py",
}

FOREIGN = {
    # a solver must be usable without torch; a model knows nothing of what shards it
    "solvers": {"autopar", "model_zoo", "torch", "transformers"},
    "model_zoo": {"autopar", "solvers"},
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    """`autopar/search/planner.py` is of `search`, `autopar/api.py` of `api`."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if len(parts) > 2 else path.stem


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of everything a file imports; `from . import x` is not used here."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if node.module == "autopar" else node.module


def imported_part(module: str) -> str:
    return module.split(".")[1] if module.startswith("autopar.") else ""


def test_every_part_has_a_rule():
    parts = {part_of(path) for path in FILES if path.is_relative_to(ROOT / "autopar")}
    assert parts == set(MAY_IMPORT) | EDGE


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_imports_go_one_way(part):
    allowed = MAY_IMPORT[part] | {part}
    wrong = [
        f"{name_of(path)}:{line}: imports {module}"
        for path in FILES
        if path.is_relative_to(ROOT / "autopar") and part_of(path) == part
        for line, module in imports(path)
        if module.split(".")[0] == "autopar" and imported_part(module) not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("package", sorted(FOREIGN))
def test_the_packages_outside_stand_alone(package):
    wrong = [
        f"{name_of(path)}:{line}: imports {module}"
        for path in FILES
        if path.is_relative_to(ROOT / package)
        for line, module in imports(path)
        if module.split(".")[0] in FOREIGN[package]
    ]
    assert wrong == []


def test_only_search_imports_solvers():
    importers = {
        part_of(path)
        for path in FILES
        if path.is_relative_to(ROOT / "autopar")
        for _, module in imports(path)
        if module.split(".")[0] in {"solvers", "pulp", "highspy"}
    }
    assert importers == {"search"}


def test_only_the_edge_knows_the_zoo():
    importers = {
        part_of(path)
        for path in FILES
        if path.is_relative_to(ROOT / "autopar")
        for _, module in imports(path)
        if module.split(".")[0] == "model_zoo"
    }
    assert importers <= {"commands", "sources"}


def test_torch_is_confined():
    wrong = [
        f"{name_of(path)}:{line}: imports {module}"
        for path in FILES
        if path.is_relative_to(ROOT / "autopar")
        and part_of(path) not in TORCH_PARTS
        and name_of(path) not in TORCH_FILES
        for line, module in imports(path)
        if module.split(".")[0] == "torch"
    ]
    assert wrong == []


def environment_reads(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}:
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in {"environ", "getenv"})


def test_the_environment_is_read_at_the_edge_only():
    wrong = [
        f"{name_of(path)}:{line}"
        for path in FILES
        if name_of(path) not in ENVIRONMENT
        for line in environment_reads(path)
    ]
    assert wrong == []


def test_files_are_short():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_no_file_hides_a_module_of_the_standard_library():
    names = {path.stem for path in FILES if not path.stem.startswith("__")}
    assert names & set(sys.stdlib_module_names) == set()
