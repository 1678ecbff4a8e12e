"""A step from batch to gradients: check, cut, run, add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.ir.mesh import BATCH_AXES
from autopar.ir.placement import Layout, Partial
from autopar.plan.buckets import DEFAULT_CAP_BYTES
from autopar.runtime.axes import World
from autopar.runtime.data import InputSpec, check_batch, micro_batch_spans, slice_batch
from autopar.runtime.executor import Executor, StepData, forward_only
from autopar.runtime.gather import ShardedWeight
from autopar.runtime.loss_scale import LossScale, scale_gradient
from autopar.runtime.outputs import collect_outputs, share_loss
from autopar.runtime.parameters import ParameterStore
from autopar.runtime.program import Forward, OutputSpec, StageProgram, Tensors
from autopar.runtime.stale import StaleExecutor, Update, WeightVersions
from autopar.runtime.sync import GradientSync
from autopar.schedules.action import ActionKind, Schedule
from autopar.schedules.in_flight import weight_versions


class Engine:
    """One rank of a parallel model. All methods are collective: every rank calls them alike.

    `train` and `evaluate` are the stage programs of this rank in either mode; without the latter
    `eval_step` runs the former with dropout off. Process groups give up after their timeout, so a
    rank whose neighbour fails or never comes raises within that time.
    """

    def __init__(
        self,
        *,
        world: World,
        store: ParameterStore,
        train: Sequence[StageProgram],
        evaluate: Sequence[StageProgram] | None = None,
        schedule: Schedule,
        inputs: Sequence[InputSpec],
        constants: Mapping[str, object] | None = None,
        loss_layout: Layout | None = None,
        outputs: Sequence[OutputSpec] = (),
        seed: int = 0,
        bucket_cap_bytes: int = DEFAULT_CAP_BYTES,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.world, self.store, self.seed = world, store, seed
        self.step = 0
        self._inputs, self._constants, self._outputs = tuple(inputs), constants, tuple(outputs)
        names = world.meshes[-1].names
        self._partial_axes: tuple[str, ...] = BATCH_AXES
        if loss_layout is not None:
            axes = zip(names, loss_layout, strict=True)
            self._partial_axes = tuple(name for name, p in axes if isinstance(p, Partial))
        self._micro_batches, self._schedule = schedule.num_micro_batches, schedule.name
        weights = {stage: store.weights(stage) for stage in world.stages}
        training = [self._training(stage, loss_scale) for stage in train]
        self.sync = GradientSync(store, bucket_cap_bytes, loss_scale)
        self._train: Executor | None = None
        self._stale: StaleExecutor | None = None
        if schedule.flushes:
            self._train = Executor(world, training, weights, schedule)
        else:
            versions = weight_versions(schedule)
            self._stale = StaleExecutor(
                world,
                training,
                {
                    stage: WeightVersions(stage, store, self.sync, stashes=versions[stage] > 1)
                    for stage in world.stages
                },
                schedule,
            )
        kinds = {action.kind for row in schedule.ranks for action in row}
        self._splits_backward = ActionKind.BACKWARD_WEIGHT in kinds
        programs = train if evaluate is None else evaluate
        self._evaluate = Executor(world, programs, weights, forward_only(schedule))

    def train_step(self, batch: Any, *, accumulate: bool = False) -> Tensor:
        """Forward and backward of a whole batch; the loss (float64), on every rank.

        Every rank gives the same batch. Gradients of the loss are added to `.grad`, complete on
        every rank, unless `accumulate` leaves that to a later call. Each call counts as one step
        for dropout. Raises InputError for a batch unlike the captured one, on every rank and before
        anything is sent, and RuntimeFailure where the program fails; InputError for a schedule that
        updates weights as it goes.
        """
        if self._train is None:
            raise InputError(
                f"schedule {self._schedule!r} steps the optimizer after every micro-batch, so "
                "there are no gradients of a whole batch: give an optimizer, and call train_step"
            )
        data = self._data(batch, training=True)
        self.store.update.catch_up()
        filled = sum(1 for span in data.spans if span.of)
        # A backward in two parts adds to a gradient more than once: only its end is the end.
        self.sync.begin(filled, early=not (accumulate or self._splits_backward))
        try:
            result = self._train.run(data)
        except Exception:
            self.sync.discard()
            raise
        self.sync.finish(accumulate=accumulate)
        self.step += 1
        return share_loss(result, self.world, self._partial_axes)

    def stale_step(self, batch: Any, update: Update) -> Tensor:
        """A step of a schedule that never drains; the loss (float64), on every rank.

        `update` steps the optimizer of this rank after every micro-batch's backward. The loss is
        the mean of the micro-batches' losses, each with the weights of its forward.
        """
        assert self._stale is not None
        data = self._data(batch, training=True)
        self.store.update.catch_up()
        try:
            result = self._stale.run(data, update)
        except Exception:
            self.sync.discard()
            raise
        self.step += 1
        return share_loss(result, self.world, self._partial_axes)

    def drain(self, update: Update) -> None:
        """Run the backwards that a schedule without a flush has left to the next step."""
        if self._stale is not None:
            self._stale.drain(update)

    @property
    def flushes(self) -> bool:
        """Whether a step leaves nothing to the next."""
        return self._stale is None

    def eval_step(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward only, without dropout: the loss and the whole outputs by name, on every rank."""
        data = self._data(batch, training=False)
        self.store.update.catch_up()
        result = self._evaluate.run(data)
        outputs = collect_outputs(result, self._outputs, self.world, data.spans, data.samples)
        return share_loss(result, self.world, self._partial_axes), outputs

    def _training(self, stage: StageProgram, loss_scale: LossScale | None) -> StageProgram:
        """A stage as it runs in training: gathered weights are not kept for the backward, which
        starts with the loss scale."""
        forward = stage.forward
        if any(isinstance(w, ShardedWeight) for w in self.store.weights(stage.index).values()):
            forward = _forgetting(forward, self.store)
        if loss_scale is not None and stage.index == len(self.world.meshes) - 1:
            forward = _scaling(forward, loss_scale)
        return replace(stage, forward=forward)

    def _data(self, batch: Any, *, training: bool) -> StepData:
        tensors, samples = check_batch(batch, self._inputs, self._constants)
        axes = self.world.meshes[self.world.stages[0]].axes if self.world.stages else {}
        split = [axes[name] for name in BATCH_AXES if name in axes]
        sizes, at = [axis.size for axis in split], [axis.rank for axis in split]
        spans = micro_batch_spans(samples, self._micro_batches, sizes, at)
        return StepData(
            inputs=tuple(
                slice_batch(tensors, self._inputs, span, self.world.device) for span in spans
            ),
            spans=spans,
            samples=samples,
            seed=self.seed,
            step=self.step,
            training=training,
        )


def _forgetting(forward: Forward, store: ParameterStore) -> Forward:
    def run(*args: Any) -> Tensors:
        if not torch.is_grad_enabled():
            return forward(*args)
        with store.gathers.forgetting():
            return forward(*args)

    return run


def _scaling(forward: Forward, loss_scale: LossScale) -> Forward:
    def run(*args: Any) -> Tensors:
        loss, *outputs = forward(*args)
        return (scale_gradient(loss, lambda: loss_scale.value), *outputs)

    return run
