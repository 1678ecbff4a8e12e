"""What counts as the same model and the same cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import PlanMismatch
from autopar.ir.cluster import Cluster
from autopar.ir.graph import OpGraph, OpNode, Ref, Source, SourceKind, TensorSpec
from autopar.ir.size import Size
from autopar.plan.fingerprint import check_cluster, check_model, fingerprint, ops_digest
from autopar.plan.plan import NodeChoice, ParameterPlan, Variant

BATCH = Size(0, 1)


def _spec(*dims, dtype="float32"):
    return TensorSpec(shape=tuple(d if isinstance(d, Size) else Size(d) for d in dims), dtype=dtype)


def _graph():
    sources = (
        Source(
            name="p_weight",
            kind=SourceKind.PARAMETER,
            fqn="weight",
            spec=_spec(8, 4),
            trainable=True,
            tied=("head.weight",),
        ),
        Source(name="b_scale", kind=SourceKind.BUFFER, fqn="scale", spec=_spec(8)),
        Source(name="x", kind=SourceKind.INPUT, fqn="x", spec=_spec(BATCH, 4)),
    )
    nodes = (
        OpNode(
            name="linear",
            target="aten.linear.default",
            args=(Ref("x"), Ref("p_weight")),
            outputs=(_spec(BATCH, 8),),
            requires_grad=True,
            module_path="layer",
            source="model.py:3",
        ),
        OpNode(
            name="mul",
            target="aten.mul.Tensor",
            args=(Ref("linear"), Ref("b_scale")),
            outputs=(_spec(BATCH, 8),),
            requires_grad=True,
        ),
        OpNode(
            name="mean",
            target="aten.mean.dim",
            args=(Ref("mul"), (Size(0), Size(1))),
            kwargs=(("dtype", None), ("keepdim", False)),
            outputs=(_spec(),),
            requires_grad=True,
        ),
    )
    return OpGraph(sources=sources, nodes=nodes, loss=Ref("mean"), outputs=(Ref("mul"),))


def _source(graph, index, **changes):
    sources = list(graph.sources)
    sources[index] = replace(sources[index], **changes)
    return replace(graph, sources=tuple(sources))


def _node(graph, index, **changes):
    nodes = list(graph.nodes)
    nodes[index] = replace(nodes[index], **changes)
    return replace(graph, nodes=tuple(nodes))


def _renamed(graph, old, new):
    """The same program, with one op called otherwise."""

    def arg(value):
        return Ref(new, value.index) if isinstance(value, Ref) and value.name == old else value

    nodes = tuple(
        replace(node, name=new if node.name == old else node.name, args=tuple(map(arg, node.args)))
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes, outputs=tuple(map(arg, graph.outputs)))


@pytest.fixture
def plan(sample_plan):
    """A plan for `_graph`; only what `check_model` reads is meant seriously."""
    parameter = ParameterPlan(
        fqn="weight",
        shape=(8, 4),
        dtype="float32",
        layout=(),
        trainable=True,
        tied=("head.weight",),
    )
    variant = Variant(
        name="v",
        class_index=0,
        digest="",
        choices=(NodeChoice(node="linear", inputs=(), outputs=()),),
    )
    stage = replace(sample_plan.stages[0], parameters=(parameter,))
    return replace(
        sample_plan, model=fingerprint(_graph(), "toy"), stages=(stage,), variants=(variant,)
    )


def test_fields():
    found = fingerprint(_graph(), "toy")
    assert [(e.fqn, e.dtype, tuple(map(str, e.shape))) for e in found.parameters] == [
        ("weight", "float32", ("8", "4")),
        ("scale", "float32", ("8",)),
    ]
    assert [(e.fqn, tuple(map(str, e.shape))) for e in found.inputs] == [("x", ("batch", "4"))]
    assert (found.name, found.num_ops, len(found.ops_digest)) == ("toy", 3, 64)


def test_the_digest_is_fixed():
    # a change here makes every saved plan stale: raise PLAN_VERSION with it
    assert ops_digest(_graph()).startswith("a82f72defcd63c7b")


SAME = {
    "op name": lambda g: _renamed(g, "linear", "linear_7"),
    "module path": lambda g: _node(g, 0, module_path="elsewhere"),
    "source line": lambda g: _node(g, 0, source="other.py:99"),
    "order of keywords": lambda g: _node(g, 2, kwargs=(("keepdim", False), ("dtype", None))),
    "example batch": lambda g: replace(g, example_batch=7),
    "notes": lambda g: replace(g, notes=("a note",)),
}
OTHER = {
    "target": lambda g: _node(g, 1, target="aten.add.Tensor"),
    "argument": lambda g: _node(g, 2, args=(Ref("mul"), (Size(0),))),
    "true for one": lambda g: _node(g, 2, kwargs=(("dtype", None), ("keepdim", 0))),
    "float for int": lambda g: _node(g, 2, kwargs=(("dtype", None), ("keepdim", 0.0))),
    "wiring": lambda g: _node(g, 2, args=(Ref("linear"), (Size(0), Size(1)))),
    "output index": lambda g: _node(g, 2, args=(Ref("mul", 1), (Size(0), Size(1)))),
    "output shape": lambda g: _node(g, 0, outputs=(_spec(BATCH, 9),)),
    "output dtype": lambda g: _node(g, 0, outputs=(_spec(BATCH, 8, dtype="bfloat16"),)),
    "frozen op": lambda g: _node(g, 0, requires_grad=False),
    "loss": lambda g: replace(g, loss=None),
    "outputs": lambda g: replace(g, outputs=()),
    "tree": lambda g: replace(g, output_tree="[]"),
    "kind of source": lambda g: _source(g, 1, kind=SourceKind.CONSTANT),
    "trainable": lambda g: _source(g, 0, trainable=False),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
def test_equal_programs_have_one_digest(change):
    assert ops_digest(change(_graph())) == ops_digest(_graph())


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER.keys())
def test_other_programs_have_other_digests(change):
    assert ops_digest(change(_graph())) != ops_digest(_graph())


def test_the_model_it_was_made_for_is_accepted(plan):
    check_model(plan, _graph())
    check_model(plan, _node(_graph(), 0, module_path="moved", source="a.py:1"))


DIFFERENCES = {
    "shape": (
        lambda g: _source(g, 0, spec=_spec(8, 6)),
        "parameter weight: plan has [8, 4], model has [8, 6]",
    ),
    "dtype": (
        lambda g: _source(g, 0, spec=_spec(8, 4, dtype="bfloat16")),
        "parameter weight: plan has float32, model has bfloat16",
    ),
    "gone": (lambda g: _source(g, 1, fqn="gain"), "parameter scale: in the plan, not in the model"),
    "new": (
        lambda g: replace(
            g,
            sources=(
                *g.sources,
                Source(name="q", kind=SourceKind.PARAMETER, fqn="bias", spec=_spec(8)),
            ),
        ),
        "parameter bias: in the model, not in the plan",
    ),
    "untied": (
        lambda g: _source(g, 0, tied=()),
        "parameter weight, tied to: plan has head.weight, model has nothing",
    ),
    "frozen": (
        lambda g: _source(g, 0, trainable=False),
        "parameter weight, trainable: plan has True, model has False",
    ),
    "input": (
        lambda g: _source(g, 2, spec=_spec(BATCH, 5)),
        "input x: plan has [batch, 4], model has [batch, 5]",
    ),
    "an op more": (
        lambda g: replace(g, nodes=(*g.nodes, replace(g.nodes[1], name="mul_1"))),
        "number of ops: plan has 3, model has 4",
    ),
    "another op": (lambda g: _node(g, 1, target="aten.add.Tensor"), "op list: plan has digest "),
    "op names": (
        lambda g: _renamed(g, "linear", "linear_7"),
        "op linear of variant v: the model has no op of that name",
    ),
}


@pytest.mark.parametrize(("change", "message"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_the_first_difference_is_named(plan, change, message):
    with pytest.raises(PlanMismatch) as caught:
        check_model(plan, change(_graph()))
    assert str(caught.value).startswith(message)
    assert "make the plan again" in str(caught.value)


def _device(cluster, **changes):
    group = cluster.groups[0]
    return Cluster(
        groups=(replace(group, device=replace(group.device, **changes)),), links=cluster.links
    )


def test_clusters(sample_plan):
    cluster = sample_plan.cluster
    check_cluster(sample_plan, cluster)
    check_cluster(sample_plan, replace(cluster, links=cluster.links[1:]))
    check_cluster(sample_plan, _device(cluster, memory_bytes=13 * 2**30))
    small = replace(cluster, groups=(replace(cluster.groups[0], nodes=1),), spec="4:test-gpu")
    for other, message in (
        (small, r"number of devices: plan has 8 \(2x4:test-gpu\), cluster has 4 \(4:test-gpu\)"),
        (
            _device(cluster, name="other"),
            r"device of rank 0 \(stage 0\): plan has test-gpu, cluster has other",
        ),
        (_device(cluster, kind="cpu"), r"device kind of rank 0 .*: plan has cuda, cluster has cpu"),
        (
            _device(cluster, memory_bytes=10 * 2**30),
            r"memory of rank 0 \(stage 0\): plan needs 12\.5 GiB, cluster has 10 GiB",
        ),
    ):
        with pytest.raises(PlanMismatch, match=message):
            check_cluster(sample_plan, other)
