"""Runs this rank's action list: the one that was validated and simulated.

Activations live from a forward to its backward. The gradient of a value from another stage goes
back where its `BoundarySpec` says that one is needed. A rank that fails
raises at once; its end closes its connections, which ends the others, at the latest after the
timeout of the process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.errors import PlanMismatch, RuntimeFailure
from autopar.ir.mesh import BATCH_AXES
from autopar.runtime import primitives
from autopar.runtime.axes import BACKWARD, FORWARD, World
from autopar.runtime.channels import Arrived, Channels
from autopar.runtime.context import DeferredGradient, StepContext
from autopar.runtime.data import Span
from autopar.runtime.entry import Entry
from autopar.runtime.handover import Awaited, Handovers
from autopar.runtime.program import BoundarySpec, Named, StageProgram, Tensors
from autopar.runtime.weight_gradients import compute_deferred
from autopar.schedules.action import Action, ActionKind, Schedule
from autopar.schedules.arrivals import arrivals
from autopar.schedules.lower import insert_communication

_K = ActionKind


@dataclass(frozen=True, kw_only=True, slots=True)
class StepData:
    """What one step runs on: this rank's slice and span of each micro-batch."""

    inputs: tuple[Mapping[str, Tensor], ...]
    spans: tuple[Span, ...]
    samples: int
    seed: int
    step: int
    training: bool


@dataclass(kw_only=True, slots=True)
class StepResult:
    """This rank's part of a step.

    `loss` is the sum of its loss contributions (float64; None unless it runs the last stage),
    `outputs` what each stage returned besides, by stage and micro-batch.
    """

    loss: Tensor | None = None
    outputs: dict[tuple[int, int], Tensors] = field(default_factory=dict)


_Root = Tensor | GradientEdge


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a forward leaves for its backward.

    `entries` are those of the values it received that need a gradient, `roots` where gradients of
    the outputs enter its graph, None where none does. The values themselves are let go of: what the
    backward reads of them autograd keeps.
    """

    entries: tuple[Entry, ...]
    roots: tuple[_Root | None, ...]


_Where = tuple[int, str, int]
"""Stage, direction, micro-batch."""


class Executor:
    """One rank of a pipeline. `stages` and `weights` are those of `world.stages`.

    `schedule` may or may not have its communication spelled out. Raises PlanMismatch where the
    schedule places stages on other ranks than the world does.
    """

    def __init__(
        self,
        world: World,
        stages: Sequence[StageProgram],
        weights: Mapping[int, Named],
        schedule: Schedule,
    ) -> None:
        self.world = world
        self.stages = {stage.index: stage for stage in stages}
        self.weights = weights
        self.last = len(world.meshes) - 1
        self.actions = _own_actions(schedule, world, tuple(sorted(self.stages)))
        self.arrived = _arrived(schedule, self.actions)
        self.handovers = Handovers(world=world)
        self.split = frozenset(
            (a.stage, a.micro_batch) for a in self.actions if a.kind is _K.BACKWARD_WEIGHT
        )
        """Stages and micro-batches whose backward comes in two parts."""

    def run(self, data: StepData) -> StepResult:
        """Run the whole list once: gradients accumulate in the weights' `.grad`.

        Without `data.training` only the forwards run and nothing is saved. Raises RuntimeFailure
        naming rank, stage, micro-batch and action where an action fails.
        """
        return Run(self, data).run()


def _root(out: Tensor) -> _Root | None:
    """Where the gradient of an output enters the graph; a loss, which starts one, stays itself."""
    if not out.requires_grad:
        return None
    return get_gradient_edge(out) if out.dim() else out


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, with the messages they need."""
    rows = (tuple(a for a in row if a.kind is _K.FORWARD) for row in schedule.ranks)
    return insert_communication(
        Schedule(
            name=f"{schedule.name}-forward",
            num_stages=schedule.num_stages,
            num_micro_batches=schedule.num_micro_batches,
            ranks=tuple(rows),
        )
    )


def _own_actions(schedule: Schedule, world: World, stages: tuple[int, ...]) -> tuple[Action, ...]:
    if schedule.num_stages != len(world.meshes):
        raise PlanMismatch(
            f"schedule {schedule.name!r} has {schedule.num_stages} stages; the program has "
            f"{len(world.meshes)}"
        )
    if not stages:
        return ()  # more processes than the plan has devices
    owners = schedule.stage_rank
    rows = {owners[stage] for stage in stages}
    row = rows.pop() if len(rows) == 1 else -1
    if row < 0 or stages != tuple(i for i, owner in enumerate(owners) if owner == row):
        raise PlanMismatch(
            f"rank {world.rank} holds stages {list(stages)}, which schedule {schedule.name!r} does "
            f"not put on one pipeline rank; its stages are on pipeline ranks {list(owners)}"
        )
    return insert_communication(schedule).ranks[row]


def _arrived(schedule: Schedule, actions: Sequence[Action]) -> Arrived:
    """What this rank's receives tell of its sends.

    Where micro-batches are numbered on through all steps, a gradient tells of the value that it is
    of, and a value of the gradient that a stage must have had before it began another.
    """
    if not schedule.flushes:
        return partial(_arrived_endless, schedule.num_stages)
    owner = schedule.stage_rank[actions[0].stage] if actions else 0
    known = arrivals(schedule)[owner]
    return lambda receive: known.get(receive, ())


def _arrived_endless(num_stages: int, receive: Action) -> tuple[Action, ...]:
    stage, number = receive.stage, receive.micro_batch
    if receive.kind is _K.RECV_BACKWARD:
        return (Action(_K.SEND_FORWARD, stage, number),)
    return (Action(_K.SEND_BACKWARD, stage, number - num_stages),)


class Run:
    """One step in progress."""

    def __init__(self, executor: Executor, data: StepData) -> None:
        self.executor, self.world, self.data = executor, executor.world, data
        self.channels = Channels(executor.world, executor.arrived)
        self.handovers = executor.handovers
        self.result = StepResult()
        self.setup: dict[int, Named] = {}
        self.saved: dict[tuple[int, int], _Saved] = {}
        self.ready: dict[_Where, Sequence[Tensor]] = {}
        """Values made on this rank: for a send, or for a stage that is here too."""
        self.deferred: dict[tuple[int, int], list[DeferredGradient]] = {}

    def run(self) -> StepResult:
        """All of it, from the setup values to the last message."""
        self._prepare()
        for action in self.executor.actions:
            self.perform(action)
        self.channels.finish()
        self.world.recorder.phase = "sync"
        return self.result

    def perform(self, action: Action) -> None:
        """One action; nothing for a micro-batch without samples, which has none on any rank."""
        if self.span(action.micro_batch).of == 0:
            return
        if not self.data.training and action.kind not in _FORWARD_KINDS:
            return
        self.world.recorder.phase = _PHASES[action.kind]
        try:
            _HANDLERS[action.kind](self, action)
        except Exception as error:
            raise self._failure(action, error) from error

    def step_data(self, micro_batch: int) -> tuple[StepData, int]:
        """The step that a micro-batch belongs to, and its number there."""
        return self.data, micro_batch

    def span(self, micro_batch: int) -> Span:
        """The samples of a micro-batch."""
        data, number = self.step_data(micro_batch)
        return data.spans[number]

    def samples(self, micro_batch: int) -> int:
        """Samples over which the loss of a micro-batch is a mean: those of the step."""
        return self.data.samples

    def weights(self, stage: int, micro_batch: int) -> Named:
        """What a forward computes with."""
        return self.executor.weights[stage]

    def setup_of(self, stage: int, micro_batch: int) -> Named:
        """The setup values of a forward: summed over the step."""
        return self.setup[stage]

    def add_loss(self, loss: Tensor, micro_batch: int) -> None:
        """Count a loss contribution towards the step's."""
        self.result.loss = loss if self.result.loss is None else self.result.loss + loss

    def _failure(self, action: Action, error: Exception) -> RuntimeFailure:
        what = {_K.FORWARD: "forward", _K.BACKWARD: "backward"}.get(action.kind, action.kind.name)
        return RuntimeFailure(
            f"rank {self.world.rank}, stage {action.stage}, micro-batch {action.micro_batch}, "
            f"action {action} ({what.lower().replace('_', ' ')}): {type(error).__name__}: {error}"
        )

    def _prepare(self) -> None:
        self.world.recorder.phase = "setup"
        every = range(len(self.data.spans))
        for index in self.executor.stages:
            self.setup[index] = self.sum_setup(index, every, self.executor.weights[index])

    def sum_setup(self, stage: int, micro_batches: Iterable[int], weights: Named) -> Named:
        """The setup values summed over micro-batches, then over the axes that split samples."""
        program, sums = self.executor.stages[stage], dict[str, Tensor]()
        if program.setup is None:
            return sums
        for micro_batch in micro_batches:
            if self.span(micro_batch).of:
                with torch.no_grad():
                    ctx, inputs = (
                        self._context(stage, micro_batch),
                        self._inputs(program, micro_batch),
                    )
                    parts = program.setup(weights, ctx, inputs)
                for name, part in parts.items():
                    sums[name] = sums[name] + part if name in sums else part
        mesh = self.world.meshes[stage]
        split = tuple(name for name in BATCH_AXES if name in mesh.axes)
        if split:
            axis = mesh.along(split)
            sums = {name: primitives.all_reduce(x, axis) for name, x in sums.items()}
        return sums

    def _inputs(self, stage: StageProgram, micro_batch: int) -> Named:
        data, number = self.step_data(micro_batch)
        given = data.inputs[number]
        return {key: given[key] for key in stage.inputs}

    def _context(self, stage: int, micro_batch: int) -> StepContext:
        deferred = None
        if self.data.training and (stage, micro_batch) in self.executor.split:
            deferred = self.deferred.setdefault((stage, micro_batch), [])
        data, number = self.step_data(micro_batch)
        span = data.spans[number]
        return StepContext(
            axes=self.world.meshes[stage].axes,
            joined=self.world.meshes[stage].joined,
            batch=span.count,
            global_batch=self.samples(micro_batch),
            whole_batch=span.of,
            sample_offset=span.start,
            micro_batch=number,
            seed=data.seed,
            step=data.step,
            training=data.training,
            device=self.world.device,
            recorder=self.world.recorder,
            deferred=deferred,
        )

    def _forward(self, action: Action) -> None:
        index, micro_batch = action.stage, action.micro_batch
        stage = self.executor.stages[index]
        received, entries = self._enter(stage, micro_batch)
        with torch.set_grad_enabled(self.data.training):
            outputs = stage.forward(
                self.weights(index, micro_batch),
                self._context(index, micro_batch),
                received,
                self._inputs(stage, micro_batch),
                self.setup_of(index, micro_batch),
            )
        is_last = index == self.executor.last
        kept = 1 if is_last else len(stage.sends)
        outputs, extra = outputs[:kept], outputs[kept:]
        if extra and not self.data.training:
            self.result.outputs[index, micro_batch] = tuple(out.detach() for out in extra)
        if is_last:
            self.add_loss(outputs[0].detach().double(), micro_batch)
        else:
            self._check_boundary(stage, micro_batch, outputs)
            self.ready[index, FORWARD, micro_batch] = [out.detach() for out in outputs]
        if self.data.training:
            self.saved[index, micro_batch] = _Saved(entries, tuple(map(_root, outputs)))

    def _enter(self, stage: StageProgram, micro_batch: int) -> tuple[Tensors, tuple[Entry, ...]]:
        """The values of the stage before in this stage's graph, and where they enter it."""
        if not stage.receives:
            return (), ()
        values, entries = self._take(stage.index, FORWARD, micro_batch), list[Entry]()
        for index, (value, spec) in enumerate(zip(values, stage.receives, strict=True)):
            if spec.requires_grad and self.data.training:
                entries.append(Entry(value))
                values[index] = entries[-1].enter(value)
        return tuple(values), tuple(entries)

    def _take(self, stage: int, direction: str, micro_batch: int) -> list[Tensor]:
        """What the neighbour stage made for `stage`, from this rank or another."""
        source = stage - 1 if direction == FORWARD else stage + 1
        if source in self.executor.stages:
            # New tensor objects: a value that is passed on must not be a leaf of two graphs.
            return [value.detach() for value in self.ready.pop((source, direction, micro_batch))]
        return self.channels.take(stage, direction, micro_batch)

    def _check_boundary(self, stage: StageProgram, micro_batch: int, outputs: Tensors) -> None:
        """A wrong shape must not be sent: the receiver could not tell which tensor is wrong."""
        mesh, batch = self.world.meshes[stage.index], self.span(micro_batch).count
        if len(outputs) != len(stage.sends):
            raise PlanMismatch(f"sends {len(outputs)} values; the program has {len(stage.sends)}")
        for value, spec in zip(outputs, stage.sends, strict=True):
            shape = spec.local_shape(batch, mesh)
            if tuple(value.shape) != shape or value.dtype != spec.torch_dtype:
                raise PlanMismatch(
                    f"boundary value {spec.name!r} has shape {tuple(value.shape)} and dtype "
                    f"{value.dtype}; the program has {shape} and {spec.torch_dtype}"
                )

    def _backward(self, action: Action) -> None:
        index, micro_batch = action.stage, action.micro_batch
        stage, saved = self.executor.stages[index], self.saved.pop((index, micro_batch))
        roots, grads = self._roots(stage, micro_batch, saved)
        if roots:
            torch.autograd.backward(roots, grads)  # type: ignore[arg-type]  # either, or both
        if index > 0:
            self.ready[index, BACKWARD, micro_batch] = [entry.take() for entry in saved.entries]

    def _roots(
        self, stage: StageProgram, micro_batch: int, saved: _Saved
    ) -> tuple[list[_Root], list[Tensor | None]]:
        """Where the backward starts, and the gradients it starts with."""
        if stage.index == self.executor.last:
            loss = saved.roots[0]
            return ([], []) if loss is None else ([loss], [None])
        needed = [
            root for root, spec in zip(saved.roots, stage.sends, strict=True) if spec.requires_grad
        ]
        grads = self._take(stage.index, BACKWARD, micro_batch) if needed else []
        pairs = [(r, g) for r, g in zip(needed, grads, strict=True) if r is not None]
        return [root for root, _ in pairs], [grad for _, grad in pairs]

    def _backward_weight(self, action: Action) -> None:
        compute_deferred(self.deferred.pop((action.stage, action.micro_batch), []))

    def _send_forward(self, action: Action) -> None:
        self._send(action, FORWARD)

    def _send_backward(self, action: Action) -> None:
        self._send(action, BACKWARD)

    def _send(self, action: Action, direction: str) -> None:
        values = self.ready.pop((action.stage, direction, action.micro_batch))
        specs, other = self._crossing(action.stage, direction, sending=True)
        samples = self.span(action.micro_batch).of
        parts = [self.handovers.outgoing(spec, action.stage, other, samples) for spec in specs]
        self.channels.send(action, direction, values, parts)

    def _recv_forward(self, action: Action) -> None:
        self._post(action, FORWARD)

    def _recv_backward(self, action: Action) -> None:
        self._post(action, BACKWARD)

    def _post(self, action: Action, direction: str) -> None:
        specs, other = self._crossing(action.stage, direction, sending=False)
        mesh, span = self.world.meshes[action.stage], self.span(action.micro_batch)
        awaited = [
            Awaited(
                shape=spec.local_shape(span.count, mesh),
                dtype=spec.torch_dtype,
                parts=self.handovers.incoming(spec, action.stage, other, span.of),
            )
            for spec in specs
        ]
        self.channels.post(action.stage, direction, action.micro_batch, awaited)

    def _crossing(
        self, stage: int, direction: str, *, sending: bool
    ) -> tuple[Sequence[BoundarySpec], int]:
        """What a stage sends, or is sent, in a direction, and the stage at the other end."""
        program, downstream = self.executor.stages[stage], (direction == FORWARD) == sending
        specs = program.sends if downstream else program.receives
        if direction == BACKWARD:
            specs = tuple(spec for spec in specs if spec.requires_grad)
        return specs, stage + 1 if downstream else stage - 1


_HANDLERS: dict[ActionKind, Callable[[Run, Action], None]] = {
    _K.FORWARD: Run._forward,
    _K.BACKWARD: Run._backward,
    _K.BACKWARD_INPUT: Run._backward,
    _K.BACKWARD_WEIGHT: Run._backward_weight,
    _K.SEND_FORWARD: Run._send_forward,
    _K.RECV_FORWARD: Run._recv_forward,
    _K.SEND_BACKWARD: Run._send_backward,
    _K.RECV_BACKWARD: Run._recv_backward,
}

_FORWARD_KINDS = frozenset({_K.FORWARD, _K.SEND_FORWARD, _K.RECV_FORWARD})

_PHASES = {kind: "forward" if kind in _FORWARD_KINDS else "backward" for kind in ActionKind}
