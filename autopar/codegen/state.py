"""Programs that update buffers: where they lie, and once a pass."""

from __future__ import annotations

from collections import Counter

from autopar.codegen.model import ModelView
from autopar.errors import InputError, PlanMismatch


def check_state(view: ModelView) -> None:
    """Refuse a plan under which buffers that a forward updates would differ from one device's.

    Raises PlanMismatch for several micro-batches where the statistics are those of all samples, and
    where a buffer would be moved, so that a copy of it were updated; InputError for a buffer that
    several stages update.
    """
    if view.batch.at_once and view.plan.training.micro_batches > 1:
        node, why = view.batch.at_once[0]
        raise PlanMismatch(
            f"the plan has {view.plan.training.micro_batches} micro-batches, expected 1: "
            f"{node}: {why}"
        )
    updated = {view.sources[ref.name].fqn for ref in view.updated}
    owners = Counter(p.fqn for stage in view.plan.stages for p in stage.parameters)
    for fqn in sorted(updated):
        if owners[fqn] > 1:
            raise InputError(
                f"buffer {fqn} is updated in {owners[fqn]} pipeline stages, which would each have "
                "one of their own; expected one: pin boundary or fewer stages"
            )
    for variant in view.plan.variants:
        own = view.running(variant)
        for move in own.variant_flow(variant)[1].moves():
            if move.value in view.updated and own.mesh.sizes[move.axis] > 1:
                raise PlanMismatch(
                    f"buffer {view.sources[move.value.name].fqn} is updated where it lies, "
                    f"as {move.after[move.axis]} on {own.mesh.axes[move.axis]}; the plan has it "
                    f"as {move.before[move.axis]}"
                )
