"""The results of pricing published runs as a document."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from autopar.costs.calibration import PATH
from replay.residuals import LARGE, residuals

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
  in both, with the same plan per model replica; the earlier runs took longer by what it takes to
  add a micro-batch's gradients to the sum in passes of their own, which later versions of
  Megatron-LM do inside the products (`fuses_accumulation` in `benchmarks/replay/frameworks.py`).
- A chip has one set of constants, of good kernels; what a framework does otherwise is its own. Two
  are fitted: how much of the best measured product lasts in training, and what 8-bit products
  reach. On H100 they are fitted to NeMo's 8-bit runs and to those of HF on one node.
- Where a row does not say what is run again, it is the least that the search finds to fit in
  memory; where nothing fits, everything.
- Whether a plan fits is judged with autopar's own memory, and with what its framework holds
  otherwise: gradients that are reduced every micro-batch are held as shards.
- HF Ultra-Scale: the cluster's network slows down as nodes are added, rows of one setup differ
  several-fold, and the code is of several versions. Constants are fitted on its single node alone.
- DT-FM: the rows of case 2 do not print the network; its source does, and that it joins instances
  of four devices and of one. It is priced as that (`data/v100-case2.yaml`), instances of four
  first. DeepSpeed at ZeRO level 3 gathers all weights in every forward and reduces gradients in
  every micro-batch, as its code does. With one sample in each, as the rows say, the time that was
  measured is shorter than that takes at the line rate of the network: those rows are left out.
- Rows of NeMo with a pipeline that do not print how many stages a rank has are not priced: recipes
  choose it for every model. Nor are experts under context parallelism, where context ranks keep
  tokens split that autopar's all run.
- Hagemann et al.: each tensor rank computes the loss in float32 on logits gathered from all,
  128,000 a token, as the framework's published code does (Aleph Alpha's scaling: lm_head.py,
  losses/cross_entropy.py). Of all its runs, `--only Hagemann`, that tells 150 of 189 that ran out
  of memory and 188 of 190 that ran. Two pairs contradict each other: LLaMA-65B on tensor 8 x
  pipeline 8, and 8 x 4, four samples at a time, ran on 64 devices (pr-04487, pr-04486) and not on
  128 (pr-04324, pr-04326), where a rank holds half of the optimizer's state and all else alike. So
  the program that ran on 128 held several GB more than the other, which is not published. Most runs
  told wrong are of that program and save all that they compute: where the norm is no kernel of its
  own they fit with 17 to 26 % more saved a layer than the published code keeps.
- Rows whose sizes give another number of parameters than they print are not priced: their layers
  are not all of the kind that they describe.
- Runs narrower than FP8, with offloading, on TPUs, and of fine-tuning are not priced: rows of the
  last do not print which weights train.
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
        "(`benchmarks/replay/split.py` has the rule). A group is the plans that were measured for "
        "one model, cluster, batch and framework; regret is what the plan ranked first took more "
        "than the fastest.",
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
    lines += ["## What is left", "", *_residuals(results), ""]
    lines += ["## Memory told wrong", "", *wrongly_told(results), ""]
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


def wrongly_told(results: Sequence[Any]) -> list[str]:
    """Runs that were predicted to fit and did not, or the other way."""
    wrong = [r for r in results if r.fits is not None and r.fits == r.oom]
    rows = [
        (r.source, r.part, r.key, r.model, "no" if r.oom else "yes", f"{r.peak_gib:.1f}")
        for r in sorted(wrong, key=lambda r: (r.source, r.key))
    ]
    header = ("source", "part", "row", "model", "ran", "predicted peak GiB")
    return [
        "Runs that were predicted to fit and did not, or the other way; a run that was tuned to "
        "fill its devices is told wrong by the smallest error.",
        "",
        *_table(header, rows),
    ]


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


def _residuals(results: Sequence[Any]) -> list[str]:
    rows = [
        (source, trait, str(runs), _percent(signed, sign=True), _percent(size), missing)
        for source, trait, runs, signed, size, missing in residuals(
            [r for r in results if r.part == "test"]
        )
    ]
    header = ("source", "runs with", "runs", "bias %", "median abs error %", "physics not priced")
    return [
        f"Runs of the test part that are {_percent(LARGE)} % off or more at the median, by what "
        "they have in common.",
        "",
        *_table(header, rows),
    ]


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
        "`autopar/costs/calibration.json`; devices with the same chip share "
        "them; others have the constants of their kernels (`autopar/costs/calibration.py`).",
    ]


def _collectives(parts: Mapping[str, Mapping[str, float]]) -> list[str]:
    rows = [
        (name, str(s["rows"]), _percent(s["median"]), _percent(s["p90"]), _percent(s["bias"], True))
        for name, s in parts.items()
    ]
    return _table(("part", "rows", "median abs error %", "p90 %", "bias %"), rows)
