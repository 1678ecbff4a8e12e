"""What it takes to send values between stages whose meshes differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import permutations

from autopar.costs.collectives import axis_collective_time_s
from autopar.ir.cluster import Axis
from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import DTYPE_BYTES, Ref
from autopar.ir.precision import grad_dtype
from autopar.plan.handover import Box, boxes, messages, weight_boxes
from autopar.search.grid import Grid
from autopar.search.pricer import Pricer
from autopar.search.state import ParameterState

Places = tuple[int, int]
"""Two ranks of the pipeline, in either order."""


def handover_s(pricer: Pricer, grid: Grid, refs: Sequence[Ref], hop: Places) -> tuple[float, float]:
    """Seconds to send `refs` from the first place of a hop to the second, and their gradients back.

    A rank sends, and is sent, one message after the other: what the busiest rank takes.
    """
    back = [ref for ref in refs if ref in pricer.setting.differentiable]
    return _seconds(pricer, grid, refs, hop), _seconds(pricer, grid, back, hop[::-1])


def _seconds(pricer: Pricer, grid: Grid, refs: Sequence[Ref], hop: Places) -> float:
    here, there = (grid.ranks(place) for place in hop)
    sending, receiving = defaultdict[int, float](float), defaultdict[int, float](float)
    seconds: dict[tuple[int, int, int], float] = {}
    for ref in refs:
        have, want = (_boxes(pricer, grid, ref, place) for place in hop)
        size = DTYPE_BYTES[pricer.setting.specs[ref].dtype]
        for message in messages(have, want):
            ends = here[message.sender], there[message.receiver]
            key = (*ends, message.numel * size)
            if key not in seconds:
                seconds[key] = message_s(pricer, *key)
            sending[ends[0]] += seconds[key]
            receiving[ends[1]] += seconds[key]
    return max([*sending.values(), *receiving.values()], default=0.0)


def exchange_s(
    pricer: Pricer, grid: Grid, ref: Ref, states: Mapping[int, ParameterState]
) -> dict[int, float]:
    """Seconds, by pipeline rank, in which the ranks that hold a parameter, as in `states`, send its
    gradient to each other: what the busiest of their devices takes, one way."""
    setting = pricer.setting
    source = setting.sources[ref.name]
    shape = tuple(size.const for size in source.spec.shape)
    size = DTYPE_BYTES[grad_dtype(setting.training.precision, source.spec.dtype)]
    held = {
        place: weight_boxes(shape, state.stored or state.layout, grid.at(place).mesh)
        for place, state in states.items()
    }
    sending, receiving = defaultdict[int, float](float), defaultdict[int, float](float)
    for here, there in permutations(sorted(held), 2):
        for message in messages(held[here], held[there]):
            ends = grid.ranks(here)[message.sender], grid.ranks(there)[message.receiver]
            once_s = message_s(pricer, *ends, message.numel * size)
            sending[ends[0]] += once_s
            receiving[ends[1]] += once_s
    return {
        place: max(max(sending[rank], receiving[rank]) for rank in grid.ranks(place))
        for place in held
    }


def message_s(pricer: Pricer, sender: int, receiver: int, nbytes: int) -> float:
    """Seconds of one message between two devices."""
    first = min(sender, receiver)
    axis = Axis(name="pipeline", size=2, stride=abs(receiver - sender))
    setting = pricer.setting
    return axis_collective_time_s(
        CollectiveOp.SEND_RECV, nbytes, axis, setting.cluster, first, setting.profile
    )


def _boxes(pricer: Pricer, grid: Grid, ref: Ref, place: int) -> tuple[Box, ...]:
    own, setting = grid.at(place), pricer.setting
    samples = grid.micro_batch * grid.batch_ranks
    return boxes(setting.specs[ref].shape, samples, setting.shared(own.mesh)[ref], own.mesh)
