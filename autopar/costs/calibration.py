"""Constants of the cost model that are fitted to published training runs, by device.

They stand in `calibration.json` beside this file, which `benchmarks/calibrate.py` writes, with what
they were fitted on and how far off they are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from autopar.errors import InputError
from autopar.ir.cluster import DeviceSpec

PATH = Path(__file__).with_name("calibration.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class EfficiencyCurve:
    """What a device reaches of its figures in training.

    A dim of `half_dim` halves a matrix product's efficiency; `ramp_s` is the time a kernel needs to
    fill and drain the device; `sustained` is the share of the best measured matrix product that
    lasts; `memory` the share of the bandwidth, and `attention` of the peak, that kernels and fused
    attention reach; `hidden` the share of communication beside compute that costs no time; `narrow`
    what products of 8 bits reach of their peak, next to those of 16.
    """

    half_dim: float
    ramp_s: float
    memory: float
    sustained: float = 1.0
    attention: float = 0.6
    hidden: float = 1.0
    narrow: float = 1.0


CHIPS: Mapping[str, str] = {
    "a100-40gb": "a100-80gb",
    "a100-pcie-80gb": "a100-80gb",
    "h200-sxm": "h100-sxm",
    "h800-sxm": "h100-sxm",
    "v100-32gb": "v100-16gb",
}
"""Devices with the chip of another, which they share constants with: their memory differs, their
links and their clocks, and those are figures of their own."""

CURVES: dict[str, EfficiencyCurve] = {
    "cuda": EfficiencyCurve(half_dim=128.0, ramp_s=2e-6, memory=0.8),
    "cpu": EfficiencyCurve(half_dim=32.0, ramp_s=1e-6, memory=1.0),
}
"""By `DeviceSpec.kind`, for devices that are not calibrated; other kinds are taken like `cuda`.

Set by eye to published cuBLAS sweeps (a third of the peak at 1024-cubes and more than half at
2048-cubes on H100-class devices) and to FlashAttention's figures (0.5 to 0.73 on A100, Dao 2023,
figure 4; 0.35 to 0.75 on H100, Shah et al. 2024, figure 5). A CPU's bandwidth is measured, and so
has its efficiency in it."""

MEASURED: Mapping[str, EfficiencyCurve] = {
    "h100-sxm": EfficiencyCurve(half_dim=128.0, ramp_s=2e-6, memory=0.8, attention=0.5),
}
"""By chip, where kernels of it were measured at other than that: cuDNN's causal attention on H100
reaches 0.49 to 0.55 of the peak forward for heads of 128, and less backward (Shah et al. 2024,
figures 5 and 6)."""


def kernels_of(device: DeviceSpec) -> EfficiencyCurve:
    """What kernels of a device were measured at, nothing fitted to training runs."""
    chip = CHIPS.get(device.name, device.name)
    return MEASURED.get(chip) or CURVES.get(device.kind, CURVES["cuda"])


def parse_calibration(text: str, *, where: str = "calibration") -> Mapping[str, EfficiencyCurve]:
    """The curves of a file, by device. Raises InputError naming the field that is wrong."""
    names = [field.name for field in fields(EfficiencyCurve)]
    try:
        devices = json.loads(text)["devices"]
        found = {}
        for device, row in devices.items():
            constants = row["constants"]
            if sorted(constants) != sorted(names):
                raise InputError(
                    f"{where}: device {device}: expected the constants {', '.join(sorted(names))}, "
                    f"found {', '.join(sorted(constants))}; run benchmarks/calibrate.py again"
                )
            found[device] = EfficiencyCurve(**{k: float(v) for k, v in constants.items()})
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"{where}: not a calibration table ({error!r}); run benchmarks/calibrate.py again"
        ) from error
    return found


CALIBRATED: Mapping[str, EfficiencyCurve] = parse_calibration(
    PATH.read_text(encoding="utf-8"), where=PATH.name
)
"""By the name of the device."""


def curve_of(device: DeviceSpec) -> EfficiencyCurve:
    """The constants of a device: fitted to its chip, or else those of its kernels."""
    return CALIBRATED.get(CHIPS.get(device.name, device.name)) or kernels_of(device)
