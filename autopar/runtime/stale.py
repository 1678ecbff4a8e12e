"""Pipelines that never drain: each stage updates its weights after every micro-batch.

The step of PipeDream (Narayanan et al., 2019, SOSP, section 3) is a window of an endless stream:
backwards of micro-batches that are under way when a step ends run in the next one. A backward uses
the weights of its forward (weight stashing), so a forward whose stage will be updated before its
backward runs on a copy of the weights; forwards between two updates share one. Each micro-batch is
a batch of its own: its loss is the mean over its samples, its gradient one optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from autopar.runtime.axes import World
from autopar.runtime.data import Span
from autopar.runtime.executor import Executor, Run, StepData, StepResult
from autopar.runtime.parameters import ParameterStore
from autopar.runtime.program import Named, StageProgram
from autopar.runtime.sync import GradientSync
from autopar.schedules.action import Action, ActionKind, Schedule
from autopar.schedules.endless import opening

Update = Callable[[], None]
"""Steps the optimizer of this rank and clears its gradients."""


class WeightVersions:
    """The weights that the micro-batches in flight on one stage have seen.

    `stashes` tells whether a forward's weights change before its backward.
    """

    def __init__(
        self, stage: int, store: ParameterStore, sync: GradientSync, *, stashes: bool
    ) -> None:
        self._store, self._sync, self._stashes = store, sync, stashes
        self._specs = store.specs.get(stage, ())
        self._newest: dict[str, Tensor] | None = None
        self._used: dict[int, dict[str, Tensor]] = {}

    def take(self, micro_batch: int) -> Named:
        """The weights for a forward, under all their names."""
        if self._newest is None:
            self._newest = {
                spec.fqn: self._copy(self._store.entries[spec.fqn].local) for spec in self._specs
            }
        self._used[micro_batch] = self._newest
        return {name: self._newest[spec.fqn] for spec in self._specs for name in spec.names}

    def _copy(self, leaf: Tensor) -> Tensor:
        if not self._stashes or not leaf.requires_grad:
            return leaf
        return leaf.detach().clone().requires_grad_()

    def finish(self, micro_batch: int, update: Update) -> None:
        """After a backward: sum its gradients over ranks and update the weights."""
        used = self._used.pop(micro_batch)
        gradients = {name: leaf.grad for name, leaf in used.items()}
        self._sync.begin()
        for name, leaf in used.items():
            leaf.grad = None
            self._store.entries[name].local.grad = gradients[name]
        self._sync.finish()
        update()
        self._newest = None

    @property
    def count(self) -> int:
        """Copies of the weights that exist besides the weights themselves."""
        copies = {id(used) for used in (*self._used.values(), self._newest) if used is not None}
        return len(copies) if self._stashes else 0


class StaleExecutor:
    """One rank of a pipeline that is not drained between steps.

    `versions` are of every stage of this rank. Micro-batches are numbered through over all steps.
    """

    def __init__(
        self,
        world: World,
        stages: Sequence[StageProgram],
        versions: Mapping[int, WeightVersions],
        schedule: Schedule,
    ) -> None:
        self._executor = Executor(world, stages, {}, schedule)
        self._versions = versions
        self._before = _of_step_before(self._executor.actions, schedule, world)
        self._size = schedule.num_micro_batches
        self._step = 0
        self._run: _StaleRun | None = None

    def run(self, data: StepData, update: Update) -> StepResult:
        """Run the list once, with the backwards that the step before left and without those that
        are left to the next. `update` is called after every backward."""
        if self._run is None:
            self._run, self._step = _StaleRun(self._executor, data, self._versions), 0
        run = self._run
        run.begin(data, self._step * self._size, update)
        for action in self._executor.actions:
            late = self._size if action in self._before else 0
            number = self._step * self._size + action.micro_batch - late
            if number >= 0:
                run.perform(Action(action.kind, action.stage, number))
        self._step += 1
        return run.finish()

    def drain(self, update: Update) -> None:
        """Run the backwards that are left; the next step fills the pipeline anew."""
        if self._run is None:
            return
        self._run.update = update
        for action in self._executor.actions:
            if action in self._before:
                number = (self._step - 1) * self._size + action.micro_batch
                self._run.perform(Action(action.kind, action.stage, number))
        self._run.finish()
        self._run.channels.finish()
        self._run = None


def _no_update() -> None:
    """For a rank without an optimizer."""


def _of_step_before(
    actions: Sequence[Action], schedule: Schedule, world: World
) -> frozenset[Action]:
    """Actions in the list of a step that belong to the step before."""
    if not world.stages:
        return frozenset()
    opened = opening(schedule)
    row = next(row for row in opened.ranks if row and row[0].stage in world.stages)
    return frozenset(actions) - frozenset(row)


class _StaleRun(Run):
    """All steps since the pipeline was filled."""

    def __init__(
        self, executor: Executor, data: StepData, versions: Mapping[int, WeightVersions]
    ) -> None:
        super().__init__(executor, data)
        self.versions, self.update = versions, _no_update
        self._steps: dict[int, StepData] = {}
        self._due: Action | None = None

    def begin(self, data: StepData, first: int, update: Update) -> None:
        """Another step, whose micro-batches are numbered from `first`."""
        self.data, self.update, self.result = data, update, StepResult()
        size = len(data.spans)
        self._steps = {n: self._steps[n] for n in range(first - size, first) if n in self._steps}
        self._steps |= dict.fromkeys(range(first, first + size), data)

    def finish(self) -> StepResult:
        """The step's losses; what was sent is on its way."""
        self._settle()
        self.world.recorder.phase = "sync"
        return self.result

    def perform(self, action: Action) -> None:
        """One action. An update waits until the gradient has been sent that others wait for."""
        if action.kind.is_compute:
            self._settle()
        super().perform(action)
        if action.kind is ActionKind.BACKWARD and self.span(action.micro_batch).of:
            self._due = action

    def _settle(self) -> None:
        if self._due is not None:
            self.world.recorder.phase = "sync"
            self.versions[self._due.stage].finish(self._due.micro_batch, self.update)
            self._due = None

    def step_data(self, micro_batch: int) -> tuple[StepData, int]:
        data = self._steps[micro_batch]
        return data, micro_batch % len(data.spans)

    def samples(self, micro_batch: int) -> int:
        return self.span(micro_batch).of

    def weights(self, stage: int, micro_batch: int) -> Named:
        return self.versions[stage].take(micro_batch)

    def setup_of(self, stage: int, micro_batch: int) -> Named:
        self.world.recorder.phase = "setup"
        sums = self.sum_setup(stage, (micro_batch,), self.versions[stage].take(micro_batch))
        self.world.recorder.phase = "forward"
        return sums

    def add_loss(self, loss: Tensor, micro_batch: int) -> None:
        span: Span = self.span(micro_batch)
        super().add_loss(loss * (span.of / self.data.samples), micro_batch)
