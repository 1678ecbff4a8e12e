"""A whole planning run: search, then the plan with its prediction, certificate and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.costs.optimizer_state import optimizer_note
from autopar.costs.profiles import Profile
from autopar.errors import InputError
from autopar.plan.fingerprint import fingerprint
from autopar.plan.plan import (
    Certificate,
    PinPrice,
    Plan,
    Training,
)
from autopar.plan.text import percent
from autopar.rules import has_rule
from autopar.search.block_cost import BlockCost
from autopar.search.found import Found
from autopar.search.grid import Grid
from autopar.search.grids import space_text
from autopar.search.pins import Pins
from autopar.search.planner import PATIENCE, Planner, Progress
from autopar.search.runners_up import runners_up
from autopar.search.setting import Setting
from autopar.search.simulated import Simulated, Simulator, block_costs
from solvers.backends import BackendUnavailable, get_backend
from solvers.solution import Status, relative_gap

_UNMEASURED = 5


def fastest_plan(setting: Setting, progress: Progress = lambda what, done: None) -> Plan:
    """The fastest plan of a setting, whose pins are settled.

    Raises InfeasiblePlan or InputError with the reason. With pins, a second search without them
    tells what they cost, unless the setting does not ask.
    """
    planner = Planner(setting=setting, progress=progress)
    return with_pin_prices(setting, found_plan(planner, planner.search()), progress)


def with_pin_prices(setting: Setting, plan: Plan, progress: Progress) -> Plan:
    """The plan with its pins, and what they cost where that is asked for."""
    if not setting.pins.items():
        return plan
    return replace(plan, pins=_pin_prices(setting, plan, progress))


def check_backend(name: str) -> None:
    """Raise InputError unless the ILP solver `name` is known and installed."""
    try:
        get_backend(name)
    except BackendUnavailable as error:
        raise InputError(str(error)) from None


def found_plan(planner: Planner, found: Found) -> Plan:
    """What a search found as a plan, its pins aside."""
    setting, simulator = planner.setting, planner.simulator
    planner.progress("simulating the best grids", None)
    best = simulator.fastest(found)
    grid, prediction = best.staged.grid, best.prediction
    return Plan(
        model=fingerprint(setting.graph, setting.name),
        cluster=setting.cluster,
        training=Training(
            global_batch=setting.global_batch,
            precision=setting.training.precision.name,
            optimizer=setting.training.optimizer,
            micro_batch=grid.micro_batch,
            micro_batches=grid.micro_batches,
        ),
        pipeline=grid.pipeline,
        axes=grid.mesh,
        chunks=grid.chunks,
        schedule=grid.schedule,
        variants=best.variants,
        stages=best.stages,
        collectives=(),
        prediction=prediction,
        certificate=_certificate(simulator, found, best),
        notes=(
            *_schedule_notes(grid),
            *_notes(setting),
            *_profile_notes(setting.profile, block_costs(best.staged)),
        ),
    )


def _certificate(simulator: Simulator, found: Found, best: Simulated) -> Certificate:
    """The search proves its gap in the closed form that it ranks by.

    Where events take less than the closed form says, both of its figures are stated in the same
    proportion lower, so that neither is above the step that is reported.
    """
    setting, ranked_s = simulator.pricer.setting, found.best.solution.objective
    scale = min(1.0, best.prediction.step_s / ranked_s) if ranked_s else 1.0
    objective = scale * ranked_s
    bound = min(scale * found.bound_s, objective)
    solved = len({staged.grid for staged in (*found.solved, *found.unfit)})
    status = "optimal"
    if found.status is not Status.OPTIMAL:
        status = "feasible, within the gap"
        if found.gave_up:
            status = f"feasible, ended after {PATIENCE} grids without a better plan"
        if found.close_enough:
            status = f"feasible, ended at the gap of {percent(setting.gap)} that was asked for"
        if found.timed_out:
            status = "feasible, time limit reached"
    return Certificate(
        status=status,
        objective_s=objective,
        bound_s=bound,
        gap=relative_gap(objective, bound),
        grids=found.total,
        solved=solved,
        pruned=found.total - solved - found.unsolved,
        space=space_text(setting),
        runners_up=runners_up(found, best, simulator, scale),
    )


def _pin_prices(setting: Setting, plan: Plan, progress: Progress) -> tuple[PinPrice, ...]:
    """What the pins cost together, against the free optimum; None where it is not asked for."""
    if not setting.price_pins:
        return tuple(PinPrice(key=key, value=value) for key, value in setting.pins.items())
    planner = Planner(setting=replace(setting, pins=Pins()), progress=progress)
    cost = plan.prediction.step_s - planner.simulator.fastest(planner.search()).prediction.step_s
    return tuple(
        PinPrice(key=key, value=value, cost_s=max(0.0, cost)) for key, value in setting.pins.items()
    )


def _schedule_notes(grid: Grid) -> tuple[str, ...]:
    if grid.pipe.flushes:
        return ()
    return (
        f"schedule {grid.schedule} changes the optimisation: every stage steps its optimizer after "
        "each micro-batch, on gradients of weights that are up to "
        f"{grid.pipeline - 1} updates old; losses differ from one device's",
    )


def _notes(setting: Setting) -> tuple[str, ...]:
    notes = list(setting.graph.notes)
    without = sorted({n.target for n in setting.graph.nodes if not has_rule(n.target)})
    notes += [f"no sharding rule for {target}: it runs whole on every rank" for target in without]
    if setting.batch.coupled:
        node, why = setting.batch.coupled[0]
        notes.append(f"the batch is not split over ranks or micro-batches: {node}: {why}")
    if setting.batch.at_once:
        node, why = setting.batch.at_once[0]
        more = f" (and {len(setting.batch.at_once) - 1} more)" * (len(setting.batch.at_once) > 1)
        notes.append(
            f"one micro-batch only: {node}{more}: {why}, synchronised over ranks; several in a row "
            "would each have statistics of their own"
        )
    if note := optimizer_note(setting.training.optimizer):
        notes.append(note)
    return tuple(notes)


def _profile_notes(profile: Profile | None, costs: Sequence[BlockCost]) -> tuple[str, ...]:
    """What the measured times are from, and the ops of the plan that could not be measured."""
    if profile is None:
        return ()
    machine = profile.machine
    groups = sorted({(key.ranks, key.level) for key, r in profile.links.items() if r.time})
    links = ", ".join(f"{ranks} on {level}" for ranks, level in groups)
    shared = f"; times {profile.slowdown:g}, processes sharing cores" * (profile.slowdown != 1)
    notes = [
        f"op times measured on {machine.device}, torch {machine.torch}{shared}; collectives "
        + (f"measured over groups of {links}" if links else "from the cost model")
    ]
    ops = sorted(set().union(*(cost.unmeasured for cost in costs)), key=lambda op: op.key)
    notes += [f"not measured: {op.key}: {profile.reason(op)}" for op in ops[:_UNMEASURED]]
    if len(ops) > _UNMEASURED:
        notes.append(f"and {len(ops) - _UNMEASURED} more ops were not measured")
    return tuple(notes)
