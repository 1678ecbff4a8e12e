"""Profiles as files: the database that was measured into, or JSON for other machines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.costs.profiles import LinkRecord, Machine, OpRecord, Profile
from autopar.errors import InputError, PlanMismatch
from autopar.ir.cluster import Cluster
from autopar.plan.codec import codec_of
from autopar.plan.serialize import write_text
from autopar.profiler.database import VERSION, Database, is_database, read_database

FORMAT = "autopar profile"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Records:
    """A profile as lists, in the order of their keys."""

    machine: Machine
    ops: tuple[OpRecord, ...]
    links: tuple[LinkRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Document:
    format: str
    version: int
    profiles: tuple[_Records, ...]


def to_json(profiles: Iterable[Profile]) -> str:
    """The JSON text: sorted, so that equal profiles are equal bytes."""
    records = tuple(
        _Records(
            machine=profile.machine,
            ops=tuple(record for _, record in sorted(profile.ops.items())),
            links=tuple(record for _, record in sorted(profile.links.items())),
        )
        for profile in sorted(profiles, key=lambda profile: profile.machine)
    )
    document = _Document(format=FORMAT, version=VERSION, profiles=records)
    return json.dumps(codec_of(_Document).encode(document, ""), indent=1) + "\n"


def from_json(text: str, where: str = "profile") -> tuple[Profile, ...]:
    """Inverse of `to_json`. Raises InputError naming the field that is wrong."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: is neither a profile database nor JSON ({error}); give another file"
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(f"{where}: is JSON, but no profile (format is not {FORMAT!r})")
    if data.get("version") != VERSION:
        raise InputError(
            f"{where}: is a profile of version {data.get('version')!r}, expected {VERSION}; "
            "profile again, or export it with this version"
        )
    try:
        document: _Document = codec_of(_Document).decode(data, "")
    except PlanMismatch as error:
        raise InputError(f"{where}: {error}; export the profile again") from None
    return tuple(
        Profile(
            machine=records.machine,
            ops={record.key: record for record in records.ops},
            links={record.key: record for record in records.links},
        )
        for records in document.profiles
    )


def read_profiles(path: Path | str) -> tuple[Profile, ...]:
    """The profiles in a database or a JSON file, one per machine.

    Raises InputError where the file is missing, something else, of another version, or broken.
    """
    if is_database(path):
        return read_database(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{path}: is neither a profile database nor JSON") from None
    return from_json(text, str(path))


def merge(profiles: Iterable[Profile]) -> tuple[Profile, ...]:
    """One profile per machine, with the records of all. Raises InputError where devices differ."""
    merged: dict[Machine, Profile] = {}
    for profile in profiles:
        known = next(iter(merged.values()), profile)
        if known.machine.device != profile.machine.device:
            raise InputError(
                f"profiles of different devices: {known.machine.device!r} and "
                f"{profile.machine.device!r}; times of one do not hold for the other, so keep them "
                "in separate files"
            )
        old = merged.get(profile.machine)
        merged[profile.machine] = profile if old is None else old.merged(profile)
    return tuple(merged[machine] for machine in sorted(merged))


def write_profiles(profiles: Iterable[Profile], path: Path | str) -> None:
    """Write JSON where the name ends in `.json`, else a database; an existing one is added to."""
    target = Path(path)
    if target.suffix == ".json":
        write_text(to_json(profiles), target)
        return
    for profile in profiles:
        with Database(target, profile.machine) as database:
            database.add(profile)


def profile_for(profiles: Iterable[Profile], cluster: Cluster, where: str) -> Profile:
    """The profile that times of the cluster are taken from: that of the newest torch and driver.

    Raises InputError where none is of the cluster's device, which is the slowest one where there
    are several kinds. On a CPU that more processes share than it has cores, ops are slower by that.
    """
    found = list(profiles)
    rows = {group.device.name for group in cluster.groups}
    fitting = [profile for profile in found if profile.machine.row in rows]
    if not fitting:
        held = ", ".join(sorted({f"{p.machine.row} ({p.machine.device})" for p in found}))
        raise InputError(
            f"{where}: holds times of {held or 'no device'}, the cluster {cluster.spec} has "
            f"{', '.join(sorted(rows))}; run 'autopar profile' on such a device"
        )
    newest = max(fitting, key=lambda p: (_natural(p.machine.torch), _natural(p.machine.driver)))
    cores = newest.machine.cores
    slowdown = max(1.0, cluster.num_devices / cores) if cores else 1.0
    return replace(newest, slowdown=slowdown)


def _natural(version: str) -> tuple[int, ...]:
    digits = "".join(c if c.isdigit() else " " for c in version)
    return tuple(map(int, digits.split()))
