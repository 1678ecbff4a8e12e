"""Which sources constants are fitted on, and which they are held to.

Whole sources, so that no setup is on both sides: for every device the sources, the one with the
most measured runs first, go to the fit and to the test part in turn. Everything from the two papers
that simulators are compared on, and what else describes their runs, is in the test part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from replay.rows import Row, unmeasured

HELD_OUT = ("Megatron-LM SC21", "SC21", "Korthikanti", "Megatron-LM README Jan-2021")


def part(rows: Iterable[Row]) -> Mapping[str, str]:
    """Source to `fit` or `test`."""
    sizes: Counter[str] = Counter()
    devices: dict[str, Counter[str]] = {}
    for row in rows:
        sizes[row["dataset"]] += unmeasured(row) is None
        devices.setdefault(row["dataset"], Counter())[str(row.get("gpu"))[:4]] += 1
    found: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for source in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if source.startswith(HELD_OUT):
            found[source] = "test"
            continue
        device = devices[source].most_common(1)[0][0]
        found[source] = ("fit", "test")[seen[device] % 2]
        seen[device] += 1
    return found
