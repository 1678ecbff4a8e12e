"""What ranks hand over between two meshes: every rank is sent all of its own, by who has it."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.mesh import CONTEXT, DATA, TENSOR, MeshAxis
from autopar.ir.placement import R, Shard, zigzag
from autopar.ir.size import Size
from autopar.plan.handover import boxes, common, local, messages, numel, sent_by

SEQUENCE = 16
SHAPE = (Size(0, 1), Size(SEQUENCE), Size(3))


def mesh(data, context, tensor):
    named = ((DATA, data), (CONTEXT, context), (TENSOR, tensor))
    return tuple(MeshAxis(name=name, size=size) for name, size in named)


def elements(box):
    return set(product(*([i for start, n in dim for i in range(start, start + n)] for dim in box)))


@st.composite
def handovers(draw):
    """Two meshes of the same context degree, and how both lay a value out."""
    context = draw(st.sampled_from((1, 2)))
    degrees = st.sampled_from((1, 2, 3, 4))
    here, there = (mesh(draw(degrees), context, draw(degrees)) for _ in range(2))
    along = draw(st.booleans())
    pieces = zigzag(SEQUENCE, context) if draw(st.booleans()) and context > 1 else ()
    layout = (Shard(0), Shard(1, pieces) if context > 1 else R, Shard(1) if along else R)
    return here, there, layout, draw(st.integers(1, 9))


@given(case=handovers())
def test_every_rank_is_sent_each_of_its_elements_once_by_a_rank_that_has_it(case):
    here, there, layout, samples = case
    have, want = (boxes(SHAPE, samples, layout, axes) for axes in (here, there))
    sent = Counter()
    for message in messages(have, want):
        assert elements(message.box) <= elements(have[message.sender])
        sent.update((message.receiver, element) for element in elements(message.box))
    assert sent == Counter((rank, e) for rank, box in enumerate(want) for e in elements(box))


@given(case=handovers())
def test_a_box_is_found_by_its_place_in_what_a_rank_holds(case):
    here, there, layout, samples = case
    have, want = (boxes(SHAPE, samples, layout, axes) for axes in (here, there))
    for message in messages(have, want):
        held = have[message.sender]
        for own, whole, part in zip(local(message.box, held), held, message.box, strict=True):
            positions = [i for start, n in whole for i in range(start, start + n)]
            taken = [positions[k] for start, n in own for k in range(start, start + n)]
            assert taken == [i for start, n in part for i in range(start, start + n)]


@given(case=handovers())
def test_between_equal_meshes_a_rank_sends_all_to_the_one_at_its_place(case):
    here, _, layout, samples = case
    held = boxes(SHAPE, samples, layout, here)
    found = messages(held, held)
    assert [(m.sender, m.receiver, m.box) for m in found] == [
        (rank, rank, box) for rank, box in enumerate(held) if numel(box)
    ]


@given(case=handovers())
def test_what_one_rank_sends_is_what_all_messages_have_of_it(case):
    here, there, layout, samples = case
    have, want = (boxes(SHAPE, samples, layout, axes) for axes in (here, there))
    places = product(*(range(axis.size) for axis in here))
    sent = [
        (rank, box)
        for rank, place in enumerate(places)
        for box in sent_by(place, SHAPE, samples, layout, here, there)
    ]
    assert Counter(sent) == Counter((m.sender, m.box) for m in messages(have, want))


def test_ranks_that_hold_the_same_take_turns():
    layout = (Shard(0), R, R)
    have, want = (boxes(SHAPE, 4, layout, axes) for axes in (mesh(1, 1, 2), mesh(4, 1, 1)))
    ends = [(m.sender, m.receiver, m.numel) for m in messages(have, want)]
    assert ends == [(0, 0, 48), (1, 1, 48), (0, 2, 48), (1, 3, 48)]


def test_samples_that_do_not_divide_go_where_they_are_dealt():
    layout = (Shard(0), R, R)
    have, want = (boxes(SHAPE, 3, layout, axes) for axes in (mesh(2, 1, 1), mesh(1, 1, 2)))
    # two samples on the first rank, one on the second; both ranks of the other mesh want all
    assert [(m.sender, m.receiver, m.box[0]) for m in messages(have, want)] == [
        (0, 0, ((0, 2),)),
        (1, 0, ((2, 1),)),
        (0, 1, ((0, 2),)),
        (1, 1, ((2, 1),)),
    ]


def test_ranges_that_follow_each_other_are_one():
    held = boxes(SHAPE, 1, (Shard(0), Shard(1, zigzag(SEQUENCE, 2)), R), mesh(1, 2, 1))
    assert held[0][1] == ((0, 4), (12, 4))
    assert local(held[0], held[0])[1] == ((0, 8),)
    assert common(held[0], held[1])[1] == ()
