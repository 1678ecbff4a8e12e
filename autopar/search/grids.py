"""The grids of the outer search: every way to lay degrees and micro-batches on the devices."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod

from autopar.errors import InputError
from autopar.search.pins import Pins
from autopar.search.pricer import Grid
from autopar.search.setting import Setting

WIDEST_TENSOR = 8


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def widest_tensor(setting: Setting) -> int:
    """Largest tensor degree searched unless pinned: the fastest links' domain, at least 8."""
    return max(setting.cluster.links[0].span, WIDEST_TENSOR)


def space_text(setting: Setting) -> str:
    """The declared space in words."""
    return (
        f"pipeline x data x tensor over all {setting.cluster.num_devices} devices, tensor up to "
        f"{widest_tensor(setting)}; micro-batches of 1, 2, 4, ... samples a data rank, "
        "up to all of them; stages of any consecutive blocks; per op any placement its rules "
        "allow on the tensor axis; per block no recompute or all; schedule 1f1b (others where "
        "pinned)"
    )


def micro_batch_sizes(setting: Setting, data: int) -> Iterator[tuple[int, int]]:
    """(samples per data rank, number of micro-batches) to try."""
    pins, batch = setting.pins, setting.global_batch
    if setting.batch.coupled:
        if data == 1 and pins.micro_batches in (None, 1) and pins.micro_batch in (None, batch):
            yield batch, 1
        return
    if pins.micro_batches is not None:
        whole = ceil(batch / pins.micro_batches)
        size = ceil(whole / data)
        if pins.micro_batch in (None, size):
            yield size, pins.micro_batches
        return
    most = ceil(batch / data)
    powers = {2**k for k in range(most.bit_length())}
    sizes = {pins.micro_batch} if pins.micro_batch else powers | {most}
    for size in sorted(size for size in sizes if size <= most):
        yield size, ceil(batch / (size * data))


def grids(setting: Setting) -> tuple[Grid, ...]:
    """All grids that the pins allow. Raises InputError where they allow none, saying why."""
    pins, devices = setting.pins, setting.cluster.num_devices
    blocks = len(setting.chain.blocks)
    found = []
    for pipeline in divisors(devices):
        if pins.pipeline not in (None, pipeline) or pipeline > blocks:
            continue
        for tensor in divisors(devices // pipeline):
            if pins.tensor not in (None, tensor):
                continue
            if pins.tensor is None and tensor > widest_tensor(setting):
                continue
            data = devices // pipeline // tensor
            if pins.data not in (None, data) or data > setting.global_batch:
                continue
            found += [
                Grid(
                    pipeline=pipeline,
                    data=data,
                    tensor=tensor,
                    micro_batch=size,
                    micro_batches=count,
                    schedule=pins.schedule or "1f1b",
                )
                for size, count in micro_batch_sizes(setting, data)
            ]
    if not found:
        raise InputError(_no_grid(setting))
    return tuple(found)


def _no_grid(setting: Setting) -> str:
    pins, devices = setting.pins, setting.cluster.num_devices
    fixed = ", ".join(f"{key}={value}" for key, value in pins.items()) or "no pins"
    blocks = len(setting.chain.blocks)
    reasons = _indivisible(pins, devices)
    if pins.pipeline is not None and pins.pipeline > blocks:
        reasons.append(
            f"pipeline={pins.pipeline} is more than the {blocks} blocks that the model can be cut "
            "into"
        )
    if pins.data is not None and pins.data > setting.global_batch:
        reasons.append(f"data={pins.data} exceeds the global batch {setting.global_batch}")
    if setting.batch.coupled:
        node, why = setting.batch.coupled[0]
        reasons.append(f"the batch cannot be split: {node}: {why}")
    if not reasons:
        reasons.append(
            f"every data degree left exceeds the global batch {setting.global_batch}, or no "
            "micro-batch size is left"
        )
    return f"no grid of {devices} devices satisfies {fixed}: " + "; ".join(reasons)


def _indivisible(pins: Pins, devices: int) -> list[str]:
    """How the pinned degrees fail to divide the devices."""
    degrees = {n: getattr(pins, n) for n in ("pipeline", "data", "tensor") if getattr(pins, n)}
    single = [
        f"{name}={degree} does not divide {devices} devices"
        for name, degree in degrees.items()
        if devices % degree
    ]
    if single:
        return [*single, f"degrees that do: {', '.join(map(str, divisors(devices)))}"]
    whole = prod(degrees.values())
    if devices % whole or (len(degrees) == 3 and whole != devices):
        text = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        return [f"{text} = {whole} devices, the cluster has {devices}"]
    return []
