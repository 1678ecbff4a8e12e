"""A plan as JSON text and as a file.

The text is a function of the plan alone: keys in the order of the fields, floats rounded to
`codec.DIGITS` significant digits, ASCII, no dates and no paths. Whatever fits a line stands on one;
longer lists of numbers or texts are filled into lines. Reading runs no code of the file's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from autopar.errors import InputError, PlanMismatch
from autopar.plan.codec import codec_of, mismatch, show
from autopar.plan.plan import PLAN_VERSION, Plan

_WIDTH = 140


def to_json(plan: Plan) -> str:
    """The plan as JSON text. Raises PlanMismatch on a number that is not finite."""
    return _render(codec_of(Plan).encode(plan, ""), 0, 0) + "\n"


def from_json(text: str) -> Plan:
    """Inverse of `to_json`, up to the rounding of floats.

    Raises PlanMismatch that names the line of broken JSON, or the JSON path of the first value that
    is unknown, missing or of the wrong kind. Whether the values agree with each other is the matter
    of `check_plan`.
    """
    data = _parse(text)
    if not isinstance(data, dict):
        raise mismatch("", "an object (Plan)", data)
    version = data.get("version")
    if type(version) is not int or version != PLAN_VERSION:
        found = show(version) if "version" in data else "none"
        raise PlanMismatch(
            f"version: expected {PLAN_VERSION}, found {found}; this autopar reads plans of version "
            f"{PLAN_VERSION}, so make the plan again with it"
        )
    plan: Plan = codec_of(Plan).decode(data, "")
    return plan


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file. Raises InputError where it cannot be read, PlanMismatch as `from_json`.

    Both name the file.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot read {os.fspath(path)}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanMismatch(
            f"{os.fspath(path)}: not a plan: byte {error.start} is not UTF-8 text"
        ) from None
    try:
        return from_json(text)
    except PlanMismatch as error:
        raise PlanMismatch(f"{os.fspath(path)}: {error}") from None


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan to a file, never seen half-written. Raises InputError where it cannot."""
    write_text(to_json(plan), path)


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write a file through a temporary one in the same folder, so that readers see all or nothing.

    Raises InputError where the folder cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(temporary, target)
    except OSError as error:
        raise InputError(f"cannot write {os.fspath(path)}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise PlanMismatch(f"broken JSON at {where}: {error.msg}") from None
    except RecursionError:
        raise PlanMismatch("broken JSON: nested too deeply for a plan") from None
    except ValueError as error:
        raise PlanMismatch(f"broken JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise PlanMismatch(f"broken JSON: an object has the key {show(key)} twice")
        result[key] = value
    return result


def _no_constant(name: str) -> NoReturn:
    raise PlanMismatch(f"broken JSON: {name} is no JSON number")


def _render(data: Any, depth: int, used: int) -> str:
    """JSON text at indent `depth`, on a line of which `used` columns are taken."""
    line = json.dumps(data)
    if not isinstance(data, dict | list) or not data or used + len(line) < _WIDTH:
        return line
    indent = " " * (depth + 1)
    if isinstance(data, dict):
        keys = [f"{indent}{json.dumps(key)}: " for key in data]
        items = [
            key + _render(value, depth + 1, len(key))
            for key, value in zip(keys, data.values(), strict=True)
        ]
        return "{\n" + ",\n".join(items) + f"\n{' ' * depth}}}"
    if any(isinstance(item, dict | list) for item in data):
        body = ",\n".join(indent + _render(item, depth + 1, depth + 1) for item in data)
    else:
        body = _fill([json.dumps(item) for item in data], indent)
    return f"[\n{body}\n{' ' * depth}]"


def _fill(items: list[str], indent: str) -> str:
    """Items with commas, as many on each line as fit."""
    lines, current = [], indent + items[0]
    for item in items[1:]:
        if len(current) + len(item) + 3 > _WIDTH:
            lines.append(current + ",")
            current = indent + item
        else:
            current += f", {item}"
    return "\n".join([*lines, current])
