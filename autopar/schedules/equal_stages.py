"""Bubble and micro-batches in flight in closed form, for stages of equal times and free messages.

p ranks with v stages each, M micro-batches; F, I, W are the times of one stage's forward and of the
input and weight part of its backward, B = I + W. The bubble is the step time less the work of a
rank, which is the same for all. Sources:

| schedule                | bubble                        | stages in flight on rank i   |
|-------------------------|-------------------------------|------------------------------|
| gpipe                   | (p-1)(F+B) [1]                | M                            |
| 1f1b                    | (p-1)(F+B) [2]                | p-i [2]                      |
| interleaved-1f1b        | (p-1)(F+B) [3]                | 2(p-1-i) + (v-1)g + 1 [4]    |
| looped-bfs              | (p-1)(F+B) [5]                | v M [5]                      |
| zb-h1, interleaved-zb   | (p-1)(F+I-W) [6]              | p + (v-1)g [6]               |
| zbv                     | (p-1)F where F=I=W [7]        | 2p [7]                       |
| dualpipev               | up to (p-1)(F+B+B-3W) [8]     | 2p+1 [8]                     |
| pipedream               | 0 [9]                         | p-i [9]                      |

F and B are of one stage, a v-th of the rank's work: so (p-1)(F+B) is (p-1)/(vM+p-1) of the step.
g is the size of the largest group of micro-batches, p where p divides M. No rank holds more than
v M. The bubble of [6] is for W no longer than F and I; in general it is (p-1) max(F, I, F+I-W).
Between its first and last action no rank of [7] idles; the (p-1)F are the ranks starting one after
the other. The bubble of [8] is F&B + B - 3W there, with nothing gained from running a forward and a
backward at once (F&B = F+B); ours does not exceed it where W <= I and F <= B.

[1] Huang et al., 2019, arXiv:1811.06965, section 2.3.
[2] Narayanan et al., 2021, arXiv:2006.09503, section 3.2.
[3] Narayanan et al., 2021, arXiv:2104.04473, section 2.2.2.
[4] Korthikanti et al., 2022, arXiv:2205.05198, section 4.2.3: 1 + (p-1)/(pv) of 1F1B on rank 0.
[5] Lamy-Poirier, 2022, arXiv:2211.05953.
[6] Qi et al., 2023, arXiv:2401.10241, table 2, whose T_B is I here.
[7] Qi et al., 2024, arXiv:2405.15362.
[8] DeepSeek-AI, 2024, arXiv:2412.19437, table 2, for half as many ranks.
[9] Narayanan et al., 2019, SOSP, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import InputError
from autopar.schedules.interleaved import group_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """Seconds of one stage for one micro-batch."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """`hop_s` is what each rank after the first adds to the bubble.

    It does so from `full(p)` micro-batches on, and for times that `holds` is true of.
    """

    hop_s: Callable[[StageWork], float]
    full: Callable[[int], int] = lambda p: p
    holds: Callable[[StageWork], bool] = lambda work: True
    condition: str = ""


def _any_number(num_ranks: int) -> int:
    return 1


def _split_hop_s(work: StageWork) -> float:
    forward_s, input_s, weight_s = work.forward_s, work.backward_input_s, work.backward_weight_s
    return max(forward_s, input_s, forward_s + input_s - weight_s)


def _equal(work: StageWork) -> bool:
    return work.forward_s == work.backward_input_s == work.backward_weight_s


_FORMS: dict[str, _Form] = {
    "gpipe": _Form(hop_s=lambda work: work.total_s, full=_any_number),
    "1f1b": _Form(hop_s=lambda work: work.total_s, full=_any_number),
    "interleaved-1f1b": _Form(hop_s=lambda work: work.total_s),
    "looped-bfs": _Form(hop_s=lambda work: work.total_s),
    "zb-h1": _Form(hop_s=_split_hop_s),
    "interleaved-zb": _Form(hop_s=_split_hop_s),
    "zbv": _Form(
        hop_s=lambda work: work.forward_s,
        full=lambda p: 2 * p - 1,
        holds=_equal,
        condition="forward, input and weight part take equally long",
    ),
    "pipedream": _Form(hop_s=lambda work: 0.0),
}


def bubble_s(schedule: str, num_ranks: int, num_micro_batches: int, work: StageWork) -> float:
    """Seconds of a step in which a rank does not compute: exactly what the simulation gives.

    Raises InputError where there is no closed form for the schedule or the sizes: simulate it.
    """
    form = _FORMS.get(schedule)
    if form is None:
        reason = f"there is one for {', '.join(_FORMS)}"
    elif num_micro_batches < form.full(num_ranks):
        reason = f"with {num_ranks} ranks it holds from {form.full(num_ranks)} micro-batches on"
    elif not form.holds(work):
        reason = f"it holds where {form.condition}"
    else:
        return (num_ranks - 1) * form.hop_s(work)
    raise InputError(
        f"no closed form for the bubble of schedule {schedule!r} with {num_micro_batches} "
        f"micro-batches ({reason}); simulate it instead"
    )


def dualpipe_bubble_bound_s(num_ranks: int, work: StageWork) -> float:
    """What DualPipeV idles at most, from 2 p micro-batches on: [8] and the limits given there."""
    return (num_ranks - 1) * (work.forward_s + 2 * work.backward_input_s - work.backward_weight_s)


_IN_FLIGHT: dict[str, Callable[[int, int, int, int, int], int]] = {
    "gpipe": lambda p, v, m, g, i: m,
    "1f1b": lambda p, v, m, g, i: p - i,
    "interleaved-1f1b": lambda p, v, m, g, i: 2 * (p - 1 - i) + (v - 1) * g + 1,
    "looped-bfs": lambda p, v, m, g, i: v * m,
    "zb-h1": lambda p, v, m, g, i: p,
    "interleaved-zb": lambda p, v, m, g, i: p + (v - 1) * g,
    "zbv": lambda p, v, m, g, i: 2 * p,
    "dualpipev": lambda p, v, m, g, i: 2 * p + 1,
    "pipedream": lambda p, v, m, g, i: p - i,
}


def rank_in_flight(
    schedule: str, num_ranks: int, num_micro_batches: int, chunks: int = 1
) -> tuple[int, ...]:
    """Per rank, the most stage activations held at once: exact, for any number of micro-batches.

    Of the two V-shaped schedules it is an upper bound below 2 p micro-batches. For sizes that the
    schedule takes; raises InputError for a schedule that is not in the table.
    """
    if schedule not in _IN_FLIGHT:
        raise InputError(
            f"no closed form for what schedule {schedule!r} holds in flight (there is one for "
            f"{', '.join(_IN_FLIGHT)}); build it and take `peak_weighted`"
        )
    group = group_sizes(num_ranks, num_micro_batches)[0]
    most = chunks * num_micro_batches
    sizes = (num_ranks, chunks, num_micro_batches, group)
    return tuple(min(most, _IN_FLIGHT[schedule](*sizes, rank)) for rank in range(num_ranks))
