"""The parts a search is put together from: options, layouts, forms, prices, grids, pins."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import inf, prod

import pytest
import torch
from torch import nn

from autopar.capture import capture, find_blocks
from autopar.costs.clusters import parse_cluster
from autopar.costs.collectives import AlphaBeta
from autopar.costs.memory import Training
from autopar.errors import InputError
from autopar.ir.blocks import Block, BlockChain, BlockClass
from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import OpGraph, OpNode, Ref, Size, Source, SourceKind, TensorSpec
from autopar.ir.mesh import MeshAxis, stage_mesh
from autopar.ir.placement import R_STAR, P, R, Shard
from autopar.ir.precision import PRECISIONS
from autopar.ir.strategy import AxisStrategy, BatchAxis
from autopar.plan.flow import block_flow
from autopar.plan.plan import NodeChoice
from autopar.rules import axis_strategies
from autopar.schedules.registry import SCHEDULES
from autopar.search.block import block_space, is_consistent, node_options, parameter_layouts
from autopar.search.classes import split_classes
from autopar.search.grids import divisors, grids, micro_batch_sizes
from autopar.search.pins import Pins, parse_pins, settle_pins, within
from autopar.search.prices import Prices
from autopar.search.setting import Setting
from autopar.search.sharding import solve_sharding
from autopar.search.wiring import form_sets

WIDTH = 8
S0, S1 = Shard(0), Shard(1)
AR, AG = CollectiveOp.ALL_REDUCE, CollectiveOp.ALL_GATHER
RS, A2A = CollectiveOp.REDUCE_SCATTER, CollectiveOp.ALL_TO_ALL


def square(name, kind=SourceKind.PARAMETER, **options):
    """A source of [8, 8] for a parameter, [batch, 8] for an input."""
    first = Size(0, 1) if kind is SourceKind.INPUT else Size(WIDTH)
    spec = TensorSpec(shape=(first, Size(WIDTH)), dtype="float32")
    trainable = kind is SourceKind.PARAMETER
    return Source(name=name, kind=kind, fqn=name, spec=spec, trainable=trainable, **options)


ACTIVATION = TensorSpec(shape=(Size(0, 1), Size(WIDTH)), dtype="float32")
SCALAR = TensorSpec(shape=(), dtype="float32")


def op(name, target, *args, spec=ACTIVATION):
    return OpNode(name=name, target=target, args=args, outputs=(spec,), requires_grad=True)


# -- forms -----------------------------------------------------------------------------------------


def test_forms_give_every_reader_a_layout_of_its_own():
    a, b, c = (S0,), (S1,), (R,)
    assert form_sets([[a, b], [a]]) == [(a,), (a, b)]
    assert form_sets([[a], [b]]) == [(a, b)]
    assert form_sets([[a], [b], [c]]) == [(c, a, b)]
    assert form_sets([[a, c], [b, c]]) == [(c,), (c, a), (c, b), (a, b)]


def test_forms_of_many_layouts_are_pairs_at_most():
    layouts = [(Shard(i),) for i in range(7)]
    found = form_sets([layouts, layouts, layouts])
    assert {len(form) for form in found} == {1, 2}
    assert len(found) == 7 + 21


# -- layouts of parameters -------------------------------------------------------------------------


def test_a_parameter_is_stored_as_its_readers_ask():
    wanted = [(R_STAR, R), (R_STAR, S0), (R_STAR, P)]
    found = parameter_layouts(square("w"), wanted, {}, 2)
    assert found == ((R_STAR, R), (R_STAR, S0))
    assert parameter_layouts(square("w"), [], {}, 2) == ((R, R),)


def test_one_sum_a_step_goes_before_one_a_micro_batch():
    assert parameter_layouts(square("w"), [(R,), (R_STAR,)], {}, 1) == ((R_STAR,), (R,))


def test_a_buffer_has_no_gradient_to_be_partial():
    buffer = replace(square("b", SourceKind.BUFFER), trainable=False)
    assert parameter_layouts(buffer, [(R,), (R_STAR,)], {}, 1) == ((R,),)


@pytest.mark.parametrize(
    ("pin", "expected"),
    [
        ({1: S0}, ((R_STAR, S0),)),
        ({1: S1}, ((R_STAR, S1),)),  # no reader asks for it
        ({1: R}, ((R_STAR, R_STAR), (R_STAR, R))),
        ({0: R_STAR, 1: R}, ((R_STAR, R),)),  # what blocks that share it agree on
    ],
)
def test_a_pinned_layout_is_offered_alone(pin, expected):
    wanted = [(R_STAR, R_STAR), (R_STAR, S0)]
    assert parameter_layouts(square("w"), wanted, {"w": pin}, 2) == expected
    assert parameter_layouts(square("v"), wanted, {"w": pin}, 2) == tuple(sorted_late(wanted))


def sorted_late(layouts):
    return sorted(layouts, key=lambda x: tuple("" if p == R_STAR else str(p) for p in x))


# -- options of a node -----------------------------------------------------------------------------


def test_options_are_the_product_over_axes_without_a_dim_split_twice():
    node = op("y", "aten.relu.default", Ref("x"))
    per_axis = tuple(AxisStrategy(inputs=(p,), outputs=(p,)) for p in (R, S0, S1))
    mesh = [MeshAxis(name=name, size=2) for name in "ab"]
    found = node_options(node, mesh, lambda node, axis: per_axis)
    layouts = [option.inputs[0] for option in found]
    assert len(layouts) == len(set(layouts)) == 9 - 2
    assert (S0, S0) not in layouts and (S0, S1) in layouts
    assert all(option.inputs == option.outputs for option in found)
    assert not is_consistent((S1, R, S1)) and is_consistent((S1, R, S0))


def test_the_loss_is_whole_or_a_partial_sum():
    x, y = square("x", SourceKind.INPUT), op("y", "aten.relu.default", Ref("x"))
    strategies = tuple(AxisStrategy(inputs=(p,), outputs=(p,)) for p in (R, S0, P, R_STAR))

    def space(loss):
        return block_space(
            [y],
            (MeshAxis(name="a", size=2),),
            lambda node, axis: strategies,
            parameters=[],
            given={Ref("x"): (R,)},
            required={},
            specs={Ref("x"): x.spec, Ref("y"): ACTIVATION},
            differentiable=frozenset({Ref("y")}),
            loss=loss,
        )

    assert [o.outputs[0][0] for o in space(None).options[0]] == [R, S0, P, R_STAR]
    assert [o.outputs[0][0] for o in space(Ref("y")).options[0]] == [R, P]


# -- prices ----------------------------------------------------------------------------------------


def prices(specs, sizes=(4,), batch=8, differentiable=(), compute=None):
    """An all-reduce, and every other collective, takes a second and a second a byte moved."""
    names = tuple(f"axis{i}" for i in range(len(sizes)))
    model = AlphaBeta(
        alpha=dict.fromkeys(names, 1.0),
        beta=dict.fromkeys(names, 1.0),
        sizes=dict(zip(names, sizes, strict=True)),
    )
    return Prices(
        names=names,
        sizes=tuple(sizes),
        batch=batch,
        specs=specs,
        differentiable=frozenset(differentiable),
        compute=compute or (lambda node, option, prices: (0.0, 0.0)),
        collective=model.time_s,
    )


NBYTES = 8 * WIDTH * 4


@pytest.mark.parametrize(
    ("before", "after", "forward", "backward"),
    [
        (R, R, 0, 0),
        (R, R_STAR, 0, (AR, NBYTES)),
        (R, S0, 0, (AG, NBYTES)),
        (R_STAR, S0, 0, 0),
        (R, P, 0, 0),
        (S0, R, (AG, NBYTES), 0),
        (S0, R_STAR, (AG, NBYTES), (RS, NBYTES)),
        (S0, S1, (A2A, NBYTES / 4), (A2A, NBYTES / 4)),
        (P, R, (AR, NBYTES), 0),
        (P, R_STAR, (AR, NBYTES), (AR, NBYTES)),
        (P, S0, (RS, NBYTES), (AG, NBYTES)),
    ],
)
def test_a_move_is_priced_by_its_collectives(before, after, forward, backward):
    ref = Ref("x")
    with_grad = prices({ref: ACTIVATION}, differentiable=[ref])
    without = prices({ref: ACTIVATION})
    seconds = [with_grad.collective(*c, "axis0") if c else 0.0 for c in (forward, backward)]
    assert with_grad.reshard_s(ref, [(before,)], [(after,)]) == pytest.approx(sum(seconds))
    assert without.reshard_s(ref, [(before,)], [(after,)]) == pytest.approx(seconds[0])


def test_compute_waits_for_the_last_rank_at_each_collective_of_a_move():
    ref = Ref("x")
    plain = prices({ref: ACTIVATION}, differentiable=[ref])
    moves = ([(S0,)], [(R_STAR,)])  # a collective in each pass
    waiting = replace(plain, wait=lambda axis: 5.0).reshard_s(ref, *moves)
    assert waiting == pytest.approx(plain.reshard_s(ref, *moves) + 2 * 5.0)


def test_a_move_that_does_not_exist_costs_infinity():
    ref = Ref("x")
    found = prices({ref: ACTIVATION}, differentiable=[ref])
    assert found.reshard_s(ref, [(S0,)], [(P,)]) == inf
    assert found.reshard_s(ref, [(R_STAR,)], [(R,)]) == inf


def test_moves_on_two_axes_go_axis_by_axis_on_what_is_left():
    ref = Ref("x")
    found = prices({ref: ACTIVATION}, sizes=(2, 4))
    gather = found.collective(AG, NBYTES / 4, "axis0")
    gather += found.collective(AG, NBYTES, "axis1")
    assert found.reshard_s(ref, [(S0, S1)], [(R, R)]) == pytest.approx(gather)


def test_a_gradient_is_summed_over_the_axes_it_is_partial_on():
    ref = Ref("w")
    found = prices({ref: square("w").spec}, sizes=(2, 4))
    whole = 4 * WIDTH * WIDTH
    assert found.sync_s(ref, (R_STAR, S0)) == found.collective(AR, whole / 4, "axis0")
    assert found.sync_s(ref, (R, R)) == 0


# -- the ILP against every combination, priced by the moves that are emitted ----------------------


def random_graph(seed, ops=3):
    """A chain or small DAG of [batch, 8] values: layers, sums, products, activations, a mean."""
    draw = random.Random(seed)
    sources = [square("x", SourceKind.INPUT)]
    values, nodes = [Ref("x")], []
    for index in range(ops):
        kind = draw.choice(("linear", "relu", "add", "mul", "linear"))
        name = f"{kind}_{index}"
        first = draw.choice(values[-2:])
        if kind == "linear":
            weights = [s.name for s in sources if s.kind is SourceKind.PARAMETER]
            reused = weights and draw.random() < 0.3
            weight = weights[0] if reused else f"w{index}"
            if not reused:
                sources.append(square(weight))
            nodes.append(op(name, "aten.linear.default", first, Ref(weight)))
        elif kind == "relu":
            nodes.append(op(name, "aten.relu.default", first))
        else:
            nodes.append(op(name, f"aten.{kind}.Tensor", first, draw.choice(values)))
        values.append(Ref(name))
    nodes.append(op("mean", "aten.mean.default", values[-1], spec=SCALAR))
    return OpGraph(sources=tuple(sources), nodes=tuple(nodes), loss=Ref("mean"))


def graph_space(graph, sizes, limit):
    """The graph as one block on a mesh; at most `limit` options an op, to be enumerable."""
    specs, differentiable = graph.specs(), graph.differentiable()

    def strategies(node, axis):
        found = axis_strategies(node, specs, size=axis.size, batch=8)
        return found[:limit]

    return block_space(
        graph.nodes,
        tuple(MeshAxis(name=f"axis{i}", size=n) for i, n in enumerate(sizes)),
        strategies,
        parameters=[s for s in graph.sources if s.kind is SourceKind.PARAMETER],
        given={Ref("x"): (R,) * len(sizes)},
        required={},
        specs=specs,
        differentiable=differentiable,
        loss=graph.loss,
    )


def random_compute(seed):
    """Seconds of an option that depend on nothing but the option, the same from run to run."""

    def compute(node, option, prices):
        layouts = (*option.inputs, *option.outputs)
        splits = [[p if isinstance(p, Shard) else None for p in layout] for layout in layouts]
        draw = random.Random(f"{seed} {node.name} {splits}")
        return 300 * draw.random(), 300 * draw.random()

    return compute


def choice_of(node, option):
    return NodeChoice(node=node.name, inputs=option.inputs, outputs=option.outputs)


SHARES = 2


def flow_seconds(space, found, options, layouts):
    """Computing, gradient sums, and every move that the generated program makes, one by one."""
    pairs = list(zip(space.nodes, options, strict=True))
    sources = [source for source, _ in space.parameters]
    given = dict(space.given)
    given |= {Ref(s.name): layout for s, layout in zip(sources, layouts, strict=True)}
    try:
        flow = block_flow(
            space.nodes,
            {node.name: choice_of(node, option) for node, option in pairs},
            given,
            space.required,
            space.differentiable,
        )
    except KeyError:
        return inf
    return (
        sum(sum(found.compute(node, option, found)) for node, option in pairs)
        + sum(sum(found.inner_s(node, option)) for node, option in pairs)
        + sum(
            found.sync_s(Ref(s.name), layout) / SHARES
            for s, layout in zip(sources, layouts, strict=True)
        )
        + sum(sum(found.move_s(move)) for move in flow.moves())
    )


def enumerate_all(space, found):
    stored = [layouts for _, layouts in space.parameters]
    count = prod(map(len, (*space.options, *stored)))
    assert count <= 60_000, "too many to enumerate"
    return min(
        flow_seconds(space, found, options, layouts)
        for options in product(*space.options)
        for layouts in product(*stored)
    )


def solved_seconds(space, found):
    solved = solve_sharding(space, found, shares=SHARES)
    by_name = dict(solved.parameters)
    options = [
        next(o for o in offered if choice_of(node, o) == choice)
        for node, offered, choice in zip(space.nodes, space.options, solved.choices, strict=True)
    ]
    layouts = [by_name[source.fqn] for source, _ in space.parameters]
    return solved.objective, flow_seconds(space, found, options, layouts)


def priced_space(seed, sizes, limit, ops=3):
    graph = random_graph(seed, ops)
    space = graph_space(graph, sizes, limit)
    found = prices(
        space.specs,
        sizes=sizes,
        differentiable=space.differentiable,
        compute=random_compute(seed),
    )
    return space, found


@pytest.mark.parametrize("seed", range(8))
def test_on_one_axis_the_ilp_is_as_good_as_every_combination(seed):
    space, found = priced_space(seed, (4,), limit=6)
    objective, emitted = solved_seconds(space, found)
    assert objective == pytest.approx(enumerate_all(space, found))
    assert emitted == pytest.approx(objective)


@pytest.mark.parametrize("seed", range(20, 24))
def test_on_two_axes_the_ilp_is_as_good_but_for_moves_that_share_a_way(seed):
    """A value moved to two layouts may go part of the way once; the ILP pays for both."""
    space, found = priced_space(seed, (2, 2), limit=3, ops=2)
    objective, emitted = solved_seconds(space, found)
    best = enumerate_all(space, found)
    assert best <= emitted * (1 + 1e-9)
    assert emitted <= objective * (1 + 1e-9)
    assert objective <= 1.2 * best


@pytest.mark.parametrize("seed", range(40, 52))
def test_what_is_priced_is_what_is_emitted(seed):
    """On larger graphs, with everything the rules offer, where no enumeration is possible."""
    space, found = priced_space(seed, (4,), limit=None, ops=8)
    objective, emitted = solved_seconds(space, found)
    assert emitted == pytest.approx(objective)


# -- grids -----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, layers=6, hidden=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return ((x - y) ** 2).mean()


@pytest.fixture(scope="module")
def graph():
    with torch.device("meta"):
        return capture(Net(), {"x": torch.empty(4, 8), "y": torch.empty(4, 8)}).graph


@pytest.fixture(scope="module")
def chain(graph):
    return find_blocks(graph, min_blocks=6)


@pytest.fixture
def setting(graph, chain):
    def build(cluster, batch=16, pins=(), coupled=()):
        found = Setting(
            name="net",
            graph=graph,
            chain=chain,
            cluster=parse_cluster(cluster),
            global_batch=batch,
            training=Training(precision=PRECISIONS["fp32"]),
            pins=parse_pins([pin.split("=") for pin in pins], SCHEDULES),
        )
        if coupled:
            found.__dict__["batch"] = BatchAxis(strategies={}, coupled=coupled)
        return found

    return build


def degrees(found):
    return {(g.pipeline, g.batch_ranks, g.tensor) for g in found}


def test_divisors():
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(7) == (1, 7)


def test_all_degrees_of_six_devices_are_searched(setting):
    found = grids(setting("local:6"))
    assert degrees(found) == {
        (p, d, t) for p, d, t in product((1, 2, 3, 6), repeat=3) if p * d * t == 6
    }
    assert len(found) == len(set(found))


def test_micro_batches_cover_the_batch(setting):
    for grid in grids(setting("local:6", batch=10)):
        covered = grid.micro_batch * grid.batch_ranks * grid.micro_batches
        assert 10 <= covered < 10 + grid.micro_batch * grid.batch_ranks


def test_sizes_are_powers_of_two_and_the_whole(setting):
    assert list(micro_batch_sizes(setting("local:2", batch=24), stage_mesh(data=2))) == [
        (1, 12),
        (2, 6),
        (4, 3),
        (8, 2),
        (12, 1),
    ]


def test_there_is_no_largest_micro_batch(setting):
    """A sample may be as small as a vector: all of them at once may be fastest."""
    sizes = [size for size, _ in micro_batch_sizes(setting("local:1", batch=5000), stage_mesh())]
    assert sizes == [*(2**k for k in range(13)), 5000]


def test_tensor_stays_in_the_domain_of_fast_links_unless_pinned(setting):
    free = grids(setting("8x4:h100-sxm", batch=32))
    assert max(g.tensor for g in free) == 8
    pinned = grids(setting("8x4:h100-sxm", batch=32, pins=["tensor=32"]))
    assert degrees(pinned) == {(1, 1, 32)}


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        (["pipeline=2"], {(2, 1, 2), (2, 2, 1)}),
        (["data=4"], {(1, 4, 1)}),
        (["pipeline=1", "tensor=2"], {(1, 2, 2)}),
    ],
)
def test_pins_keep_the_grids_that_have_them(setting, pins, expected):
    assert degrees(grids(setting("local:4", pins=pins))) == expected


def test_a_pinned_schedule_and_micro_batch(setting):
    pins = ["schedule=gpipe", "micro_batch=3"]
    found = grids(setting("local:2", batch=12, pins=pins))
    assert {g.schedule for g in found} == {"gpipe"} and {g.micro_batch for g in found} == {3}
    counted = grids(setting("local:2", batch=12, pins=["micro_batches=3"]))
    assert {(g.batch_ranks, g.micro_batch, g.micro_batches) for g in counted} == {
        (1, 4, 3),
        (2, 2, 3),
    }


def test_a_batch_that_cannot_be_split_stays_whole(setting):
    found = grids(setting("local:4", coupled=(("norm", "statistics over the batch"),)))
    assert {(g.batch_ranks, g.micro_batch, g.micro_batches) for g in found} == {(1, 16, 1)}


@pytest.mark.parametrize(
    ("cluster", "pins", "message"),
    [
        ("local:4", ["tensor=3"], "tensor=3 does not divide 4 devices; .* 1, 2, 4$"),
        ("local:4", ["pipeline=4", "tensor=2"], "pipeline 4 x tensor 2 = 8 devices, .* has 4"),
        ("local:8", ["pipeline=2", "tensor=2", "data=1"], "= 4 devices, the cluster has 8"),
        ("local:16", ["pipeline=16"], "pipeline=16 is more than the 7 blocks"),
        ("local:32", ["data=32"], "data=32 exceeds the global batch 16"),
        ("local:32", ["tensor=1", "pipeline=1"], "every data degree left exceeds .* batch 16"),
    ],
)
def test_no_grid_is_explained_in_numbers(setting, cluster, pins, message):
    with pytest.raises(InputError, match=message):
        grids(setting(cluster, pins=pins))


def test_a_batch_that_cannot_be_split_is_named(setting):
    coupled = (("norm", "statistics over the batch"),)
    with pytest.raises(InputError, match="cannot be split: norm: statistics over the batch"):
        grids(setting("local:4", pins=["data=2"], coupled=coupled))


# -- pins ------------------------------------------------------------------------------------------


def test_pins_are_parsed_and_listed_in_a_fixed_order():
    pairs = [
        ("boundary", "layers.2"),
        ("weight:a", "S(1)"),
        ("tensor", "2"),
        ("recompute", "all"),
        ("weight:b", "S(0:4|4)"),
        ("micro_batches", "4"),
        ("zero", "2"),
        ("schedule", "gpipe"),
    ]
    pins = parse_pins(pairs, SCHEDULES)
    assert pins == Pins(
        tensor=2,
        micro_batches=4,
        schedule="gpipe",
        recompute="all",
        zero=2,
        weights=(("a", S1), ("b", Shard(0, (4, 4)))),
        boundaries=("layers.2",),
    )
    assert pins.items() == (
        ("tensor", "2"),
        ("micro_batches", "4"),
        ("schedule", "gpipe"),
        ("recompute", "all"),
        ("zero", "2"),
        ("weight:a", "S(1)"),
        ("weight:b", "S(0:4|4)"),
        ("boundary", "layers.2"),
    )
    assert parse_pins(pins.items(), SCHEDULES) == pins
    assert parse_pins([("tensor", "2"), ("tensor", "2")], SCHEDULES).tensor == 2


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("tensor", "2"), ("tensor", "4")], "tensor is given twice: 2 and 4"),
        ([("weight:a", "R"), ("weight:a", "S(0)")], r"weight:a is given twice: R and S\(0\)"),
        ([("weight:a", "Q")], "weight:a=Q: not a placement"),
        ([("weight:a", "R*")], r"weight:a=R\*: a parameter is stored as R or S"),
        ([("data", "0")], "data=0: expected a whole number of at least 1"),
        ([("zero", "4")], "zero=4: expected one of 0, 1, 2, 3"),
        ([("recompute", "some")], "recompute=some: expected one of none, selective, all"),
        ([("pipline", "2")], "unknown pin 'pipline'; did you mean pipeline?"),
        ([("q", "2")], "known pins: pipeline, data, context, tensor"),
    ],
)
def test_a_malformed_pin_is_named(pairs, message):
    with pytest.raises(InputError, match=message):
        parse_pins(pairs, SCHEDULES)


def test_a_tied_parameter_is_pinned_by_any_of_its_names():
    tied = square("embed.weight", tied=("head.weight",))
    for name in ("embed.weight", "head.weight"):
        pins = Pins(weights=((name, S0),))
        assert settle_pins(pins, [tied], ["a"]).weights == (("embed.weight", S0),)
    both = Pins(weights=(("embed.weight", S0), ("head.weight", S1)))
    with pytest.raises(InputError, match="given twice"):
        settle_pins(both, [tied], ["a"])


def test_the_hint_lists_modules_that_have_a_name():
    pins = Pins(boundaries=("encoder",))
    with pytest.raises(InputError) as caught:
        settle_pins(pins, [], ["", "layers.0", "layers.1", ""])
    assert str(caught.value).endswith("known blocks: layers.0, layers.1")


def test_a_long_list_of_names_is_cut():
    sources = [square(f"layers.{i}.weight") for i in range(100)]
    with pytest.raises(InputError, match=r"and 92 more$"):
        settle_pins(Pins(weights=(("zzz", S0),)), sources, [])


def test_a_module_is_within_itself_and_its_parents_only():
    assert within("layers.1", "layers.1") and within("layers.1.norm", "layers.1")
    assert not within("layers.10", "layers.1") and not within("layers", "layers.1")


# -- classes ---------------------------------------------------------------------------------------


def pair_chain():
    blocks = tuple(
        Block(
            index=i,
            class_index=0,
            nodes=(f"n{i}",),
            inputs=(),
            outputs=(),
            shared=(),
            parameters=(Ref(f"w{i}"),),
        )
        for i in range(4)
    )
    whole = BlockClass(index=0, name="layers", digest="d", members=(0, 1, 2, 3))
    return BlockChain(setup=(), blocks=blocks, classes=(whole,), boundaries=((),) * 3)


def test_blocks_with_other_pins_are_a_class_of_their_own():
    sources = [square(f"w{i}") for i in range(4)]
    split = split_classes(pair_chain(), sources, [("w1", S0), ("w3", S0), ("w2", R)])
    assert [(c.index, c.name, c.members) for c in split.classes] == [
        (0, "layers", (0,)),
        (1, "layers_pinned_1", (1, 3)),
        (2, "layers_pinned_2", (2,)),
    ]
    assert [block.class_index for block in split.blocks] == [0, 1, 2, 1]
    assert {c.digest for c in split.classes} == {"d"}


def test_pins_that_part_nothing_leave_the_chain_as_it_is():
    sources = [square(f"w{i}") for i in range(4)]
    chain = pair_chain()
    assert split_classes(chain, sources, []) is chain
    assert split_classes(chain, sources, [(f"w{i}", S0) for i in range(4)]) is chain


def test_a_class_is_parted_by_any_name_of_a_tied_parameter():
    sources = [square(f"w{i}", tied=(f"t{i}",)) for i in range(4)]
    split = split_classes(pair_chain(), sources, [("t2", S0)])
    assert [c.members for c in split.classes] == [(0, 1, 3), (2,)]
