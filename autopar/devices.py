"""The devices at hand: this machine's CPU as measured, and what `auto` stands for.

A measurement is kept in the user's cache folder, so that plans for this machine stay the same from
one run to the next. It holds for one processor, torch and number of processes; delete the file to
measure again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from autopar.costs.clusters import parse_cluster
from autopar.costs.hardware import DEVICES
from autopar.costs.profiles import Machine
from autopar.errors import InputError, PlanMismatch
from autopar.ir.cluster import Cluster, DeviceSpec
from autopar.plan.codec import codec_of
from autopar.plan.serialize import write_text

Progress = Callable[[str, float | None], None]

_FORMAT = 1
_DEVICE = codec_of(DeviceSpec)
_TABLE_CPU = DEVICES["cpu"].device


def _quiet(what: str, done: float | None) -> None:
    """Progress that nobody watches."""


def measured_cluster(
    spec: str, *, cache: Path | str | None = None, progress: Progress = _quiet
) -> Cluster:
    """The cluster of `spec`, its local CPU processes with rates measured on this machine.

    `local:N` and a file that says the same are measured, once and in about a second, and kept in
    the folder `cache`, by default the user's own. Memory is an even share of this machine's unless
    a file gives it. `auto` is this machine. Other clusters are as `parse_cluster` has them.
    Raises InputError as `parse_cluster` does.
    """
    cluster = parse_cluster(resolve(spec))
    group = cluster.groups[0]
    if len(cluster.groups) > 1 or group.nodes > 1 or group.device.kind != "cpu":
        return cluster
    folder = _cache_folder() if cache is None else Path(cache)
    device = _measured_device(group.num_devices, folder, progress)
    if group.device.memory_bytes != _TABLE_CPU.memory_bytes:
        device = replace(device, memory_bytes=group.device.memory_bytes)
    shared = replace(group, device=device, cores=os.cpu_count() or 1)
    return replace(cluster, groups=(shared,))


def resolve(spec: str) -> str:
    """A cluster spec with `auto` replaced by this machine's GPUs, or its cores where it has none.

    Raises InputError for GPUs that the table of devices does not have.
    """
    if spec.strip() != "auto":
        return spec
    import torch

    if not torch.cuda.is_available():
        return f"local:{os.cpu_count() or 1}"
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    row = _table_name(torch.cuda.get_device_name(0), memory_bytes)
    return f"{torch.cuda.device_count()}:{row}"


def _table_name(name: str, memory_bytes: int) -> str:
    """The row of the table for a device that calls itself `name`, the nearest in memory."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    words += [left + right for left, right in pairwise(words)]
    rows = [row.device for row in DEVICES.values() if row.device.kind == "cuda"]
    alike = [
        device
        for device in rows
        if device.name.split("-")[0] in words and ("pcie" in device.name) == ("pcie" in words)
    ]
    if not alike:
        raise InputError(
            f"cluster auto: this machine has {name}, which the table of devices does not have; "
            f"name the nearest of {', '.join(device.name for device in rows)}, as in 8:h100-sxm"
        )
    return min(alike, key=lambda device: abs(device.memory_bytes - memory_bytes)).name


def this_machine() -> Machine:
    """The device at hand and what its times depend on: a GPU, or the CPU where there is none.

    Raises InputError for a GPU that the table of devices does not have.
    """
    import torch

    version = torch.__version__
    if not torch.cuda.is_available():
        cores = os.cpu_count() or 1
        return Machine(
            device=_processor(), row="cpu", kind="cpu", driver="", torch=version, cores=cores
        )
    name = torch.cuda.get_device_name()
    memory_bytes = torch.cuda.get_device_properties().total_memory
    return Machine(
        device=name,
        row=_table_name(name, memory_bytes),
        kind="cuda",
        driver=f"{_nvidia_driver()}, CUDA {torch.version.cuda}",
        torch=version,
    )


def profile_path() -> Path:
    """The database of measurements that runs and models share."""
    return _cache_folder() / "profile.sqlite"


def plans_folder() -> Path:
    """The folder of what searches found."""
    return _cache_folder() / "plans"


def _nvidia_driver() -> str:
    """Version of the kernel's driver, where Linux tells."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "driver unknown"
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)
    return f"driver {found[1]}" if found else "driver unknown"


def _cache_folder() -> Path:
    """`$XDG_CACHE_HOME/autopar`, or `~/.cache/autopar` where that is not set to a full path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "autopar"


def _measured_device(workers: int, folder: Path, progress: Progress) -> DeviceSpec:
    key = _key(workers)
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    path = folder / f"cpu-{digest[:16]}.json"
    found = _read(path, key)
    if found is not None:
        return found
    from autopar.costs.measure import measure_device

    progress("measuring this machine", None)
    device = _DEVICE.encode(measure_device(workers=workers), "device")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(json.dumps({"key": key, "device": device}, indent=1) + "\n", path)
    except (OSError, InputError):
        pass  # where nothing can be kept, the next run measures again
    # as a later run reads it, digits included
    spec: DeviceSpec = _DEVICE.decode(device, "device")
    return spec


def _key(workers: int) -> dict[str, Any]:
    """What a measurement holds for."""
    return {
        "format": _FORMAT,
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "torch": metadata.version("torch"),
        "workers": workers,
    }


def _processor() -> str:
    """Model of the processor: Linux tells, elsewhere what Python knows of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _read(path: Path, key: Mapping[str, Any]) -> DeviceSpec | None:
    """A kept measurement; None where there is none, or it is broken or of something else."""
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict) or data.get("key") != key:
            return None
        device: DeviceSpec = _DEVICE.decode(data.get("device"), "device")
    except (OSError, ValueError, RecursionError, PlanMismatch):
        return None
    return device if _sound(device) else None


def _sound(device: DeviceSpec) -> bool:
    rates = dict(device.peak_flops).values()
    figures = (device.memory_bytes, device.memory_bandwidth_bytes_s, device.matmul_efficiency)
    return bool(rates) and all(isfinite(figure) and figure > 0 for figure in (*figures, *rates))
