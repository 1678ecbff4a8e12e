"""What a block runs again, against every set of its steps."""

from __future__ import annotations

from itertools import chain, combinations
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costs.saved import SavedExtra, SavedSet
from autopar.ir.graph import Ref
from autopar.plan.plan import Recompute
from autopar.search.copies import Step
from autopar.search.options import pinned_ways
from autopar.search.recompute import Again, RecomputeProblem, StepSeconds


class Storages:
    """A block of steps that each make one storage, by number; those below zero are given."""

    def __init__(self, reads, sizes, needed, extras):
        self.steps = [
            Step(name=f"op_{i}", reads=tuple(map(self.storage, read)), lies=(self.storage(i),))
            for i, read in enumerate(reads)
        ]
        self.sizes, self.needed, self.extras = sizes, needed, extras

    @staticmethod
    def storage(number):
        return (Ref(f"op_{number}"), ())

    def number(self, storage):
        return int(storage[0].name.removeprefix("op_"))

    def nbytes(self, storage):
        return self.sizes[self.number(storage)]

    def extra_bytes(self, extra):
        return extra.bytes_per_element

    def kept(self, saved, held):
        return {self.storage(number) for number in self.needed} - self.held(held)

    def held(self, values):
        return {(ref, ()) for ref in values}


@st.composite
def blocks(draw):
    count = draw(st.integers(1, 6))
    reads = [
        draw(st.lists(st.integers(-2, i - 1), min_size=1, max_size=2, unique=True))
        for i in range(count)
    ]
    sizes = {i: draw(st.integers(1, 9)) for i in range(-2, count)}
    needed = draw(st.sets(st.integers(-2, count - 1)))
    extras = {i: draw(st.integers(0, 5)) for i in range(count)}
    seconds = {f"op_{i}": float(draw(st.integers(0, 9))) for i in range(count)}
    held = draw(st.sets(st.sampled_from([-2, -1])))
    return SimpleNamespace(
        reads=reads, sizes=sizes, needed=needed, extras=extras, seconds=seconds, held=held
    )


def problem_of(block):
    storages = Storages(block.reads, block.sizes, block.needed, block.extras)
    extras = [
        SavedExtra(node=f"op_{i}", like=Ref("x"), bytes_per_element=size, what="mask")
        for i, size in block.extras.items()
        if size
    ]
    saved = SavedSet(values=(), extras=tuple(extras))
    held = [Ref(f"op_{number}") for number in block.held]
    seconds = {name: StepSeconds(total, total / 2) for name, total in block.seconds.items()}
    return RecomputeProblem(storages, saved, held, seconds)


def outcome(block, again):
    """Seconds and bytes of running the ops numbered `again` once more, from first principles."""
    kept = set(block.needed)
    for op in again:
        kept |= set(block.reads[op])
    kept -= set(again) | block.held
    extras = sum(size for op, size in block.extras.items() if op not in again)
    return sum(block.seconds[f"op_{op}"] for op in again), extras + sum(
        block.sizes[number] for number in kept
    )


def subsets(count):
    return chain.from_iterable(combinations(range(count), k) for k in range(count + 1))


@settings(max_examples=300, deadline=None)
@given(blocks(), st.floats(0.01, 20))
def test_no_set_of_ops_is_better_at_the_price(block, price):
    found = problem_of(block).solve(price)
    again = [int(step.removeprefix("op_")) for step in found.steps]
    assert (found.time_s, found.kept_bytes) == outcome(block, again)
    assert found.compute_s == found.time_s / 2
    read = {number for op in again for number in block.reads[op]}
    assert found.weights == {Ref(f"op_{number}") for number in read & block.held}
    best = min(
        time_s + price * size
        for time_s, size in (outcome(block, subset) for subset in subsets(len(block.reads)))
    )
    assert found.time_s + price * found.kept_bytes == pytest.approx(best)


@settings(max_examples=300, deadline=None)
@given(blocks())
def test_ways_are_supported_trade_offs_from_keeping_all_to_keeping_the_least(block):
    ways = problem_of(block).ways()
    assert ways[0].kind is Recompute.NONE and ways[0].time_s == 0
    outcomes = [outcome(block, subset) for subset in subsets(len(block.reads))]
    assert min(way.kept_bytes for way in ways) == min(size for _, size in outcomes)
    for way in ways[:-1]:  # the last makes everything again, which need not pay
        assert (
            not any(time_s < way.time_s and size <= way.kept_bytes for time_s, size in outcomes)
            or way.kind is Recompute.NONE
        )
    for way in ways:
        again = {int(step.removeprefix("op_")) for step in way.steps}
        made = {number for number in block.needed if number in again}
        assert way.made_bytes == sum(block.sizes[n] for n in made) + sum(
            block.extras[op] for op in again
        )


@settings(max_examples=100, deadline=None)
@given(blocks(), st.integers(2, 5))
def test_the_same_steps_at_other_prices(block, times):
    """Every second storage is so many times as large, every second step takes so much longer."""
    known = problem_of(block)
    known.lines()
    sizes = {n: size * (times if n % 2 else 1) for n, size in block.sizes.items()}
    seconds = {n: each * (times if n[-1] in "135" else 1) for n, each in block.seconds.items()}
    other = SimpleNamespace(**{**vars(block), "sizes": sizes, "seconds": seconds})
    storages = Storages(other.reads, sizes, other.needed, other.extras)
    found = known.at(storages, {n: StepSeconds(s, s / 2) for n, s in seconds.items()})
    assert found.ways() == problem_of(other).ways()
    assert found.lines() == problem_of(other).lines()


@settings(max_examples=100, deadline=None)
@given(blocks())
def test_a_line_is_the_least_at_its_price(block):
    outcomes = [outcome(block, subset) for subset in subsets(len(block.reads))]
    for price, least in problem_of(block).lines():
        assert least == pytest.approx(min(time_s + price * size for time_s, size in outcomes))


@settings(max_examples=200, deadline=None)
@given(blocks())
def test_the_whole_block_keeps_what_it_is_given_alone(block):
    whole = problem_of(block).whole()
    again = {int(step.removeprefix("op_")) for step in whole.steps}
    wanted = {n for n in block.needed if n >= 0} | {op for op, size in block.extras.items() if size}
    assert bool(again) == bool(wanted)
    if again:
        assert whole.kind is Recompute.FULL
        assert again >= wanted
        kept = {n for op in again for n in block.reads[op]} - again
        assert all(number < 0 for number in kept)


def test_what_only_ends_a_block_is_not_run_again():
    """The last product of a block makes what the next one is given: no backward in it reads it."""
    block = SimpleNamespace(
        reads=[[-1], [0], [1]],
        sizes={-1: 2, 0: 8, 1: 8, 2: 2},
        needed={-1, 0, 1},
        extras={},
        seconds={"op_0": 5.0, "op_1": 1.0, "op_2": 5.0},
        held=set(),
    )
    problem = problem_of(block)
    assert [way.steps for way in problem.ways()] == [(), ("op_1",), ("op_0", "op_1")]
    assert [way.kept_bytes for way in problem.ways()] == [18, 10, 2]
    assert [way.kind for way in problem.ways()] == list(Recompute)


def test_pins_choose_among_the_ways():
    none = Again(kind=Recompute.NONE, kept_bytes=9)
    some = Again(kind=Recompute.SELECTIVE, steps=("a",), time_s=1.0, kept_bytes=5)
    full = Again(kind=Recompute.FULL, steps=("a", "b"), time_s=2.0, kept_bytes=1)
    ways = (none, some, full)
    assert pinned_ways(ways, None) == ways
    assert list(pinned_ways(ways, "none")) == [none]
    assert list(pinned_ways(ways, "selective")) == [some]
    assert list(pinned_ways(ways, "all")) == [full]
    assert list(pinned_ways((none, full), "selective")) == [none]
