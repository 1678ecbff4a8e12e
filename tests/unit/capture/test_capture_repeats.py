"""Finding repetition in a sequence."""

from __future__ import annotations

import pytest

from autopar.capture.repeats import Run, Segments, find_runs


def runs(text: str, least_matmuls: int = 1, **weights: int) -> list[Run]:
    """Runs in a sequence of letters; lower case letters hold no weight matmul."""
    matmuls = [weights.get(c, int(c.isupper())) for c in text]
    parts = Segments(
        digests=list(text),
        matmuls=matmuls,
        boundary_cost=lambda i: ((float(not matmuls[i]),), 0),
    )
    return find_runs(parts, least_matmuls)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eABABABh", [Run(start=1, period=2, count=3)]),
        ("eAAAAh", [Run(start=1, period=1, count=4)]),
        ("ABC", []),
        ("xx", []),
        ("eABABcDDDh", [Run(start=1, period=2, count=2), Run(start=6, period=1, count=3)]),
        ("FgLgLgLgH", [Run(start=2, period=2, count=3)]),
        ("ABABCABABC", [Run(start=0, period=5, count=2)]),
    ],
)
def test_runs(text, expected):
    assert runs(text) == expected


def test_a_block_holds_two_matmuls_where_two_blocks_remain():
    assert runs("LgLgLgLg", 2) == [Run(start=0, period=4, count=2)]
    assert runs("LgLgLg", 2) == [Run(start=0, period=2, count=3)]
    assert runs("LgLgLgLg", 2, L=2) == [Run(start=0, period=2, count=4)]


def test_a_better_boundary_is_worth_a_repetition():
    parts = Segments(
        digests=list("BABABA"),
        matmuls=[1] * 6,
        boundary_cost=lambda i: ((1.0 if "BABABA"[i] == "B" else 0.0,), 0),
    )
    assert find_runs(parts, 2) == [Run(start=1, period=2, count=2)]
