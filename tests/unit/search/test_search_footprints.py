"""The least that values take on a rank is that of the best of their layouts, on any mesh."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.graph import DTYPE_BYTES, TensorSpec
from autopar.ir.placement import BY_EXPERT, R_STAR, P, R, Shard, largest_shape
from autopar.ir.size import Size, shape_at
from autopar.search.footprints import Footprints
from autopar.search.prices import Prices

AXES = 3
SIZES = st.builds(Size, st.integers(1, 40), st.just(0)) | st.builds(Size, st.just(0), st.just(3))
PLACEMENTS = st.sampled_from([R, R_STAR, P, BY_EXPERT, *map(Shard, range(3))])


@st.composite
def values(draw):
    dims = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(SIZES, min_size=dims, max_size=dims)))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int64"]))
    pieces = [
        Shard(dim, (size.const // 2, size.const // 2 - size.const))
        for dim, size in enumerate(shape)
        if size.const > 1
    ]
    fitting = PLACEMENTS.filter(lambda p: not isinstance(p, Shard) or p.dim < dims)
    placed = fitting | st.sampled_from(pieces) if pieces else fitting
    layouts = st.lists(st.tuples(*[placed] * AXES), min_size=1, max_size=5)
    return TensorSpec(shape=shape, dtype=dtype), draw(layouts)


def prices(sizes, batch):
    return Prices(
        names=("data", "context", "tensor"),
        sizes=sizes,
        batch=batch,
        specs={},
        differentiable=frozenset(),
        compute=lambda *_: pytest.fail("computed"),
        collective=lambda *_: pytest.fail("communicated"),
    )


@settings(max_examples=200, deadline=None)
@given(
    placed=st.lists(values(), max_size=4),
    meshes=st.lists(st.tuples(*[st.integers(1, 8)] * AXES), min_size=1, max_size=3),
    batch=st.integers(1, 9),
)
def test_footprints_are_those_of_the_best_layout(placed, meshes, batch):
    footprints = Footprints(placed)
    for sizes in meshes:
        numel = [
            min(prod(largest_shape(shape_at(spec.shape, batch), x, sizes)) for x in layouts)
            for spec, layouts in placed
        ]
        nbytes = [n * DTYPE_BYTES[spec.dtype] for n, (spec, _) in zip(numel, placed, strict=True)]
        assert footprints.numel(prices(sizes, batch)).tolist() == numel
        assert footprints.nbytes(prices(sizes, batch)).tolist() == nbytes
