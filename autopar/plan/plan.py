"""The plan: every decision, in types that read and write as JSON.

A plan holds decisions and predictions, no code. Anything that follows from the decisions and the
model's graph (source, process groups, local shapes) is derived again when it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from autopar.ir.cluster import Cluster
from autopar.ir.collective import Collective
from autopar.ir.mesh import BATCH_AXES, MeshAxis, place_of, sized
from autopar.ir.placement import Layout
from autopar.ir.size import Shape

PLAN_VERSION = 1

Terms = tuple[tuple[str, float], ...]
"""Named figures in a fixed order, such as the terms of a stage's memory in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Name, shape and dtype of a parameter, buffer, constant or input of the model."""

    fqn: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFingerprint:
    """What a plan was made for. `ops_digest` is a hash of the op list with shapes and wiring."""

    name: str
    parameters: tuple[TensorEntry, ...]
    inputs: tuple[TensorEntry, ...]
    num_ops: int
    ops_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The training setup a plan was made for. `micro_batch` is per data-parallel rank of the plan's
    axes."""

    global_batch: int
    precision: str
    optimizer: str
    micro_batch: int = 1
    micro_batches: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeChoice:
    """Layouts that one op runs with: one per tensor input, one per output."""

    node: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


class Recompute(StrEnum):
    """How much of a block runs again in its backward.

    `selective`: chosen ops. `full`: everything that the backward reads, so that the block keeps
    what it is given alone.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputePlan:
    """What of a variant runs again in the backward, under a name: `full`, `selective`, or
    `selective_b` where there are several.

    `steps` lists, in execution order, the ops and moves of the class's first block whose results
    are not kept for the backward: they are made again from values that are.
    """

    name: str
    steps: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to run all blocks of a class; becomes one source file.

    `choices` names the nodes of the class's first block; other blocks correspond by position.
    `recompute` has what may run again in the backward; each of its blocks names one, or `none`.
    """

    name: str
    class_index: int
    digest: str
    choices: tuple[NodeChoice, ...]
    recompute: tuple[RecomputePlan, ...] = ()

    def steps_again(self, name: str) -> tuple[str, ...]:
        """The steps that run again under a name of `recompute`; none for `none`."""
        return next((plan.steps for plan in self.recompute if plan.name == name), ())


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPlan:
    """One block on its stage: which variant runs it, what of it is run again, by name, and the ZeRO
    level of its parameters, of those that have a higher one than others."""

    index: int
    variant: str
    recompute: str
    module_path: str
    zero: int = 0

    @property
    def recompute_kind(self) -> Recompute:
        """How much of the block runs again."""
        return Recompute(self.recompute.partition("_")[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterPlan:
    """Where a parameter or buffer lies.

    `layout` is that in which ops read it. `tied` lists further names; `shard_sizes` has the extents
    along an unevenly split dim. `zero` is the ZeRO level: from 1 on the master weight and the
    optimizer state lie as `stored` between steps, split further over batch axes; from 2 on the
    gradient too, as soon as its last micro-batch has made it; at 3 the weight itself, which a block
    gathers for its forward and again for its backward. An empty `stored` is the same as `layout`.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    trainable: bool
    buffer: bool = False
    persistent: bool = True
    tied: tuple[str, ...] = ()
    shard_sizes: tuple[int, ...] = ()
    zero: int = 0
    stored: Layout = ()


RESERVED = ("context", "communicators", "fragmentation")
"""Memory terms that are no tensors of the program."""

NOT_AT_ONCE = "not_at_once"
"""The memory term that makes the others, each the most there is of it, add up to the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One pipeline stage: its ranks, blocks, parameters and what they are predicted to cost.

    `time_s` has `forward`, `backward` (recompute included), `send_forward`, `send_backward` per
    micro-batch; where the schedule splits the backward, `backward_weight` is the part of `backward`
    that computes weight gradients. Per step it has `gradient_sync`, what is left of it once the
    last backward has ended; `tied_sync`, the sums between stages that hold one parameter;
    `optimizer`; and `weight_gather` of the weights that ranks update shares of. `communication_s`
    has what of this compute waits for, and what runs beside (`schedules.step.StageLoad`).
    `memory_bytes` sums to the peak per rank, over all stages of the rank where it has several: what
    it has once (a reserve, message buffers, the largest transient) stands on one of them. A term is
    the most there is of it, and `not_at_once`, below zero, takes off what is not there at the same
    time. `held_bytes` are the fields of `schedules.held.StageMemory`: what the stage holds around
    each of its actions. `in_flight` is its own peak of micro-batches. `sizes` are those of the mesh
    axes on this stage, where they are not the plan's.
    """

    index: int
    ranks: tuple[int, ...]
    blocks: tuple[BlockPlan, ...]
    parameters: tuple[ParameterPlan, ...]
    time_s: Terms
    memory_bytes: Terms
    memory_limit_bytes: int
    in_flight: int
    collectives: tuple[Collective, ...]
    communication_s: Terms = ()
    held_bytes: Terms = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A grid the search looked at: its degrees, its step time and peak memory where it fits, and
    why it lost."""

    pipeline: int
    axes: tuple[MeshAxis, ...]
    micro_batch: int
    schedule: str
    step_s: float | None
    verdict: str
    chunks: int = 1
    peak_bytes: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """How good the plan is known to be, over the space the search covers.

    `gap` is proven, for the closed form that the search ranks by: how far the least that it found
    is above a lower bound of that of every plan. `objective_s` and `bound_s` are those two, both in
    the same proportion lower where the simulated step is shorter: no bound is above the step that
    is reported. The plan is the one of those solved that takes the least when simulated, and so are
    `runners_up` ranked. `space` says what was searched.
    """

    status: str
    objective_s: float
    bound_s: float
    gap: float
    grids: int
    solved: int
    pruned: int
    space: str
    runners_up: tuple[Candidate, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PinPrice:
    """A decision fixed by the user, and the step time it costs against the free optimum."""

    key: str
    value: str
    cost_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The simulated step: `time_s` are terms of the slowest rank, `peak_bytes` the worst rank.

    `bubble_fraction` is the share of all ranks' time in which they wait for each other,
    `hides_messages` whether messages between stages run beside compute.

    Of `priced_ops` (those that move something) some have the time that a profile measured on just
    their shapes, some one between those it measured; all others are priced by the model.
    """

    step_s: float
    samples_per_s: float
    bubble_fraction: float
    peak_bytes: float
    peak_stage: int
    time_s: Terms
    measured_ops: int = 0
    interpolated_ops: int = 0
    priced_ops: int = 0
    hides_messages: bool = True

    @property
    def modelled_ops(self) -> int:
        """Ops priced by the model, without a profile's time or one between its times."""
        return self.priced_ops - self.measured_ops - self.interpolated_ops


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Devices of the cluster that was asked for, by their numbers there, which the plan does not
    use; `step_s` is what the best plan found with all devices takes, where one fits."""

    device: str
    devices: tuple[int, ...]
    step_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every decision for training one model on one cluster.

    `pipeline` counts the ranks of the pipeline, `chunks` the stages of each: `stages` has
    `pipeline * chunks` entries, on ranks as the schedule places them. `objective` is what the plan
    has the least of: `time` of a step, `memory` of the fullest rank, or `cost` of a sample.

    `axes` is the mesh of every stage that does not have sizes of its own. `cluster` are the devices
    that the plan uses. Where these are not all that were asked for, or in another order, `devices`
    has the number there of the device of every rank.
    """

    version: int = PLAN_VERSION
    model: ModelFingerprint
    cluster: Cluster
    training: Training
    pipeline: int
    chunks: int = 1
    axes: tuple[MeshAxis, ...]
    schedule: str
    variants: tuple[Variant, ...]
    stages: tuple[StagePlan, ...]
    collectives: tuple[Collective, ...]
    prediction: Prediction
    objective: str = "time"
    certificate: Certificate
    pins: tuple[PinPrice, ...] = ()
    notes: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def axis(self, name: str) -> int:
        """Size of a mesh axis; 1 where the mesh has no such axis."""
        return next((axis.size for axis in self.axes if axis.name == name), 1)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh axes, outermost first."""
        return tuple(axis.name for axis in self.axes)

    def place(self, stage: StagePlan, rank: int) -> tuple[int, ...]:
        """Where a rank of a stage stands on every mesh axis."""
        return place_of(stage.ranks.index(rank), [axis.size for axis in self.mesh(stage)])

    def mesh(self, stage: StagePlan) -> tuple[MeshAxis, ...]:
        """The mesh axes of a stage."""
        return sized(self.axes, stage.sizes)

    def on(self, stage: StagePlan) -> Plan:
        """The same plan told from a stage, whose mesh is the plan's; the others have sizes."""
        mesh = self.mesh(stage)
        if mesh == self.axes:
            return self
        stages = (
            replace(other, sizes=tuple(axis.size for axis in self.mesh(other)))
            for other in self.stages
        )
        return replace(self, axes=mesh, stages=tuple(stages))

    @property
    def batch_ranks(self) -> int:
        """Data-parallel degree: the ranks of a stage that the samples are split over."""
        return prod(axis.size for axis in self.axes if axis.name in BATCH_AXES)

    @property
    def num_devices(self) -> int:
        """Devices the plan uses."""
        return len({rank for stage in self.stages for rank in stage.ranks})
