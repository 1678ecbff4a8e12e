"""Working sets on graphs small enough to follow by hand."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.costs.saved import saved_refs
from autopar.costs.strides import is_view, trace_storage
from autopar.costs.transient import BlockWalk, RunBlock, RunStep, workspaces
from autopar.ir.graph import DTYPE_BYTES, OpNode, Ref, TensorSpec
from autopar.ir.size import Size


def spec(*shape, dtype="float32"):
    return TensorSpec(shape=tuple(map(Size, shape)), dtype=dtype)


def node(name, target, *args, out=None, grad=True):
    return OpNode(
        name=name,
        target=target,
        args=args,
        outputs=(out or spec(100),),
        requires_grad=grad,
    )


def whole_steps(nodes, specs, storage, saved, differentiable, numel):
    """The steps of nodes whose values lie whole, under their own names."""
    kept, extras, roots = {}, {}, {}
    for name, ref in saved.kept:
        kept.setdefault(name, []).append(storage.base(ref))
    for extra in saved.extras:
        size = numel(extra.like) * extra.bytes_per_element
        extras[extra.node] = extras.get(extra.node, 0) + size
    steps = []
    for n in nodes:
        out, reads = Ref(n.name), n.inputs()
        viewed = is_view(n.target) and storage.base(out) != out
        if viewed and numel(out) == numel(reads[0]):
            roots[out] = roots.get(reads[0], reads[0])
        grads = [tuple(roots.get(r, r) for r in refs if r in differentiable and n.requires_grad)
                 for refs in ((out,), reads)]  # fmt: skip
        steps.append(
            RunStep(
                name=n.name,
                reads=tuple(map(storage.base, reads)),
                makes=() if viewed else (out,),
                keeps=tuple(kept.get(n.name, ())),
                kept_bytes=extras.get(n.name, 0),
                takes=grads[0],
                gives=grads[1],
                works_bytes=workspaces(n, numel, specs),
            )
        )
    return tuple(steps), roots


def walk(nodes, sources, outputs=(), parameters=(), grads=None, *, numel=None, again=(), kept=None):
    specs = dict(sources) | {Ref(n.name): n.outputs[0] for n in nodes}
    differentiable = {ref for ref, s in specs.items() if s.is_floating} if grads is None else grads
    numel = numel or (lambda ref: prod(s.const for s in specs[ref].shape))
    storage = trace_storage(nodes, specs)
    saved = saved_refs(nodes, specs, differentiable, storage=storage, exclude=sources)
    saved = replace(saved, kept=tuple(p for p in saved.kept if storage.base(p[1]) not in sources))
    steps, roots = whole_steps(nodes, specs, storage, saved, differentiable, numel)
    block = RunBlock(
        steps=tuple(replace(s, reads=tuple(r for r in s.reads if r not in sources)) for s in steps),
        nbytes=lambda ref: numel(ref) * DTYPE_BYTES[specs[ref].dtype],
        outputs=frozenset(map(storage.base, outputs)),
        output_gradients=frozenset(roots.get(r, r) for r in outputs if r in differentiable),
        parameters=frozenset(parameters),
    )
    return BlockWalk(block).peaks(kept, again)


X, A, B, C, D = map(Ref, "xabcd")
ONE = 400  # bytes of 100 float32


def test_values_die_at_their_last_reader():
    chain = [
        node("a", "aten.add.Tensor", X, 1),
        node("b", "aten.add.Tensor", A, 1),
        node("c", "aten.add.Tensor", B, 1),
        node("d", "aten.add.Tensor", C, 1),
    ]
    found = walk(chain, {X: spec(100)}, outputs=(D,))
    assert found.forward_bytes == 2 * ONE
    assert found.backward_bytes == 2 * ONE
    held = [*chain[:3], node("d", "aten.add.Tensor", C, A)]
    assert walk(held, {X: spec(100)}, outputs=(D,)).forward_bytes == 3 * ONE


def test_saved_values_stay_until_the_backward_of_what_saved_them():
    """Both results are saved; the second is gone when the gradient of the first input is made."""
    nodes = [node("a", "aten.exp.default", X), node("b", "aten.exp.default", A)]
    found = walk(nodes, {X: spec(100)}, outputs=(B,))
    assert found.forward_bytes == 2 * ONE
    assert found.backward_bytes == 4 * ONE  # a, b and both gradients
    assert walk(nodes[:1], {X: spec(100)}, outputs=(A,)).backward_bytes == 3 * ONE


def test_gradients_that_came_with_a_message_stay_to_the_end_of_a_stage():
    chain = [
        node("a", "aten.exp.default", X),
        node("b", "aten.add.Tensor", A, 1),
        node("c", "aten.add.Tensor", B, 1),
    ]
    found = walk(chain, {X: spec(100)}, outputs=(C,))
    for within, end in (
        (found.backward_bytes, found.at(end=True).backward_bytes),
        (found.first_backward_bytes, found.at(end=True).first_backward_bytes),
        (found.split_bytes, found.at(end=True).split_bytes),
    ):
        assert within == 3 * ONE  # a, and two gradients
        assert end == 4 * ONE
    assert found.at(end=False) == found


def test_a_returned_gradient_that_others_are_added_to_stays_beside_the_sum():
    """The sum is a tensor of its own, which goes when the gradient of `a` is made."""
    chain = [
        node("a", "aten.add.Tensor", X, 1),
        node("b", "aten.add.Tensor", A, 1),
    ]
    found = walk(chain, {X: spec(100)}, outputs=(A, B))
    assert found.backward_bytes == 3 * ONE  # two that came, and the sum
    assert found.at(end=True).backward_bytes == 4 * ONE  # and that of `x`


def test_what_runs_again_is_not_kept_by_the_forward():
    nodes = [node(n, "aten.exp.default", r) for n, r in zip("abcd", (X, A, B, C), strict=True)]
    found = walk(nodes, {X: spec(100)}, (D,), again=("a", "b", "c", "d"), kept=frozenset())
    assert found.forward_bytes == 2 * ONE
    # all four again, and the gradient that waits; then one gradient more
    assert found.backward_bytes == 6 * ONE


def test_one_walk_tells_the_peaks_for_whatever_is_kept():
    """x (400) is given, three steps make a, b and c of 100, 200 and 400; the backward reads b."""
    sizes = {"x": 400, "a": 100, "b": 200, "c": 400, "outside": 50}
    steps = (
        RunStep(name="a", reads=("x",), makes=("a",)),
        RunStep(name="b", reads=("a",), makes=("b",), keeps=("b",), kept_bytes=7),
        RunStep(name="c", reads=("b",), makes=("c",)),
    )
    given, out = frozenset("x"), frozenset("c")
    walk = BlockWalk(RunBlock(steps=steps, nbytes=sizes.__getitem__, inputs=given, outputs=out))
    alone = walk.peaks(set())
    assert (alone.forward_bytes, alone.backward_bytes) == (400 + 200 + 400 + 7, 200 + 7)
    kept = walk.peaks({"a", "outside"}, ("b",))
    assert kept.forward_bytes == 400 + 100 + 200 + 400 + 50
    assert kept.backward_bytes == 400 + 100 + 200 + 400 + 50 + 7  # b is made once more
    assert walk.peaks(set()) == alone


def test_views_take_no_room():
    nodes = [
        node("a", "aten.add.Tensor", X, 1),
        node("b", "aten.view.default", A, (10, 10), out=spec(10, 10)),
        node("c", "aten.add.Tensor", B, 1, out=spec(10, 10)),
    ]
    found = walk(nodes, {X: spec(100)}, outputs=(C,))
    assert found.forward_bytes == 2 * ONE
    assert found.backward_bytes == 2 * ONE


def test_a_second_gradient_is_held_beside_the_first():
    nodes = [
        node("a", "aten.add.Tensor", X, 1),
        node("b", "aten.exp.default", A),
        node("c", "aten.sum.default", B, out=spec()),
        node("d", "aten.sum.default", A, out=spec()),
        node("e", "aten.add.Tensor", C, D, out=spec()),
    ]
    # while b runs backward: b itself, gradients of b and of a (through d), b's share of a's
    assert walk(nodes, {X: spec(100)}, outputs=(Ref("e"),)).backward_bytes == 4 * ONE


def test_parameter_gradients_are_dropped_when_added():
    u, v, w = map(Ref, "uvw")
    sources = {ref: spec(100) for ref in (X, u, v, w)}
    nodes = [
        node("a", "aten.mul.Tensor", X, u),
        node("b", "aten.mul.Tensor", A, v),
        node("c", "aten.mul.Tensor", B, w),
    ]
    found = walk(nodes, sources, (C,), (u, v, w), {A, B, C, u, v, w})
    # a and b are saved; gradients of c, b and w
    assert found.backward_bytes == 5 * ONE
    # then a, the gradients of b, a and v, and that of w, which stays where none was
    assert found.first_backward_bytes == 5 * ONE
    more = [*nodes, node("d", "aten.mul.Tensor", C, w), node("e", "aten.mul.Tensor", D, v)]
    first = walk(more, sources, (Ref("e"),), (u, v, w), {A, B, C, D, Ref("e"), u, v, w})
    assert (first.backward_bytes, first.first_backward_bytes) == (7 * ONE, 7 * ONE)


def test_gradients_of_parameters_stay_where_they_are_the_first():
    wide, u = spec(1000), Ref("u")
    v = Ref("v")
    sources = {X: spec(100), u: wide, v: wide}
    nodes = [node("a", "aten.mul.Tensor", X, u), node("b", "aten.mul.Tensor", A, v)]
    found = walk(nodes, sources, (B,), (u, v), {A, B, u, v})
    # a, which is saved, gradients of b, a and v; then gradients of a, u and v
    assert found.backward_bytes == (1 + 1 + 1 + 10) * ONE
    assert found.first_backward_bytes == (1 + 10 + 10) * ONE


def test_nodes_without_gradient_need_nothing_backward():
    nodes = [node("a", "aten.add.Tensor", X, 1, grad=False)]
    assert walk(nodes, {X: spec(100)}, grads=set()).backward_bytes == 0


class Head(nn.Module):
    def __init__(self, width, vocab):
        super().__init__()
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, x, target):
        return F.cross_entropy(self.head(x), target)


def test_the_loss_head_holds_logits_and_their_gradient(graphs):
    """Vocabulary 32000, 64 wide, 512 tokens: the end stage's working set in fp32."""
    inputs = torch.randn(512, 64), torch.zeros(512, dtype=torch.long)
    graph = graphs.to_graph(Head(64, 32000), *inputs)
    numel = graphs.numel_of(graph)
    sources = {Ref(s.name): s.spec for s in graph.sources}
    parameters = graphs.owned(graph)
    found = walk(graph.nodes, sources, (), parameters, graph.differentiable(), numel=numel)
    logits = 512 * 32000 * 4
    # log softmax, which is saved, its gradient and that of the logits
    assert 3 * logits <= found.backward_bytes <= 3.2 * logits


def test_a_narrow_loss_works_in_float32():
    logits, target = spec(10, 50, dtype="bfloat16"), spec(10, dtype="int64")
    nodes = [
        node("a", "aten.add.Tensor", X, 1, out=logits),
        node("b", "autopar.cross_entropy_sum.default", A, Ref("t"), -100, 0.0, out=spec()),
    ]
    found = walk(nodes, {X: logits, Ref("t"): target}, outputs=(B,), grads={A, B})
    # logits, what is saved, and the wide copy or the softmax
    assert found.forward_bytes == 500 * (2 + 4 + 4) + 4
    assert found.backward_bytes == 500 * (2 + 4 + 4) + 4


@pytest.mark.parametrize(
    ("dtype", "size", "ahead", "back"), [("float32", 4, 0, 4), ("bfloat16", 2, 8, 12)]
)
def test_a_batch_norm_works_in_float32(dtype, size, ahead, back):
    """Its input is saved; the normed values are made once more in the backward."""
    x = spec(6, 5, 4, dtype=dtype)
    nodes = [
        node("a", "aten.add.Tensor", X, 1, out=x),
        node("b", "autopar.batch_norm.default", A, *(None,) * 5, 0.1, 1e-5, out=x),
    ]
    found = walk(nodes, {X: x}, outputs=(B,), grads={A, B})
    assert found.forward_bytes == 120 * (2 * size + ahead)
    assert found.backward_bytes == 120 * (3 * size + back)


def test_a_fused_loss_makes_no_softmax_beside_its_gradient():
    logits, labels = Ref("logits"), Ref("labels")
    specs = {logits: spec(8, 1000, dtype="bfloat16"), labels: spec(8, dtype="int64")}
    loss = node("loss", "aten.cross_entropy_loss.default", logits, labels, out=spec())
    sizes = {logits: 8000, labels: 8}
    assert workspaces(loss, sizes.__getitem__, specs) == (0, 4 * 8000)
    assert workspaces(loss, sizes.__getitem__, specs, fuses_loss=True) == (0, 0)
