"""Packed projections: how a dim must be cut to be split before it is taken apart."""

from rule_graphs import Builder, spec

from autopar.ir.graph import Ref
from autopar.rules import axis_strategies, piece_hints


def _packed(sizes, *, conv1d=False, target="aten.split_with_sizes.default", arg=None):
    """A packed projection, as nn.Linear (`linear`) or as GPT-2 writes it (`addmm` on a view)."""
    total = sum(sizes)
    b = Builder()
    x = b.input("x", "batch", 16, 64)
    bias = b.parameter("bias", total)
    if conv1d:
        weight = b.parameter("weight", 64, total)
        flat = b.op("flat", "aten.view.default", x, (-1, 64), out=("16*batch", 64))
        out = b.op("proj", "aten.addmm.default", bias, flat, weight, out=("16*batch", total))
        out = b.op("back", "aten.view.default", out, out=("batch", 16, total))
    else:
        weight = b.parameter("weight", total, 64)
        out = b.op("proj", "aten.linear.default", x, weight, bias, out=("batch", 16, total))
    outs = [spec("batch", 16, size) for size in sizes]
    b.op("parts", target, out, sizes if arg is None else arg, 2, out=outs)
    return b.build()


def _text(graph, name, size):
    specs, hints = graph.specs(), piece_hints(graph)
    node = next(n for n in graph.nodes if n.name == name)
    return [str(s) for s in axis_strategies(node, specs, size=size, batch=2, hints=hints)]


def test_pieces_reach_weight_and_bias():
    hints = piece_hints(_packed((32, 16, 16)))
    assert hints == {
        (Ref("proj"), 2): (32, 16, 16),
        (Ref("weight"), 0): (32, 16, 16),
        (Ref("bias"), 0): (32, 16, 16),
    }


def test_pieces_pass_merged_batch_and_sequence():
    hints = piece_hints(_packed((32, 32, 32), conv1d=True, target="aten.split.Tensor", arg=32))
    assert hints[Ref("weight"), 1] == hints[Ref("bias"), 0] == (32, 32, 32)
    assert (Ref("x"), 2) not in hints


def test_the_split_itself_takes_only_pieces():
    graph = _packed((32, 16, 16))
    found = _text(graph, "parts", 2)
    assert "S(2:32|16|16) -> S(2), S(2), S(2)" in found
    assert not any(text.startswith("S(2) ") for text in found)
    assert "S(0) -> S(0), S(0), S(0)" in found


def test_the_projection_offers_pieces_beside_the_plain_split():
    found = _text(_packed((32, 16, 16)), "proj", 2)
    assert "R*, S(0), S(0) -> S(2)" in found
    assert "R*, S(0:32|16|16), S(0:32|16|16) -> S(2:32|16|16)" in found


def test_every_piece_must_divide():
    graph = _packed((32, 16, 6))
    assert not any("|" in text for text in _text(graph, "parts", 4))
    assert not any("|" in text for text in _text(graph, "proj", 4))
    assert any("|" in text for text in _text(graph, "parts", 2))


def test_a_projection_viewed_as_three_and_selected():
    """The way of nn.MultiheadAttention: unflatten, move the three to the front, take each."""
    b = Builder()
    x = b.input("x", "batch", 6, 16)
    weight = b.parameter("weight", 48, 16)
    out = b.op("proj", "aten.linear.default", x, weight, out=("batch", 6, 48))
    out = b.op("apart", "aten.unflatten.int", out, 2, (3, 16), out=("batch", 6, 3, 16))
    out = b.op("front", "aten.permute.default", out, (2, 0, 1, 3), out=(3, "batch", 6, 16))
    for i in range(3):
        b.op(f"part{i}", "aten.select.int", out, 0, i, out=("batch", 6, 16))
    graph = b.build()
    assert piece_hints(graph)[Ref("weight"), 0] == (16, 16, 16)
    assert "S(2:16|16|16) -> S(3)" in _text(graph, "apart", 4)
    assert "R*, S(0:16|16|16) -> S(2:16|16|16)" in _text(graph, "proj", 4)


def test_selecting_one_position_cuts_nothing():
    b = Builder()
    x = b.input("x", "batch", 6, 16)
    b.op("first", "aten.select.int", x, 1, 0, out=("batch", 16))
    assert piece_hints(b.build()) == {}


def test_pieces_scale_with_the_factors_inside():
    """(h d) cut by heads: 8 heads of queries, 2 of keys; each head is 4 wide."""
    b = Builder()
    x = b.input("x", "batch", 48)
    heads = b.op("heads", "aten.view.default", x, (-1, 12, 4), out=("batch", 12, 4))
    outs = [spec("batch", size, 4) for size in (8, 2, 2)]
    b.op("parts", "aten.split_with_sizes.default", heads, (8, 2, 2), 1, out=outs)
    graph = b.build()
    assert piece_hints(graph)[Ref("x"), 1] == (32, 8, 8)
    assert "S(1:32|8|8) -> S(1:8|2|2)" in _text(graph, "heads", 2)


def test_a_split_of_the_batch_gives_no_pieces():
    b = Builder()
    x = b.input("x", "2*batch", 4)
    b.op("parts", "aten.chunk.default", x, 2, 0, out=[spec("batch", 4), spec("batch", 4)])
    graph = b.build()
    assert piece_hints(graph) == {}
    assert not any("S(0" in text for text in _text(graph, "parts", 2))
