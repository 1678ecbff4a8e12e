"""Solved grids by the step that their own action lists take; the plan is the fastest of them.

The search ranks by a closed form, which is what can be proven. Events say a little more or less, so
of the grids that come close in the closed form all are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.plan.pipeline import rank_groups, ranks_peak_bytes
from autopar.plan.plan import Prediction, StagePlan, Terms, Variant
from autopar.plan.simulated import simulate_stages
from autopar.schedules.step import Step
from autopar.search.assemble import stage_plans
from autopar.search.block_cost import BlockCost
from autopar.search.found import Found
from autopar.search.grid import Grid
from autopar.search.pricer import Pricer
from autopar.search.setting import Setting
from autopar.search.stages import Staged

LEAST_SHARE = 0.9
"""Of the closed form: a grid that events take less of than this is not looked for."""

MOST = 16
"""Grids that are simulated at the most to find the fastest."""

_BUSY = ("forward", "backward", "gradient_sync", "tied_sync", "optimizer", "weight_gather")


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """A solved grid as stages of a plan, with what their events take."""

    staged: Staged
    variants: tuple[Variant, ...]
    stages: tuple[StagePlan, ...]
    prediction: Prediction


@dataclass
class Simulator:
    """Simulates solved grids of one search, each once."""

    pricer: Pricer
    _known: dict[int, Simulated] = field(default_factory=dict)

    def of(self, staged: Staged) -> Simulated:
        """What a solved grid comes to."""
        if id(staged) not in self._known:
            variants, stages = stage_plans(self.pricer, staged)
            self._known[id(staged)] = Simulated(
                staged=staged,
                variants=variants,
                stages=stages,
                prediction=predict(self.pricer.setting, staged, stages),
            )
        return self._known[id(staged)]

    def fastest(self, found: Found) -> Simulated:
        """The solved grid that takes the least time; of equals, the one the search has first."""
        best = self.of(found.best)
        rest = [staged for staged in found.solved if staged.grid != found.best.grid]
        for staged in sorted(rest, key=lambda staged: staged.solution.objective)[: MOST - 1]:
            if LEAST_SHARE * staged.solution.objective >= best.prediction.step_s:
                break
            own = self.of(staged)
            if own.prediction.step_s < best.prediction.step_s:
                best = own
        return best


def predict(setting: Setting, staged: Staged, stages: Sequence[StagePlan]) -> Prediction:
    """The simulated step of the plan's own action lists, gradient sums and updates."""
    grid = staged.grid
    step = simulate_stages(
        stages,
        grid.pipe.lowered(),
        grid.mesh,
        setting.cluster,
        hides_messages=setting.execution.hides_messages,
    )
    groups = rank_groups(stages)
    peaks = [ranks_peak_bytes(group) for group in groups]
    costs = block_costs(staged)
    return Prediction(
        step_s=step.step_s,
        samples_per_s=setting.global_batch / step.step_s,
        bubble_fraction=step.bubble_fraction,
        peak_bytes=max(peaks),
        peak_stage=groups[peaks.index(max(peaks))][0].index,
        time_s=_slowest(grid, step, stages, groups),
        measured_ops=sum(cost.measured_ops for cost in costs),
        interpolated_ops=sum(cost.interpolated_ops for cost in costs),
        priced_ops=sum(cost.priced_ops for cost in costs),
        hides_messages=setting.execution.hides_messages,
    )


def _slowest(
    grid: Grid, step: Step, stages: Sequence[StagePlan], groups: Sequence[Sequence[StagePlan]]
) -> Terms:
    """Where the step of the rank that ends last goes."""
    slowest = groups[max(range(len(groups)), key=lambda rank: step.meet_s[rank])]
    terms = [dict(stage.time_s) for stage in stages]
    runs = {"forward": grid.micro_batches, "backward": grid.micro_batches}
    often = 1 if grid.pipe.flushes else grid.micro_batches
    busy = {
        name: runs.get(name, often) * sum(terms[stage.index].get(name, 0.0) for stage in slowest)
        for name in _BUSY
    }
    busy["waiting"] = max(0.0, step.step_s - sum(busy.values()))
    return tuple(busy.items())


def block_costs(staged: Staged) -> list[BlockCost]:
    """The cost of every block as it is run."""
    chosen = zip(staged.problem.blocks, staged.solution.options, strict=True)
    return [staged.options[kind][option].cost for kind, option in chosen]
