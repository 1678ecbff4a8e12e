"""What a command gives: a result on stdout, files where they are asked for."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import InputError
from autopar.plan.plan import Plan
from autopar.plan.serialize import write_plan


def write_found(options: Namespace, found: Plan) -> None:
    """Write a plan where asked, and say so; before it is printed, to a reader that may go."""
    if options.output:
        write_plan(found, options.output)
        print(f"autopar: wrote {options.output}", file=sys.stderr)


def check_file(path: str) -> None:
    """Raise InputError where a file cannot be written there, before work is spent on it."""
    target = Path(path)
    if target.is_dir():
        raise InputError(f"-o {path}: is a folder; give the name of a file")
    _check_parent(path)


def check_folder(path: str) -> None:
    """As `check_file`. A folder with other things in it than a program is not written into."""
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise InputError(f"-o {path}: is a file; give the name of a folder")
    if target.is_dir() and any(target.iterdir()) and not (target / "plan.json").exists():
        raise InputError(f"-o {path}: holds other files than a program; give a new folder")
    _check_parent(path)


def _check_parent(path: str) -> None:
    parent = Path(path).absolute().parent
    if not parent.is_dir():
        raise InputError(f"-o {path}: there is no folder {Path(path).parent}; make it first")
    if not os.access(parent, os.W_OK):
        raise InputError(f"-o {path}: the folder {Path(path).parent} cannot be written to")


def print_result(options: Namespace, data: Mapping[str, Any], text: str) -> None:
    """One JSON object if asked for, else text."""
    print(json.dumps(data, indent=1) if options.json else text)
