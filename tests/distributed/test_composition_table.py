"""The table of compositions is complete, and `docs/parity.md` lists exactly its rows."""

from __future__ import annotations

from compositions import ALONE, IMPOSSIBLE, ROWS, TECHNIQUES, pairs
from parity_doc import DOC, rows_in


def test_no_row_twice():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) >= 45
    assert {row.devices for row in ROWS} == {2, 4, 8, 16, 32, 64}


def test_every_technique_stands_alone():
    """With nothing but what it needs: an axis to split state, samples or the sequence over. Dropout
    splits nothing and may stand beside."""
    needs = {"data", "tensor", "pipeline", "dropout"}
    alone = {name for row in ALONE for name in row.techniques if len(row.techniques - needs) <= 1}
    assert alone | {"hsdp"} == set(TECHNIQUES)


def test_every_pair_stands_in_a_row():
    covered = [row.techniques for row in ROWS if not row.fails]
    missing = [sorted(pair) for pair in pairs() if not any(pair <= row for row in covered)]
    assert missing == []
    assert not any(pair <= row for row in covered for pair in IMPOSSIBLE)


def test_the_page_lists_the_rows():
    assert sorted(rows_in(DOC.read_text())) == sorted(row.name for row in ROWS)
