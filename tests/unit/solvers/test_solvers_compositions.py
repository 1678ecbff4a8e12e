from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from solvers import partition_compositions
from solvers.partition_compositions import compositions
from solvers.partition_dealing import most_of_one, near_even


@pytest.mark.parametrize("largest", [2**62, 20])
def test_every_run_has_the_counts_of_its_composition(monkeypatch, largest):
    monkeypatch.setattr(partition_compositions, "_LARGEST", largest)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        classes = int(rng.integers(1, 8))
        blocks = rng.integers(0, classes, int(rng.integers(1, 25))).tolist()
        run, counts = compositions(blocks, classes)
        rows = [tuple(row) for row in counts.tolist()]
        assert rows == sorted(set(rows))
        for start in range(len(blocks)):
            for end in range(start + 1, len(blocks) + 1):
                held = Counter(blocks[start:end])
                assert rows[run[start, end]] == tuple(held[c] for c in range(classes))


def test_a_chain_of_one_class_has_a_composition_for_each_length():
    run, counts = compositions([0] * 300, 1)
    assert counts.tolist() == [[n] for n in range(1, 301)]
    assert run[20, 270] == 249


def test_splits_are_all_of_those_whose_stages_have_no_more_than_so_many():
    for blocks in range(14):
        for stages in range(1, 5):
            most = most_of_one(blocks, stages)
            found = near_even(blocks, tuple(range(stages)), stages)
            every = itertools.product(range(most + 1), repeat=stages)
            assert found == [parts for parts in every if sum(parts) == blocks]
