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

Written by `python tests/distributed/test_compositions.py`, which measures every row; the rows are
in `tests/distributed/compositions.py`, and `pytest tests/distributed/test_compositions.py` holds
each to its tolerance. Models are those of `model_zoo/registry.py`, with {samples} samples of
{sequence} tokens.
"""

SECTIONS: tuple[tuple[str, Sequence[Row]], ...] = (
    ("Techniques alone", ALONE),
    ("Three to five dimensions", GRIDS),
    ("Pairs", PAIRS),
    ("Narrow precisions", NARROW),
    ("16 to 64 ranks, threads of one process", WIDE),
)
COLUMNS = ("loss", "gradient", "gradient norm", "weights after 3 steps")


def document(reports: Mapping[str, VerifyReport]) -> str:
    """The page, from the reports of all rows that are not known to fail, by name."""
    parts = [HEAD.format(samples=SAMPLES, sequence=SEQUENCE)]
    for title, rows in SECTIONS:
        lines = [_line(row, reports[row.name]) for row in rows]
        parts += [f"\n## {title}\n", _table(lines)]
    parts += ["\n## What does not compose\n", _table_of_impossible()]
    if WANTED:
        lines = [f"- `{row.name}`: {row.fails}" for row in WANTED]
        parts += ["\n## Not yet\n", "\n".join(lines) + "\n"]
    return "\n".join(parts)


def rows_in(text: str) -> list[str]:
    """The names of the rows that a page lists, in order."""
    return [line.split("`")[1] for line in text.splitlines() if line.startswith(("| `", "- `"))]


def _line(row: Row, report: VerifyReport) -> list[str]:
    besides = sorted(row.techniques - {"data", "tensor", "pipeline", row.settled["schedule"]})
    return [
        f"`{row.name}`",
        str(row.devices),
        report.grid,
        ", ".join(name for name in besides if name != row.precision),
        row.precision,
        *(f"{report.worst[column]:.0e}" for column in COLUMNS),
        f"{report.tolerance:.0e}",
    ]


def _table(lines: Sequence[Sequence[str]]) -> str:
    titles = ("row", "ranks", "grid", "besides", "precision", *COLUMNS, "tolerance")
    rule = "|".join("---" for _ in titles)
    body = [" | ".join(line) for line in (titles, *lines)]
    return "\n".join([f"| {body[0]} |", f"|{rule}|", *(f"| {text} |" for text in body[1:])]) + "\n"


def _table_of_impossible() -> str:
    lines = [f"- {' with '.join(sorted(pair))}: {why}." for pair, why in IMPOSSIBLE.items()]
    return "\n".join(sorted(lines)) + "\n"
