"""Which blocks cost the same however many ranks share the samples."""

from __future__ import annotations

import pytest

from autopar.costs.collectives import AlphaBeta
from autopar.ir.graph import OpNode, Ref, Size, TensorSpec
from autopar.ir.mesh import DATA, TENSOR, MeshAxis
from autopar.ir.placement import R_STAR, R, Shard
from autopar.ir.strategy import AxisStrategy
from autopar.search.block import block_space
from autopar.search.prices import Prices
from autopar.search.shared_sharding import SharedSharding, varying_links
from autopar.search.wiring import wired

TABLE = TensorSpec(shape=(Size(8), Size(8)), dtype="float32")
X, Y = Ref("x"), Ref("y")


def shared(given, asked, *, differentiable=(), data=4):
    """Of a block with an op that reads a table, which it is given on the data axis as `given`, and
    asks for as `asked`; a tensor axis may split it."""
    node = OpNode(name="y", target="aten.relu.default", args=(X,), outputs=(TABLE,))
    offered = {DATA: [asked], TENSOR: [R, Shard(1)]}
    mesh = (MeshAxis(name=DATA, size=data), MeshAxis(name=TENSOR, size=2))
    space = block_space(
        [node],
        mesh,
        lambda node, axis: tuple(
            AxisStrategy(inputs=(x,), outputs=(x,)) for x in offered[axis.name]
        ),
        parameters=[],
        given={X: (given, R)},
        required={},
        specs={X: TABLE, Y: TABLE},
        differentiable=frozenset(differentiable),
        loss=None,
    )
    sizes = {DATA: data, TENSOR: 2}
    links = AlphaBeta(alpha=dict.fromkeys(sizes, 1.0), beta=dict.fromkeys(sizes, 1.0), sizes=sizes)
    prices = Prices(
        names=(DATA, TENSOR),
        sizes=(data, 2),
        batch=data,
        specs={X: TABLE, Y: TABLE},
        differentiable=frozenset(differentiable),
        compute=lambda node, option, prices: (1.0, 0.0),
        collective=links.time_s,
    )
    wiring = wired(space)
    assert wiring is not None
    return SharedSharding(wiring, prices, (), varying_links(wiring, prices)), prices


@pytest.mark.parametrize(
    ("given", "asked", "differentiable", "varies"),
    [
        (R, R, (), False),
        (R, R_STAR, (), False),  # no gradient, so none to sum
        (R, R_STAR, (X, Y), True),  # summed over the data axis
        (Shard(0), R, (), True),  # gathered over it
        (R, Shard(0), (), True),  # what is computed is a share of it
    ],
)
def test_moves_count_where_they_communicate(given, asked, differentiable, varies):
    assert shared(given, asked, differentiable=differentiable)[0].varies is varies


@pytest.mark.parametrize("asked", [R, R_STAR])
def test_what_does_not_vary_is_solved_as_on_any_mesh(asked):
    small, on_small = shared(R, asked, data=4)
    large, on_large = shared(R, asked, data=32)
    found = small.solve(on_large, "highs", 1.0)
    assert found == small.solve(on_small, "highs", 1.0) == large.solve(on_large, "highs", 1.0)
    assert found is not None and found[0] == 1.0
