"""The blocks of a rank spread over its stages: equal stages keep a schedule in step.

Which stage of a rank runs a block makes no difference to the rank's time, so the objective is the
same; but a stage that is longer than its neighbours' holds up whoever waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from solvers.partition_problem import BlockOption, PartitionProblem

_LESS = 1 - 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A block (class, option) at a stage, and the stages of its rank that could as well run it."""

    at: int
    reach: tuple[int, ...]
    block: tuple[int, int]


def spread(
    problem: PartitionProblem, free_bytes: float, blocks: Sequence[Block]
) -> list[tuple[int, tuple[int, int]]]:
    """(stage, block) of every block of one rank, moved where that makes its stages more equal: from
    a stage to one that is shorter by more than the block, as far as `free_bytes` allow."""
    at = [block.at for block in blocks]
    option = [problem.classes[kind][index] for kind, index in (b.block for b in blocks)]
    transient = max((o.transient_bytes for o in option), default=0.0)
    times = {k: 0.0 for block in blocks for k in (block.at, *block.reach)}
    if len({problem.time_scale[k] for k in times}) > 1:  # then it does make a difference
        return [(block.at, block.block) for block in blocks]
    for stage, own in zip(at, option, strict=True):
        times[stage] += own.time_s
    used = transient + math.fsum(_held(problem, s, o) for s, o in zip(at, option, strict=True))
    for _ in range(len(blocks) ** 2):
        best = (0.0, 0, 0, 0.0)
        for index, (block, own) in enumerate(zip(blocks, option, strict=True)):
            source = at[index]
            for target in block.reach:
                # half of how much less the sum of squared times is
                gain = own.time_s * (_LESS * times[source] - times[target] - own.time_s)
                if gain <= best[0]:
                    continue
                more = _held(problem, target, own) - _held(problem, source, own)
                if used + more <= free_bytes:
                    best = (gain, index, target, more)
        if not best[0]:
            break
        _, index, target, more = best
        source, own = at[index], option[index]
        times[source] -= own.time_s
        times[target] += own.time_s
        at[index] = target
        used += more
    return [(stage, block.block) for stage, block in zip(at, blocks, strict=True)]


def _held(problem: PartitionProblem, stage: int, option: BlockOption) -> float:
    return option.static_bytes + problem.in_flight[stage] * option.saved_bytes
