"""Fit the constants of the cost model to the published runs of the fit part, chip by chip.

python benchmarks/calibrate.py [FILE ...] [--cache DIR] [-o FILE]

Every run of the fit part is priced with its own plan and taken apart into its ops and collectives
(`replay.terms`); then the constants that give the least error are searched for, one at a time, in
smaller and smaller steps. Writes the table that `autopar.costs.calibration` loads.

What is fitted is what no kernel's own benchmark says: how much of the best measured matrix product
lasts when a device is busy for hours (power, clocks), and what 8-bit products reach of theirs. The
other constants of a chip are those that kernels were measured at (`costs.calibration.CURVES`), and
what a framework does differently is its own (`replay.frameworks`). Links are measured too
(`benchmarks/collectives.py`). Errors count up to 50 %, so that runs on a broken network pull at
nothing; every source counts as the root of its number of runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from published import DATA
from replay.frameworks import framework_of
from replay.price import Captures, search
from replay.quick import Array, Constants, Quick, Run
from replay.rows import Row, Unpriced, job, left_out, measured_s, read_rows, thinned
from replay.split import part
from replay.terms import terms

from autopar.costs.calibration import CHIPS, PATH, EfficiencyCurve, curve_of, kernels_of
from autopar.errors import AutoparError

BOUNDS: Mapping[str, tuple[float, float]] = {"sustained": (0.5, 1.0), "narrow": (0.6, 1.0)}
"""What is fitted, and between what: `narrow` to runs whose products are of 8 bits, and where there
are others too; the rest to all."""

HOSTS_S = [float(f"{5e-6 * 1.05**k:.3g}") for k in range(64)]
"""What a host may take to start a kernel, where a framework is said to wait for it."""

MOST_ERROR = 0.5
MOST_RUNS = 32
"""Runs of one source that are enough, since neighbours differ in little."""

LEAST_RUNS, WORST_ERROR = 20, 0.3
"""Runs that a device needs to have constants of its own, and the 90th percentile of their error
above which what was fitted stands for something else."""

_ROUNDS, _FIRST_STEP, _SHRINK, _MOVES = 6, 1.3, 0.6, 12


def is_fitted_on(row: Row) -> bool:
    """Whether a row of the fit part is used: those with a step time whose kernels are good and
    whose network is sound.

    Chips have the constants of good kernels, so that frameworks which run op by op say nothing of
    them, nor do experts, whose time is that of their exchanges. HF's network slows down tenfold
    from 1 node to 64, so that only its runs on one node are used.
    """
    failing = str(row["dataset"]).startswith("HF Ultra-Scale")
    sound = not failing or row["n_gpus"] <= row.get("gpus_per_node", 8)
    good = framework_of(row).execution.fuses and not row.get("moe_experts")
    return left_out(row) is None and measured_s(row) is not None and good and sound


def _is_priced(row: Row) -> bool:
    try:
        job(row)
    except Unpriced:
        return False
    return True


def runs(rows: Sequence[Row], captures: Captures, folder: Path | None) -> Iterator[Run]:
    """The rows that can be priced, taken apart; kept in `folder` where one is given."""
    for row in rows:
        try:
            yield _kept(row, captures, folder)
        except (Unpriced, AutoparError):
            continue


def _kept(row: Row, captures: Captures, folder: Path | None) -> Run:
    asked = job(row)
    name = hashlib.sha256(repr(asked).encode()).hexdigest()[:16]
    path = None if folder is None else folder / f"{name}.run"
    if path is not None and path.exists():
        found = pickle.loads(path.read_bytes())
        assert isinstance(found, Run)
        return found
    planner, solved = search(asked, captures)
    run = Run(
        key=str(row["id"]),
        source=str(row["dataset"]),
        measured_s=measured_s(row) or 0.0,
        predicted_s=planner.simulator.fastest(solved).prediction.step_s,
        base=Constants.of(curve_of(planner.pricer.device)),
        device=planner.pricer.device,
        execution=asked.execution,
        product_dtype=planner.setting.training.precision.product_dtype,
        terms=terms(planner.pricer, solved.best),
        weights=(solved.best.problem.sum_weight, solved.best.problem.max_weight or 0.0),
    )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(run))
        partial.replace(path)
    return run


def fit(found: Sequence[Run], start: Constants) -> tuple[Constants, dict[str, float]]:
    """The constants with the least error on runs of one chip, and how large it is."""
    found = sorted(found, key=lambda run: run.device.name)
    by_device = [list(own) for _, own in groupby(found, key=lambda run: run.device.name)]
    quick = [Quick(own) for own in by_device]
    measured = np.array([run.measured_s for run in found])
    sizes = Counter(run.source for run in found)
    weight = np.array([sizes[run.source] ** -0.5 for run in found])

    def step_s(constants: Constants) -> Array:
        return np.concatenate([each.step_s(constants) for each in quick])

    def loss(constants: Constants) -> float:
        error = np.abs(np.log(step_s(constants) / measured))
        return float((weight * np.minimum(error, MOST_ERROR)).sum() / weight.sum())

    kinds = {bool(run.product_dtype) for run in found}
    best = _descend(
        loss, start, {k: v for k, v in BOUNDS.items() if k != "narrow" or len(kinds) > 1}
    )
    error = np.abs(step_s(best) / measured - 1)
    return best, {
        "runs": len(found),
        "median_error": round(float(np.median(error)), 4),
        "p90_error": round(float(np.quantile(error, 0.9)), 4),
    }


def fit_host(found: Sequence[Run], constants: Constants) -> float:
    """Seconds that a host takes to start a kernel, by runs of one framework on one chip."""
    quick = Quick(found)
    measured = np.array([run.measured_s for run in found])

    def loss(host_s: float) -> float:
        quick.runs = [
            replace(run, execution=replace(run.execution, host_s=host_s)) for run in found
        ]
        error = np.abs(np.log(quick.step_s(constants) / measured))
        return float(np.minimum(error, MOST_ERROR).sum())

    return min(HOSTS_S, key=loss)


def _descend(
    loss: Callable[[Constants], float], start: Constants, bounds: Mapping[str, tuple[float, float]]
) -> Constants:
    """Coordinate search: every constant in turn, by a factor that shrinks."""
    best, least, step = start, loss(start), _FIRST_STEP
    for _ in range(_ROUNDS):
        for name, (low, high) in bounds.items():
            for factor in (step, 1 / step):
                for _ in range(_MOVES):
                    value = min(high, max(low, getattr(best, name) * factor))
                    tried = replace(best, **{name: value})
                    found = loss(tried)
                    if found >= least * (1 - 1e-6):
                        break
                    best, least = tried, found
        step = 1 + (step - 1) * _SHRINK
    return best


def table(rows: Sequence[Row], captures: Captures, folder: Path | None) -> dict[str, Any]:
    """The calibration table of all devices that there are enough runs of."""
    parts = part(rows)
    fitted = [row for row in rows if parts[row["dataset"]] == "fit" and is_fitted_on(row)]
    used = thinned(filter(_is_priced, fitted), MOST_RUNS)
    used.sort(key=lambda r: tuple(str(r.get(n)) for n in ("hidden", "layers", "seq_len", "id")))
    by_device: dict[str, list[Run]] = {}
    for run in runs(used, captures, folder):
        name = run.device.name
        by_device.setdefault(CHIPS.get(name, name), []).append(run)
    devices, hosts = {}, {}
    for name, found in sorted(by_device.items()):
        if len(found) < LEAST_RUNS:
            continue
        best, errors = fit(found, Constants.of(kernels_of(found[0].device)))
        if errors["p90_error"] > WORST_ERROR:
            continue
        for source, own in _waiting(found).items():
            hosts[source] = fit_host(own, best)
        curve = {f.name: float(f"{getattr(best, f.name):.4g}") for f in fields(EfficiencyCurve)}
        sources = Counter(run.source for run in found)
        devices[name] = {
            "constants": curve,
            "fit": errors,
            "sources": dict(sorted(sources.items())),
        }
    return {"devices": devices, "hosts": hosts}


def _waiting(found: Sequence[Run]) -> dict[str, list[Run]]:
    """By source, the runs whose host may not keep ahead of the device."""
    by_source: dict[str, list[Run]] = {}
    for run in found:
        if run.execution.host_s:
            by_source.setdefault(run.source, []).append(run)
    return by_source


def main() -> None:
    """Fit and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, default=[DATA], metavar="FILE")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep graphs and priced runs")
    parser.add_argument("-o", "--output", type=Path, default=PATH, metavar="FILE")
    given = parser.parse_args()
    found = table(list(read_rows(given.files)), Captures(given.cache), given.cache)
    text = json.dumps(found, indent=1) + "\n"
    partial = given.output.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(given.output)
    print(text, end="")


if __name__ == "__main__":
    main()
