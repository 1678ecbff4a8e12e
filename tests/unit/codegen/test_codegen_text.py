"""Sizes, names, random element positions and moves as text; the folder a program is written to."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from autopar.codegen.local import Mesh, element_dims, global_count, move_text, reduced_dims
from autopar.codegen.program import write_files
from autopar.codegen.sizes import shape_text, size_text
from autopar.codegen.values import ValueNames
from autopar.errors import InputError
from autopar.ir.graph import OpNode, Ref, Size, TensorSpec
from autopar.ir.placement import (
    R_STAR,
    P,
    R,
    Shard,
    chunk_at,
    chunk_offsets,
    chunk_sizes,
    local_shape,
    local_size,
)
from autopar.ir.size import shape_at
from autopar.plan.flow import moves_between

AXES, SIZES = ("data", "tensor"), (2, 4)
MESH = Mesh(axes=AXES, sizes=SIZES)
BATCH = Size(0, 1)


def spec(*shape):
    sizes = (extent if isinstance(extent, Size) else Size(extent) for extent in shape)
    return TensorSpec(shape=tuple(sizes), dtype="float32")


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text"),
    [(Size(7), "7"), (BATCH, "batch"), (Size(0, 3), "3 * batch"), (Size(1, 2), "2 * batch + 1")],
)
def test_sizes_follow_the_batch(size, text):
    assert size_text(size) == text
    assert eval(text, {"batch": 5}) == size.at(5)


def axis(size, rank):
    """What generated source may ask of an axis."""
    return SimpleNamespace(
        share=lambda extent, pieces=(): local_size(extent, Shard(0, pieces), size, rank),
        start=lambda extent: chunk_offsets(extent, size)[rank],
    )


SHAPES = [
    (spec(BATCH, 8), (Shard(0), Shard(1)), ("batch", "2")),
    (spec(BATCH, 8), (Shard(0), R), ("batch", "8")),
    (spec(BATCH, 10, 3), (Shard(0), Shard(1)), ("batch", "tensor.share(10)", "3")),
    (spec(8, 6), (R_STAR, Shard(0, (4, 4))), ("2", "6")),
    (spec(14, 6), (R_STAR, Shard(0, (6, 4, 4))), ("tensor.share(14, (6, 4, 4))", "6")),
    (spec(9, 6), (R, Shard(0, (3, 3, 3))), ("tensor.share(9, (3, 3, 3))", "6")),
    (spec(6, 8), (Shard(0), Shard(1)), ("3", "2")),
    (spec(), (P, P), ()),
]


@pytest.mark.parametrize(("tensor", "layout", "text"), SHAPES)
def test_local_shapes_as_text(tensor, layout, text):
    assert shape_text(tensor, layout, AXES, SIZES) == text


@pytest.mark.parametrize(("tensor", "layout", "text"), SHAPES)
@pytest.mark.parametrize("rank", range(4))
def test_the_text_gives_the_shape_that_every_rank_holds(tensor, layout, text, rank):
    names = {"batch": 3, "data": axis(2, 0), "tensor": axis(4, rank)}
    found = tuple(eval(extent, dict(names)) for extent in text)
    whole = shape_at(tensor.shape, 6)
    assert found == local_shape(whole, layout, SIZES, (0, rank))


def test_an_axis_of_one_rank_cuts_nothing():
    assert shape_text(spec(5), (Shard(0),), ("tensor",), (1,)) == ("5",)


# -- values ----------------------------------------------------------------------------------------


def test_names_are_identifiers_and_unique():
    names = ValueNames(("tensor",), set())
    hints = ["a", "a", "a.b", "1x", "class", "w", "batch", "tensor", "", "a"]
    found = [names.fresh(hint) for hint in hints]
    assert len(set(found)) == len(found)
    assert all(name.isidentifier() for name in found)
    assert found[:3] == ["a", "a_2", "a_b"] and found[-1] == "a_3"
    assert not {"class", "w", "batch", "tensor"} & set(found)


def test_a_value_without_gradient_has_one_replicated_form():
    names = ValueNames((), {Ref("x")})
    names.bind(Ref("y"), (R,), "y")
    names.bind(Ref("x"), (R,), "x")
    assert names[Ref("y"), (R_STAR,)] == "y"
    with pytest.raises(KeyError):
        names[Ref("x"), (R_STAR,)]


# -- positions of random elements ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "layout", "text"),
    [
        (spec(6), (R, R), "((0, 1),)"),
        (spec(6), (R, Shard(0)), "((tensor.start(6), 1),)"),
        (spec(BATCH, 8), (Shard(0), R), "((ctx.sample_offset, 8), (0, 1))"),
        (spec(BATCH, 8), (Shard(0), Shard(1)), "((ctx.sample_offset, 8), (tensor.start(8), 1))"),
        (spec(Size(0, 4), 8), (Shard(0), R), "((4 * ctx.sample_offset, 8), (0, 1))"),
        (spec(5, BATCH, 8), (R, R), "((0, 8 * ctx.global_batch), (ctx.sample_offset, 8), (0, 1))"),
        (
            spec(BATCH, 9),
            (R, Shard(1, (3, 6))),
            "((ctx.sample_offset, 9), (tensor.ranges(9, (3, 6)), 1))",
        ),
    ],
)
def test_where_the_elements_of_a_local_tensor_are_in_the_whole(tensor, layout, text):
    assert element_dims(tensor, layout, MESH) == text


@pytest.mark.parametrize("rank", range(4))
def test_element_positions_are_those_of_the_whole_tensor(rank):
    """Positions of all local elements, added up from the text, against the flat index."""
    tensor, layout = spec(BATCH, 10, 3), (Shard(0), Shard(1))
    batch, offset = 4, 1
    context = SimpleNamespace(sample_offset=offset, global_batch=batch)
    dims = eval(element_dims(tensor, layout, MESH), {"ctx": context, "tensor": axis(4, rank)})
    local = local_shape((2 * batch, 10, 3), layout, SIZES, (0, rank))[1:]
    found = [
        sum((start + i) * stride for (start, stride), i in zip(dims, (0, j, k), strict=True))
        for j in range(local[0])
        for k in range(local[1])
    ]
    first = chunk_offsets(10, 4)[rank]
    assert found == [
        (offset * 10 + first + j) * 3 + k for j in range(local[0]) for k in range(local[1])
    ]


def test_counts_are_those_of_the_whole_batch():
    tensor = spec(BATCH, 8, 3)
    assert global_count(tensor, (0, 1)) == "8 * ctx.global_batch"
    assert global_count(tensor, (1, 2)) == "24"
    assert global_count(tensor, (0,)) == "ctx.global_batch"
    assert global_count(spec(Size(1, 2)), (0,)) == "(2 * ctx.global_batch + 1)"


@pytest.mark.parametrize(
    ("target", "args", "dims"),
    [
        ("aten.mean.default", (), (0, 1, 2)),
        ("aten.mean.dim", ((-1,),), (2,)),
        ("aten.sum.dim_IntList", ((0, -2), True), (0, 1)),
        ("aten.sum.dim_IntList", (None,), (0, 1, 2)),
    ],
)
def test_the_dims_of_a_reduction(target, args, dims):
    node = OpNode(name="n", target=target, args=(Ref("x"), *args), outputs=(spec(),))
    assert reduced_dims(node, 3) == dims


# -- moves -----------------------------------------------------------------------------------------

PACKED = Shard(1, (4, 4))


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (P, R, "comm.sum_partial(x, tensor)"),
        (R, R_STAR, "comm.sum_gradient(x, tensor)"),
        (R, Shard(1), "comm.take_shard(x, tensor, 1)"),
        (R, PACKED, "comm.take_shard(x, tensor, 1, (4, 4))"),
        (P, Shard(1), "comm.sum_and_scatter(x, tensor, 1)"),
        (Shard(1), R, "comm.gather(x, tensor, 1, 8)"),
        (PACKED, R, "comm.gather(x, tensor, 1, 8, (4, 4))"),
        (Shard(2), R, "comm.gather(x, tensor, 2, 6)"),
        (Shard(1), Shard(2), "comm.exchange(x, tensor, 1, 2, 8)"),
        (PACKED, Shard(2), "comm.exchange(x, tensor, 1, 2, 8, src_pieces=(4, 4))"),
        (Shard(2), PACKED, "comm.exchange(x, tensor, 2, 1, 6, dst_pieces=(4, 4))"),
    ],
)
def test_a_move_is_a_call_of_the_function_of_its_name(before, after, text):
    tensor = spec(BATCH, 8, 6)
    (move,) = moves_between(Ref("x"), (Shard(0), before), (Shard(0), after), differentiable=True)
    assert move_text(move, "x", tensor, MESH) == text


def test_a_gathered_dim_that_another_axis_splits_has_what_is_left_of_it():
    mesh = Mesh(axes=("a", "b"), sizes=(2, 4))
    (move,) = moves_between(Ref("x"), (Shard(0), R), (R, R), differentiable=True)
    assert move_text(move, "x", spec(8, 6), mesh) == "comm.gather(x, a, 0, 8)"


# -- the folder ------------------------------------------------------------------------------------


class Broken(dict):
    """Files of which the second cannot be made."""

    def items(self):
        yield "plan.json", "{}"
        raise RuntimeError("broken")


def listing(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_program_is_written_whole_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError, match="broken"):
        write_files(Broken(), tmp_path / "program")
    assert listing(tmp_path) == []


def test_a_failed_rewrite_leaves_the_program_that_was_there(tmp_path):
    target = tmp_path / "program"
    write_files({"plan.json": "{}", "stage_0.py": "old"}, target)
    with pytest.raises(RuntimeError, match="broken"):
        write_files(Broken(), target)
    assert listing(tmp_path) == ["program"]
    assert (target / "stage_0.py").read_text() == "old"


def test_a_rewrite_leaves_nothing_of_the_program_before(tmp_path):
    target = tmp_path / "program"
    write_files({"plan.json": "{}", "stage_0.py": "", "stage_1.py": ""}, target)
    write_files({"plan.json": "{}", "stage_0.py": "new"}, target)
    assert listing(target) == ["plan.json", "stage_0.py"]
    assert listing(tmp_path) == ["program"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "program").mkdir()
    write_files({"plan.json": "{}"}, tmp_path / "program")
    assert listing(tmp_path / "program") == ["plan.json"]


@pytest.mark.parametrize("where", ["notes", "missing/program", "notes/mine.txt"])
def test_what_is_no_program_is_not_written_over(tmp_path, where):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        write_files({"plan.json": "{}"}, tmp_path / where)
    assert listing(tmp_path) == ["notes"]
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(("size", "parts"), [(10, 4), (3, 8), (0, 2), (128, 128), (7, 1)])
def test_a_chunk_by_itself_is_the_one_among_all(size, parts):
    starts, sizes = chunk_offsets(size, parts), chunk_sizes(size, parts)
    found = [chunk_at(size, parts, rank) for rank in range(parts)]
    assert found == list(zip(starts, sizes, strict=True))
