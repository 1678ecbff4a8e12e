"""What searches found, kept on disk: solved blocks, and whole plans.

A file per entry, named by a digest of everything that the entry depends on, among it the code and
the libraries that found it. So an entry is right for as long as it is found; nothing is ever
changed, and a folder may be shared by any number of processes. A file that is cut short or altered
does not have the digest that it begins with, and is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from autopar.errors import InputError
from autopar.plan.serialize import write_text

LIMIT_BYTES = 128 * 2**20
"""Room that a folder takes; what was used the longest time ago goes first."""

_BLOCK_BYTES = 4096
_LIBRARIES = ("numpy", "pulp", "highspy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """Entries in a folder that one version of the code has found."""

    folder: Path
    version: str

    @staticmethod
    def at(folder: Path | str) -> Store:
        """The entries of the code that runs. The folder is made when there is one to keep."""
        return Store(folder=Path(folder), version=_version())

    def read(self, digest: str) -> Any:
        """An entry as it was written, or None."""
        path = self._path(digest)
        try:
            checked, text = path.read_text(encoding="utf-8").split("\n", 1)
            if checked != _check(path.name, text):
                return None
            entry = json.loads(text)
        except (OSError, ValueError):
            return None
        with suppress(OSError):  # others' folder: it cannot tell what was used last
            path.touch()
        return entry

    def write(self, digest: str, entry: Any) -> None:
        """Keep an entry, if the folder can be written: strings, numbers, lists and dicts."""
        path, text = self._path(digest), json.dumps(entry)
        with suppress(OSError, InputError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(f"{_check(path.name, text)}\n{text}", path)

    def trim(self, limit_bytes: int = LIMIT_BYTES) -> None:
        """Remove what was used the longest time ago, until the rest has room."""
        found = []
        for path in self.folder.glob("??/*"):
            with suppress(OSError):  # another process removes some too
                stat = path.stat()
                found.append((stat.st_mtime_ns, path, -(-stat.st_size // _BLOCK_BYTES)))
        taken = sum(blocks for _, _, blocks in found)
        for _, path, blocks in sorted(found):
            if taken * _BLOCK_BYTES <= limit_bytes:
                return
            with suppress(OSError):
                path.unlink()
            taken -= blocks

    def _path(self, digest: str) -> Path:
        name = hashlib.blake2b(f"{self.version} {digest}".encode(), digest_size=20).hexdigest()
        return self.folder / name[:2] / name


def _check(name: str, text: str) -> str:
    return hashlib.blake2b(f"{name}\n{text}".encode(), digest_size=20).hexdigest()


def _version() -> str:
    """A digest of the code that searches, and of what it is run by."""
    hashed = hashlib.blake2b(digest_size=20)
    root = Path(__file__).parents[2]
    for package in ("autopar", "solvers"):
        for path in sorted((root / package).rglob("*.py")):
            hashed.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    for library in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            hashed.update(f"{library} {metadata.version(library)} ".encode())
    hashed.update(f"{sys.version} {platform.platform()} {platform.machine()}".encode())
    return hashed.hexdigest()
