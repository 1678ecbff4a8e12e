"""The results of pricing published runs as a document."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from autopar.costs.calibration import PATH

PEERS = Path(__file__).parents[1] / "data" / "peers.json"

TABLES = (
    ("Megatron-LM SC21 Table 1", "Narayanan et al. 2021, table 1"),
    ("Korthikanti 2022 Table 5", "Korthikanti et al. 2022, table 5"),
)

CAVEATS = """\
- Step times of table 1 of Narayanan et al. are inverted from the TFLOP/s it prints, by its own
  equation 3 (96 B s l h^2 (1 + s/6h + V/16lh), which counts recomputation); others are printed as
  seconds or as tokens per second. TFLOP/s are never compared: what counts as one differs.
- A run is priced with its own plan: degrees, micro-batch, schedule, recomputation, ZeRO level, and
  stages of equally many layers where its framework cuts so. What the framework does otherwise than
  the programs that autopar emits (fused kernels, which communication overlaps, in which dtype
  gradients are sent) is listed in `benchmarks/replay/frameworks.py` with its source.
- The two tables above were run with software a year apart. 530B and 1T with full recomputation are
  in both, with the same plan per model replica; the earlier runs took 9 and 10 % longer, of which
  data parallelism explains less than 4 % (530B on 8 replicas, Korthikanti et al. 2022, section 6).
  No one set of constants can be right for both.
- A device has one set of constants, while programs on it differ: with the constants of a device
  that is not calibrated the two tables above come out 6.9 % and 2.0 % off at the median, and eager
  or FSDP programs on A100 (fit part and test part) 12 to 26 % too fast. The fit part is mostly of
  those. Kernels of a framework's own would have to be priced as such to have both.
- H100: no source of the fit part is clean enough to fit on (one is of several versions of the code
  on a network that fails, the others are mixtures of experts), so the constants are the general
  ones. Programs with Transformer Engine come out right, FSDP programs 30 to 40 % too fast: their
  host, and collectives that slow the compute they run beside, are not in the model.
- Whether a plan fits is judged with autopar's own memory: gathered inputs of sequence-parallel
  products are kept for the backward, which Megatron-LM gathers again instead; a fused
  cross-entropy, which some frameworks have, is not assumed.
- HF Ultra-Scale: the cluster's network falls from 436 to 33 GB/s between 1 and 64 nodes, and rows
  of one setup differ by up to 4.7 times. Nothing is fitted on it but what its host takes to start a
  kernel. Plans with several stages or many ranks took up to 50 times as long there as any network
  that was measured explains; such rows make up the 90th percentiles.
- DT-FM: 64 small instances, for case 2 on a network whose speed is not stated; priced with the
  links that the device usually comes with.
- Runs in FP8 or narrower, with offloading, on TPUs, and of fine-tuning are not priced.
"""


Summary = Callable[[Any], Mapping[str, Any]]


def document(
    results: Sequence[Any],
    skipped: Counter[str],
    summary: Summary,
    collectives: Mapping[str, Mapping[str, float]],
    priced_s: float,
    most: int | None,
) -> str:
    """The whole document, in Markdown."""
    lines = [
        "# Costs held to published training runs",
        "",
        f"Written by `python benchmarks/published.py{f' --most {most}' if most else ''} --document "
        "docs/validation.md`; do not edit.",
        "",
        f"{sum(r.error is not None for r in results)} published runs are priced with the plans "
        "that they were run with, by the same search and cost model that `autopar plan` uses. "
        "Sources are split whole: constants are fitted on the fit part "
        "(`benchmarks/calibrate.py`), the test part is only held to them "
        "(`benchmarks/replay/split.py` has the rule).",
        "",
        "## Summary",
        "",
        *_summaries(results, summary),
        "",
    ]
    for source, title in TABLES:
        own = [r for r in results if r.source == source]
        if own:
            lines += [f"## {title}", "", *_rows(own), ""]
    lines += ["## By source", "", *_sources(results, summary), ""]
    lines += ["## Not priced", "", *_reasons(results, skipped), ""]
    lines += ["## Constants", "", *_constants(), ""]
    lines += ["## Collectives", "", *_collectives(collectives), ""]
    lines += [
        "## Speed",
        "",
        f"Pricing a grid once its block classes are priced, from options to "
        f"stages to a step time: {priced_s * 1e3:.2g} ms.",
        "",
    ]
    return "\n".join([*lines, "## What to know", "", CAVEATS])


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def _percent(value: float, sign: bool = False) -> str:
    return f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"


def _figures(own: Sequence[Any], summary: Summary) -> list[str]:
    s = summary(own)
    known = s["runs"] > 0
    return [
        str(s["runs"]),
        *(_percent(s[key]) if known else "" for key in ("median", "p90")),
        _percent(s["bias"], sign=True) if known else "",
        str(s["groups"] or ""),
        *(_percent(s[key]) if s["groups"] else "" for key in ("regret_median", "regret_p90")),
        f"{_percent(s['oom_predicted'])} of {s['oom']}" if s["oom"] else "",
        f"{_percent(s['ran_predicted'])} of {s['ran']}" if s["ran"] else "",
    ]


_FIGURES = (
    "runs",
    "median abs error %",
    "p90 %",
    "bias %",
    "groups",
    "regret median %",
    "regret p90 %",
    "OOM told %",
    "ran told %",
)


def _summaries(results: Sequence[Any], summary: Summary) -> list[str]:
    rows = [
        (name, *_figures([r for r in results if r.part == name], summary))
        for name in ("fit", "test")
        if any(r.part == name for r in results)
    ]
    return _table(("part", *_FIGURES), rows)


def _sources(results: Sequence[Any], summary: Summary) -> list[str]:
    rows = []
    for source in dict.fromkeys(r.source for r in results):
        own = [r for r in results if r.source == source]
        rows.append((source, own[0].part, *_figures(own, summary)))
    return _table(("source", "part", *_FIGURES), rows)


def _rows(own: Sequence[Any]) -> list[str]:
    peers = json.loads(PEERS.read_text(encoding="utf-8"))
    rows: list[tuple[str, ...]] = []
    columns: dict[str, list[float]] = {"autopar": [], "calculon": [], "simumax": []}
    for r in sorted(own, key=lambda r: r.key):
        known = {"autopar": r.error, **peers["runs"].get(r.key, {})}
        for name, found in columns.items():
            if known.get(name) is not None:
                found.append(abs(known[name]))
        cells = [_percent(known[n], sign=True) if known.get(n) is not None else "" for n in columns]
        measured, step = (f"{s:.2f}" if s is not None else "" for s in (r.measured_s, r.step_s))
        rows.append((r.model, r.key, measured, step, *cells))
    ends = [_percent(median(v)) if v else "" for v in columns.values()]
    rows.append(("median abs", "", "", "", *ends))
    header = ("model", "row", "measured s", "predicted s", "autopar %", "Calculon %", "SimuMax %")
    return [*_table(header, rows), "", f"{peers['source']}."]


def _reasons(results: Sequence[Any], skipped: Counter[str]) -> list[str]:
    reasons = Counter(r.why.partition(":")[0][:60] for r in results if r.fits is None)
    rows = [(why, str(n), "cannot be priced") for why, n in reasons.most_common()]
    rows += [(why, str(n), "says nothing to hold to") for why, n in skipped.most_common()]
    return _table(("reason", "rows", ""), rows)


def _constants() -> list[str]:
    devices = json.loads(PATH.read_text(encoding="utf-8"))["devices"]
    rows = []
    for name, row in devices.items():
        fit = row["fit"]
        text = ", ".join(f"{key} {value:g}" for key, value in row["constants"].items())
        on = ", ".join(f"{source} ({n})" for source, n in row["sources"].items())
        rows.append((name, text, on, _percent(fit["median_error"]), _percent(fit["p90_error"])))
    header = ("device", "constants", "fitted on (runs)", "median abs error %", "p90 %")
    return [
        *_table(header, rows),
        "",
        "`autopar/costs/calibration.json`; other devices have the "
        "constants of their kind (`autopar/costs/calibration.py`).",
    ]


def _collectives(parts: Mapping[str, Mapping[str, float]]) -> list[str]:
    rows = [
        (name, str(s["rows"]), _percent(s["median"]), _percent(s["p90"]), _percent(s["bias"], True))
        for name, s in parts.items()
    ]
    return _table(("part", "rows", "median abs error %", "p90 %", "bias %"), rows)
