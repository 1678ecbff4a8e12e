"""The page `docs/parity.md`: the table of compositions with the errors that were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from compositions import (
    ALONE,
    GRIDS,
    IMPOSSIBLE,
    NARROW,
    PAIRS,
    ROWS,
    SAMPLES,
    SEQUENCE,
    WANTED,
    WIDE,
    Row,
)

from autopar.local import VerifyReport

DOC = Path(__file__).parents[2] / "docs" / "parity.md"

HEAD = """\
# Parity of compositions

Every row is a plan whose degrees are all pinned, compiled, and trained for three AdamW steps on
local gloo processes beside the same model on one device, from the same weights, batch and random
numbers. Compared are the loss and the gradient norm of every step, every gradient of the first
step, and every weight after the last one; what each rank communicated is the plan's list, in op,
bytes, group and count, or the row fails.

Errors are relative: the largest difference in a tensor over the largest magnitude in the one
device's, and of all tensors, steps and ranks the largest. Gradients that are zero but for rounding
are measured against the rounding of the largest gradient, weights that move by such gradients
against the largest move. Dropless experts run in float32, which torch's grouped product on CPUs
takes. bf16 and fp16 stand beside one device that trains in the same precision with float32 weights.
Threads run the same programs with messages in memory instead of gloo's.

Written by `python tests/distributed/test_compositions.py`, which measures every row, or those with
a word in their name that it is given. The rows are in `tests/distributed/compositions.py`, and
`pytest tests/distributed/test_compositions.py` holds each to its tolerance. Models are those of
`model_zoo/registry.py`, with {samples} samples of {sequence} tokens.
"""

SECTIONS: tuple[tuple[str, Sequence[Row]], ...] = (
    ("Techniques alone", ALONE),
    ("Three to five dimensions", GRIDS),
    ("Pairs", PAIRS),
    ("Narrow precisions", NARROW),
    ("16 to 64 ranks, threads of one process", WIDE),
)
COLUMNS = ("loss", "gradient", "gradient norm", "weights after 3 steps")


def document(reports: Mapping[str, VerifyReport], before: str = "") -> str:
    """The page, from the reports of rows by name; lines of others are kept from the page `before`.

    Raises KeyError for a row that neither has.
    """
    kept = {line.split("`")[1]: line for line in before.splitlines() if line.startswith("| `")}
    kept |= {row.name: _line(row, reports[row.name]) for row in ROWS if row.name in reports}
    parts = [HEAD.format(samples=SAMPLES, sequence=SEQUENCE)]
    for title, rows in SECTIONS:
        parts += [f"## {title}\n", _table([kept[row.name] for row in rows])]
    parts += ["## What does not compose\n", _table_of_impossible()]
    if WANTED:
        lines = [f"- `{row.name}`: {row.fails}" for row in WANTED]
        parts += ["## Not yet\n", "\n".join(lines) + "\n"]
    return "\n".join(parts)


def rows_in(text: str) -> list[str]:
    """The names of the rows that a page lists, in order."""
    return [line.split("`")[1] for line in text.splitlines() if line.startswith(("| `", "- `"))]


def _line(row: Row, report: VerifyReport) -> str:
    axes = {"data", "tensor", "pipeline", row.settled["schedule"], row.precision}
    cells = (
        f"`{row.name}`",
        str(row.devices),
        _grid(row),
        ", ".join(sorted(row.techniques - axes)),
        *(f"{report.worst[column]:.0e}" for column in COLUMNS),
        f"{report.tolerance:.0e}",
    )
    return f"| {' | '.join(cells)} |"


def _grid(row: Row) -> str:
    pins = row.settled
    axes = [f"{k} {pins[k]}" for k in ("pipeline", "data", "context", "tensor") if pins[k] != "1"]
    runs = "micro-batches" if pins["pipeline"] == "1" else f"micro-batches, {pins['schedule']}"
    return f"{' x '.join(axes)}; {pins['micro_batches']} {runs}"


def _table(lines: Sequence[str]) -> str:
    titles = ("row", "ranks", "grid", "besides", *COLUMNS, "tolerance")
    rule = "|".join("---" for _ in titles)
    return "\n".join([f"| {' | '.join(titles)} |", f"|{rule}|", *lines]) + "\n"


def _table_of_impossible() -> str:
    lines = [f"- {' with '.join(sorted(pair))}: {why}." for pair, why in IMPOSSIBLE.items()]
    return "\n".join(sorted(lines)) + "\n"
