"""Factor matching of views: what it finds is right, and it finds what is there."""

from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_graphs import spec, strategies

from autopar.ir.placement import Shard, local_slices, parse_placement
from autopar.ir.size import Size
from autopar.rules.letters import match_factors


def _match(source, target):
    def sizes(shape):
        return tuple(Size(s) if isinstance(s, int) else Size.parse(s) for s in shape)

    a, b, extents, blocked = match_factors(sizes(source), sizes(target))
    return a, b, {k: str(v) for k, v in extents.items()}, blocked


def test_merged_and_split_dims():
    a, b, sizes, blocked = _match((2, 8, 4), (16, 4))
    assert a == (("f0",), ("f1",), ("f2",))
    assert b == (("f0", "f1"), ("f2",))
    assert sizes == {"f0": "2", "f1": "8", "f2": "4"}
    assert not blocked


def test_dims_without_common_edge_are_blocked():
    a, b, _, blocked = _match((3, 2), (2, 3))
    assert {letter for dim in (*a, *b) for letter in dim} == blocked
    a, b, sizes, blocked = _match((6, 4), (4, 6))
    assert a[0][0] == b[0][0] and sizes[a[0][0]] == "2" and a[0][0] not in blocked


def test_the_batch_is_told_from_a_dim_of_the_same_extent():
    a, b, sizes, _ = _match(("batch", 16, 96), ("16*batch", 96))
    assert sizes == {"f0": "batch", "f1": "16", "f2": "96"}
    assert b == (("f0", "f1"), ("f2",))
    a, b, sizes, _ = _match((16, "batch", 8), ("16*batch", 8))
    assert a[0] == b[0][:1] and sizes[b[0][1]] == "batch"


def test_a_batch_plus_one_has_no_factors():
    _, b, sizes, _ = _match(("batch+1", 8), ("8*batch+8",))
    assert sizes == {"f0": "batch+1", "f1": "8"}
    assert b == (("f0", "f1"),)
    *_, sizes, blocked = _match((8, "batch+1"), ("batch+1", 8))
    assert set(sizes) == blocked


def test_views_keep_a_split_only_where_the_index_leads():
    def found(source, target, size):
        return strategies("aten.view.default", [spec(*source)], target, size=size)[2:]

    assert found((2, 8, 4), (16, 4), 2) == ["S(0) -> S(0)", "S(2) -> S(1)", "P(sum) -> P(sum)"]
    assert "S(1) -> S(0)" not in found((4, 4, 4), (8, 8), 2)
    assert found((6, 256), (1536,), 4) == ["P(sum) -> P(sum)"]
    assert found((6, 256), (1536,), 3) == ["S(0) -> S(0)", "P(sum) -> P(sum)"]


def test_a_minor_factor_is_split_only_where_the_graph_parts_the_dim():
    from autopar.ir.graph import Ref

    source, target = spec("batch", 16, 96), ("batch", 16, 3, 32)
    plain = strategies("aten.view.default", [source], target)
    assert not any("S(2" in text for text in plain)
    hinted = strategies("aten.view.default", [source], target, hints={(Ref("t0"), 2): (32, 32, 32)})
    assert "S(2:32|32|32) -> S(3)" in hinted


SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


@st.composite
def _views(draw):
    """Two shapes of one tensor."""
    source = tuple(draw(SHAPES))
    left, target = prod(source), []
    while left > 1:
        size = draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0]))
        target += [size] + [1] * draw(st.integers(0, 1))
        left //= size
    return source, tuple(target) or (1,)


def _cut(array, placement, size, rank):
    if not isinstance(placement, Shard):
        return array
    ranges = local_slices(array.shape[placement.dim], placement, size, rank)
    return np.concatenate(
        [np.take(array, range(a, a + n), axis=placement.dim) for a, n in ranges], placement.dim
    )


@settings(max_examples=300, deadline=None)
@given(_views(), st.sampled_from([2, 3, 4]))
def test_every_offered_split_of_a_view_is_right(shapes, size):
    source, target = shapes
    whole = np.arange(prod(source)).reshape(source)
    for text in strategies("aten.view.default", [spec(*source)], target, size=size):
        before, after = (parse_placement(side) for side in text.split(" -> "))
        for rank in range(size):
            local = _cut(whole, before, size, rank)
            expected = _cut(whole.reshape(target), after, size, rank)
            assert (local.reshape(expected.shape) == expected).all(), text


@settings(max_examples=300, deadline=None)
@given(_views())
def test_factors_multiply_to_the_dims(shapes):
    source, target = shapes
    a, b, sizes, blocked = _match(source, target)
    for dims, shape in ((a, source), (b, target)):
        assert tuple(prod(int(sizes[f]) for f in dim) for dim in dims) == shape
    order = [[f for dim in dims for f in dim if f not in blocked] for dims in (a, b)]
    assert order[0] == order[1]


@settings(max_examples=200, deadline=None)
@given(_views(), st.sampled_from([2, 3]))
def test_every_right_split_of_a_view_is_offered(shapes, size):
    """Whole equal shares of one dim on each side, tried out."""
    source, target = shapes
    whole = np.arange(prod(source)).reshape(source)
    offered = set(strategies("aten.view.default", [spec(*source)], target, size=size))
    for i, m in enumerate(source):
        for j, n in enumerate(target):
            if m % size or n % size:
                continue
            before, after = Shard(i), Shard(j)
            parts = [
                (_cut(whole, before, size, r), _cut(whole.reshape(target), after, size, r))
                for r in range(size)
            ]
            right = all((p.reshape(q.shape) == q).all() for p, q in parts)
            assert right == (f"{before} -> {after}" in offered)
