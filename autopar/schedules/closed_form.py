"""Step times of flush schedules without running them, to rank and prune candidates by.

One stage per rank, communication overlapped, as `simulate` does it. F, B are a stage's forward and
backward times, T = F + B, S the two sends of a boundary together, M micro-batches, P stages. The
first micro-batch goes through everything: `sum T + sum S`. Each further one adds

- GPipe: `max(F, forward sends) + max(B, backward sends)`, the two phases being flow shops. This is
  exact. (It equals `max T` only where one stage has both the longest forward and backward.)
- 1F1B: `R`, the longest mean over a window of neighbouring stages, `(sum T + sum S) / stages`.
  1F1B holds no more than P - k micro-batches in flight from stage k on, so that j - k + 1 of them
  share each round trip through stages k..j; sends are in that round trip even though they overlap
  with compute. Without sends R is `max T`. Where links are slower than compute, the ends of the
  window may turn around in the link instead.

The form for 1F1B is exact for equal stages with equal sends no longer than F or B, if there are
none or P divides M - 1; with sends and other M it is above by less than one T + S. In general it is
an upper bound where `max F + max B <= R` (the backward being the same multiple of the forward on
every stage, say), and the step never exceeds it by more than
`(min(P, M) - 1) * (max F + max B - R)`, with sends counted into both maxima. It is loose where M is
small and a slow early stage hides the later ones. These statements on 1F1B are held by property
tests against the simulation, not proven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from autopar.errors import InputError
from autopar.schedules.timeline import StageTimes


def _sends(times: StageTimes) -> tuple[tuple[float, ...], tuple[float, ...]]:
    none = (0.0,) * (times.num_stages - 1)
    return times.send_forward_s or none, times.send_backward_s or none


def _traversal_s(times: StageTimes) -> float:
    """One micro-batch alone: forward through all stages and back."""
    forward_s, backward_s = _sends(times)
    return sum((*times.forward_s, *times.backward_s, *forward_s, *backward_s))


def gpipe_period_s(times: StageTimes) -> float:
    """Seconds that GPipe takes for each micro-batch after the first."""
    send_forward_s, send_backward_s = _sends(times)
    return max(times.forward_s + send_forward_s) + max(times.backward_s + send_backward_s)


def one_f_one_b_period_s(times: StageTimes) -> float:
    """Seconds between micro-batches in the steady state of 1F1B: R above."""
    send_forward_s, send_backward_s = _sends(times)
    forward_s, backward_s = times.forward_s, times.backward_s
    out_s, back_s = (*send_forward_s, 0.0), (0.0, *send_backward_s)
    period_s = 0.0
    for first in range(times.num_stages):
        alone_s = max(forward_s[first] + backward_s[first], out_s[first] + back_s[first])
        period_s = max(period_s, alone_s)
        round_trip_s = backward_s[first] + max(forward_s[first], back_s[first])
        for last in range(first + 1, times.num_stages):
            round_trip_s += out_s[last - 1] + back_s[last]
            turned_s = round_trip_s + forward_s[last] + max(backward_s[last], out_s[last])
            period_s = max(period_s, turned_s / (last - first + 1))
            round_trip_s += forward_s[last] + backward_s[last]
    return period_s


PERIODS: dict[str, Callable[[StageTimes], float]] = {
    "gpipe": gpipe_period_s,
    "1f1b": one_f_one_b_period_s,
}
"""Schedule name to the time that each micro-batch after the first adds."""


def flush_step_s(times: StageTimes, num_micro_batches: int, schedule: str = "1f1b") -> float:
    """Step time by the closed form of a schedule; see the module for how close it is.

    Raises InputError for a schedule without a closed form: simulate it.
    """
    if schedule not in PERIODS:
        raise InputError(
            f"no closed form for schedule {schedule!r} (there is one for {', '.join(PERIODS)}); "
            "simulate it instead"
        )
    return _traversal_s(times) + (num_micro_batches - 1) * PERIODS[schedule](times)


def flush_step_lower_bound_s(
    times: StageTimes, num_micro_batches: int, stage_rank: Sequence[int] | None = None
) -> float:
    """What no flush schedule can beat, whatever its order.

    `stage_rank` is the rank of each stage, by default one stage per rank. A rank works for all its
    stages and micro-batches; before its first action and after its last backward there is the way
    to its first stage and back. Where the parts of a backward are given, a stage may run them
    apart: only the input part is on the way back, and weight parts may come after it.
    """
    stages = range(times.num_stages)
    ranks = tuple(stages) if stage_rank is None else tuple(stage_rank)
    crosses = [ranks[i] != ranks[i + 1] for i in stages[:-1]]
    out_s, back_s = (
        [s * crossing for s, crossing in zip(sends, crosses, strict=True)]
        for sends in _sends(times)
    )
    input_s, late_s = _backward_parts(times)
    there_s, return_s = _ways_s(times.forward_s, out_s), _ways_s(input_s, back_s)
    bound_s = there_s[-1] + return_s[-1] + times.forward_s[-1] + input_s[-1] + late_s[0]
    for rank in set(ranks):
        mine = [stage for stage in stages if ranks[stage] == rank]
        first = mine[0]
        turned_s = num_micro_batches * sum(times.forward_s[i] + input_s[i] for i in mine)
        done_s = turned_s + num_micro_batches * sum(late_s[i] for i in mine)
        tail_s = return_s[first] + late_s[0]
        bound_s = max(bound_s, there_s[first] + turned_s + tail_s, there_s[first] + done_s)
    return bound_s


def _ways_s(stage_s: Sequence[float], hop_s: Sequence[float]) -> list[float]:
    """Per stage, the time between it and the first end of the pipeline."""
    return list(accumulate((s + hop for s, hop in zip(stage_s, hop_s, strict=False)), initial=0.0))


def _backward_parts(times: StageTimes) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The least that another rank must wait for in a backward, and the least of the rest."""
    whole_s, parts_s = times.backward_s, (times.backward_input_s, times.backward_weight_s)
    if not times.backward_input_s:
        return whole_s, (0.0,) * times.num_stages
    least_s = tuple(map(sum, zip(*parts_s, strict=True)))
    input_s = parts_s[0]
    if whole_s:
        least_s, input_s = (tuple(map(min, whole_s, each)) for each in (least_s, input_s))
    return input_s, tuple(all_s - part_s for all_s, part_s in zip(least_s, input_s, strict=True))
