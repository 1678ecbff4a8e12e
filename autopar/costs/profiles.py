"""Measured op times: a table that goes before the analytic model, and its JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile

from autopar.costs.local_op import LocalOp
from autopar.errors import InputError

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Times measured on one kind of device: `LocalOp.key` to (forward_s, backward_s)."""

    device: str
    entries: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def lookup(self, op: LocalOp) -> tuple[float, float] | None:
        """(forward_s, backward_s) of exactly this op on exactly these shapes, or None."""
        return self.entries.get(op.key)

    def merged(self, other: Profile) -> Profile:
        """Both tables; `other` wins. Raises InputError if the devices differ."""
        if other.device != self.device:
            raise InputError(
                f"profiles of different devices: {self.device} and {other.device}; "
                "profile both op sets on one device"
            )
        return Profile(device=self.device, entries={**self.entries, **other.entries})

    def to_json(self) -> str:
        """The file's text: sorted, so that equal profiles are equal bytes."""
        entries = {key: list(times) for key, times in sorted(self.entries.items())}
        document = {"version": VERSION, "device": self.device, "entries": entries}
        return json.dumps(document, indent=1) + "\n"


def parse_profile(text: str, *, where: str = "profile") -> Profile:
    """Inverse of `Profile.to_json`. Raises InputError naming the field that is wrong."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error}); profile the device again") from error
    if not isinstance(document, dict) or document.get("version") != VERSION:
        found = document.get("version") if isinstance(document, dict) else type(document).__name__
        raise InputError(
            f"{where}: field version: expected {VERSION}, found {found}; profile the device again"
        )
    device, entries = document.get("device"), document.get("entries")
    if not isinstance(device, str) or not isinstance(entries, dict):
        raise InputError(f"{where}: fields device (text) and entries (object) are needed")
    return Profile(
        device=device, entries={key: _times(value, key, where) for key, value in entries.items()}
    )


def _times(value: object, key: str, where: str) -> tuple[float, float]:
    match value:
        case [int() | float() as forward_s, int() | float() as backward_s]:
            return float(forward_s), float(backward_s)
    raise InputError(f"{where}: entry {key!r}: expected [forward_s, backward_s], found {value!r}")


def save_profile(profile: Profile, path: Path) -> None:
    """Write the file in one step: a reader sees the old one or the new one, never a part."""
    with NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        file.write(profile.to_json())
    os.replace(file.name, path)


def load_profile(path: Path) -> Profile:
    """Read a file of `save_profile`. Raises InputError on a missing or malformed file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_profile(text, where=str(path))
