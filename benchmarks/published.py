"""Costs held to published training runs: each run's own plan priced, beside what it measured.

python benchmarks/published.py [FILE ...] [--json] [--only SOURCE/ID ...] [--most RUNS]
                               [--cache DIR] [--document FILE]

Without files, the runs in `benchmarks/data/runs.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from replay.document import document
from replay.figures import error_figures, p90
from replay.nccl import errors_by_part as collective_errors
from replay.price import Captures, grid_step_s, memory_bytes, peak_bytes, search
from replay.residuals import traits
from replay.rows import (
    Row,
    Unpriced,
    is_oom,
    job,
    left_out,
    measured_s,
    read_rows,
    thinned,
)
from replay.split import part

from autopar.errors import AutoparError, InputError
from autopar.plan.text import columns

TIMED, REPEATS = "pr-05580", 200
DATA = Path(__file__).parent / "data" / "runs.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One run: what was measured, what is predicted, or why it is not.

    `fits` is the prediction that the plan fits in memory, and `step_s` what it takes if it does.
    """

    key: str
    source: str
    part: str
    model: str
    group: str | None
    measured_s: float | None
    oom: bool
    traits: tuple[str, ...] = ()
    step_s: float | None = None
    peak_gib: float | None = None
    fits: bool | None = None
    why: str = ""

    @property
    def error(self) -> float | None:
        """Relative error of the step time, signed."""
        if self.step_s is None or self.measured_s is None:
            return None
        return self.step_s / self.measured_s - 1


def group_of(row: Row) -> str | None:
    """Rows of one job that differ in their plan: what runs it is nothing that a plan chooses."""
    group = row.get("plan_group")
    return None if group is None else f"{group} of {row.get('framework')}"


def price(row: Row, captures: Captures, split: str) -> Result:
    """The prediction for one row."""
    known: dict[str, Any] = {
        "key": str(row["id"]),
        "source": str(row["dataset"]),
        "part": split,
        "model": str(row.get("model_name", "")),
        "group": group_of(row),
        "measured_s": measured_s(row),
        "oom": is_oom(row),
        "traits": tuple(traits(row)),
    }
    try:
        asked = job(row)
        planner, found = search(asked, captures)
        prediction = planner.simulator.fastest(found).prediction
    except (Unpriced, AutoparError) as error:
        return Result(**known, why=_one_line(error))
    peak = peak_bytes(asked, planner, prediction.peak_bytes)
    return Result(
        **known,
        fits=peak <= memory_bytes(asked),
        step_s=prediction.step_s,
        peak_gib=peak / 2**30,
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def run(
    rows: Iterable[Row], only: Sequence[str], captures: Captures, most: int | None = None
) -> Iterator[Result]:
    """The results of the rows that can say something, of those asked for: all, or at most so many
    of every source."""
    known = list(rows)
    parts = part(known)
    usable = [r for r in known if left_out(r) is None and _is_asked(r, only)]
    for row in sorted(thinned(usable, most or len(usable)), key=_by_model):
        yield price(row, captures, parts[row["dataset"]])


def _is_asked(row: Row, only: Sequence[str]) -> bool:
    name = f"{row['dataset']}/{row['id']}"
    return not only or any(name.startswith(text) or row["id"] == text for text in only)


def _by_model(row: Row) -> tuple[Any, ...]:
    return tuple(str(row.get(name)) for name in ("dataset", "hidden", "layers", "seq_len", "id"))


def errors(results: Iterable[Result]) -> dict[str, float | int]:
    """Number, median and 90th percentile of |error|, and the median signed error."""
    found = [r.error for r in results if r.error is not None]
    return {"runs": len(found), **(error_figures(found) if found else {})}


def regrets(results: Iterable[Result]) -> list[float]:
    """By group of plans for one job: the time of the plan ranked first over the best measured."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.group is not None and result.error is not None:
            groups.setdefault(result.group, []).append(result)
    found = []
    for members in groups.values():
        if len(members) > 1:
            chosen = min(members, key=lambda r: (r.step_s or 0.0, r.key))
            best = min(r.measured_s or 0.0 for r in members)
            found.append((chosen.measured_s or 0.0) / best - 1)
    return found


def feasibility(results: Iterable[Result]) -> dict[str, float | int]:
    """Shares of published out-of-memory runs predicted not to fit, and of others to fit."""
    told = [r for r in results if r.fits is not None]
    oom, ran = [r for r in told if r.oom], [r for r in told if not r.oom]
    return {
        "oom": len(oom),
        "oom_predicted": sum(not r.fits for r in oom) / len(oom) if oom else 1.0,
        "ran": len(ran),
        "ran_predicted": sum(bool(r.fits) for r in ran) / len(ran) if ran else 1.0,
    }


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """All figures of a set of results."""
    found = regrets(results)
    return {
        **errors(results),
        "groups": len(found),
        "regret_median": median(found) if found else 0.0,
        "regret_p90": p90(found) if found else 0.0,
        **feasibility(results),
        "unpriced": sum(r.fits is None for r in results),
    }


def seconds_of_a_grid(rows: Iterable[Row], captures: Captures) -> float:
    """Seconds to price a grid of 96 layers in 24 stages whose block classes are priced."""
    row = next(row for row in rows if row["id"] == TIMED)
    planner, found = search(job(row), captures)
    weights = planner.bounds.weights(found.best.grid)
    start = time.process_time()
    for _ in range(REPEATS):
        grid_step_s(found.best, weights)
    return (time.process_time() - start) / REPEATS


def report(results: Sequence[Result], skipped: Counter[str]) -> str:
    """The tables as text."""
    sources = list(dict.fromkeys(r.source for r in results))
    sets = [(f"{name} part", [r for r in results if r.part == name]) for name in ("fit", "test")]
    sets += [(name, [r for r in results if r.source == name]) for name in sources]
    header = [
        "source",
        "part",
        "runs",
        "median",
        "p90",
        "bias",
        "groups",
        "regret",
        "p90",
        "oom",
        "told",
        "ran",
        "told",
        "unpriced",
    ]
    lines = [columns(header, [_cells(name, own) for name, own in sets if own])]
    reasons = Counter(r.why.partition(":")[0][:70] for r in results if r.fits is None)
    lines += ["", "not priced:"] + [f"  {n:5} {why}" for why, n in reasons.most_common()]
    lines += ["left out:"] + [f"  {n:5} {why}" for why, n in skipped.most_common()]
    return "\n".join(lines)


def _cells(name: str, own: Sequence[Result]) -> tuple[str, ...]:
    s = summary(own)
    known = s["runs"] > 0
    return (
        name,
        own[0].part,
        str(s["runs"]),
        *(f"{s[key]:+.1%}".removeprefix("+") if known else "" for key in ("median", "p90")),
        f"{s['bias']:+.1%}" if known else "",
        str(s["groups"]),
        *(f"{s[key]:.1%}" if s["groups"] else "" for key in ("regret_median", "regret_p90")),
        str(s["oom"]),
        f"{s['oom_predicted']:.0%}" if s["oom"] else "",
        str(s["ran"]),
        f"{s['ran_predicted']:.0%}" if s["ran"] else "",
        str(s["unpriced"]),
    )


def main() -> None:
    """Price the runs and print how far off the costs are; status 2 for a file that has none."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, default=[DATA], metavar="FILE")
    parser.add_argument("--only", action="append", default=[], metavar="SOURCE/ID")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep captured graphs there")
    parser.add_argument("--most", type=int, metavar="RUNS", help="of a source, evenly spaced")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--document", type=Path, metavar="FILE", help="write docs/validation.md")
    given = parser.parse_args()
    if given.document and DATA not in given.files:
        parser.error("--document tells of the runs that come with the benchmarks: leave out FILE")
    try:
        rows = list(read_rows(given.files))
    except InputError as error:
        print(f"published.py: {error}", file=sys.stderr)
        sys.exit(2)
    skipped = Counter(why for row in rows if (why := left_out(row)))
    captures = Captures(given.cache)
    results = list(run(rows, given.only, captures, given.most))
    if given.document:
        text = document(
            results,
            skipped,
            summary,
            collective_errors(),
            seconds_of_a_grid(rows, captures),
            given.most,
        )
        partial = given.document.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(given.document)
    if given.json:
        found = {"summary": summary(results), "left_out": skipped}
        print(json.dumps({**found, "runs": [asdict(r) | {"error": r.error} for r in results]}))
    else:
        print(report(results, skipped))


if __name__ == "__main__":
    main()
