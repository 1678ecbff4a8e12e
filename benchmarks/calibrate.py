"""Fit the constants of the cost model to the published runs of the fit part, device by device.

python benchmarks/calibrate.py [FILE ...] [--cache DIR] [--device NAME ...] [-o FILE]

Every run of the fit part is priced with its own plan and taken apart into its ops and collectives
(`replay.terms`); then the constants that give the least error are searched for, one at a time, in
smaller and smaller steps. Writes the table that `autopar.costs.calibration` loads.

What is fitted is what no datasheet says: see `EfficiencyCurve`. Links are not: they are measured
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from published import DATA
from replay.price import Captures, search
from replay.quick import Constants, Quick, Run
from replay.rows import Row, Unpriced, job, left_out, measured_s, read_rows, thinned
from replay.split import part
from replay.terms import terms

from autopar.costs.calibration import CURVES, PATH, curve_of
from autopar.errors import AutoparError
from autopar.search.make import predicted

BOUNDS: Mapping[str, tuple[float, float]] = {
    "sustained": (0.5, 1.0),
    "memory": (0.75, 0.95),
    "attention": (0.3, 0.75),
    "half_dim": (16.0, 256.0),
    "ramp_s": (5e-7, 5e-6),
    "hidden": (0.7, 1.0),
}
"""What is fitted, and between what: outside, it would stand for something else. Kernels that
stream reach 0.75 to 0.95 of the bandwidth; fused attention 0.3 to 0.75 of the peak, both passes
(Dao 2023, figure 4 to 6; Shah et al. 2024, figure 5)."""

MOST_ERROR = 0.5
MOST_RUNS = 32
"""Runs of one source that are enough, since neighbours differ in little."""

LEAST_RUNS, WORST_ERROR = 20, 0.3
"""Runs that a device needs to have constants of its own, and the 90th percentile of their error
above which what was fitted stands for something else."""

_ROUNDS, _FIRST_STEP, _SHRINK, _MOVES = 6, 1.3, 0.6, 12


def is_fitted_on(row: Row) -> bool:
    """Whether a row of the fit part is used: those with a step time, but for HF's.

    HF's are of several versions of the code on a network that slows down tenfold from 1 node to
    64; what they measure on one node is the host (`replay.frameworks.NANOTRON_HOST_S`).
    """
    mixed = str(row["dataset"]).startswith("HF Ultra-Scale")
    return left_out(row) is None and measured_s(row) is not None and not mixed


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
        predicted_s=predicted(planner, solved).step_s,
        base=Constants.of(curve_of(planner.pricer.device)),
        device=planner.pricer.device,
        host_s=asked.framework.execution.host_s,
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
    """The constants with the least error on runs of one device, and how large it is."""
    quick = Quick(found)
    measured = np.array([run.measured_s for run in found])
    sizes = Counter(run.source for run in found)
    weight = np.array([sizes[run.source] ** -0.5 for run in found])

    def loss(constants: Constants) -> float:
        error = np.abs(np.log(quick.step_s(constants) / measured))
        return float((weight * np.minimum(error, MOST_ERROR)).sum() / weight.sum())

    best = _descend(loss, start)
    error = np.abs(quick.step_s(best) / measured - 1)
    return best, {
        "runs": len(found),
        "median_error": round(float(np.median(error)), 4),
        "p90_error": round(float(np.quantile(error, 0.9)), 4),
    }


def _descend(loss: Callable[[Constants], float], start: Constants) -> Constants:
    """Coordinate search: every constant in turn, by a factor that shrinks."""
    best, least, step = start, loss(start), _FIRST_STEP
    for _ in range(_ROUNDS):
        for name, (low, high) in BOUNDS.items():
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
        by_device.setdefault(run.device.name, []).append(run)
    devices = {}
    for name, found in sorted(by_device.items()):
        if len(found) < LEAST_RUNS:
            continue
        best, errors = fit(found, Constants.of(CURVES[found[0].device.kind]))
        if errors["p90_error"] > WORST_ERROR:
            continue
        curve = {key: float(f"{getattr(best, key):.4g}") for key in BOUNDS}
        sources = Counter(run.source for run in found)
        devices[name] = {
            "constants": curve,
            "fit": errors,
            "sources": dict(sorted(sources.items())),
        }
    return {"devices": devices}


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
