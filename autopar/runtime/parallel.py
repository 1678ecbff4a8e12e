"""The parallel model that a user trains: one object per rank, every method called on all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.errors import InputError
from autopar.ir.mesh import BATCH_AXES
from autopar.ir.placement import R_STAR
from autopar.plan.pipeline import plan_schedule
from autopar.plan.plan import Plan
from autopar.plan.zero import zero_shard
from autopar.runtime.axes import World, create_world
from autopar.runtime.clip import clip_grad_norm_, grad_norm
from autopar.runtime.deferred import InitTape
from autopar.runtime.engine import Engine
from autopar.runtime.initialize import initialize
from autopar.runtime.load import LoadedProgram, parameter_specs, runnable
from autopar.runtime.loss_scale import LossScale
from autopar.runtime.optim import OptimizerSpec, bind_optimizer
from autopar.runtime.parameters import ParameterStore
from autopar.runtime.state import load_training_state, training_state
from autopar.schedules.lower import insert_communication


class ParallelModel:
    """This rank's part of a sharded, pipelined model.

    `loss = model.train_step(batch)` runs forward and backward of the whole batch and, if the model
    was given an optimizer, its step; every rank passes the same batch and gets the same loss.
    """

    def __init__(
        self,
        program: LoadedProgram,
        model: nn.Module,
        *,
        optimizer: OptimizerSpec | None = None,
        seed: int = 0,
        tape: InitTape | None = None,
        constants: Mapping[str, Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.plan: Plan = program.plan
        self.program = program
        self.world = _world(program.plan, device)
        self.store = ParameterStore(parameter_specs(program.plan), self.world)
        initialize(self.store, model, seed=seed, tape=tape, extra=constants)
        schedule = plan_schedule(self.plan)
        self.loss_scaler = (
            LossScale() if runnable(self.plan.training.precision).loss_scale else None
        )
        self.engine = Engine(
            world=self.world,
            store=self.store,
            train=[program.stages[stage] for stage in self.world.stages],
            schedule=insert_communication(schedule),
            inputs=program.inputs,
            constants=program.fixed_entries,
            loss_layout=program.loss_layout,
            outputs=program.outputs,
            seed=seed,
            loss_scale=self.loss_scaler,
        )
        self.optimizer: Optimizer | None = (
            bind_optimizer(optimizer, self.store, model) if optimizer is not None else None
        )
        self.training = True

    def train(self, mode: bool = True) -> ParallelModel:
        """Switch between training and evaluation, as `nn.Module.train` does."""
        self.training = mode
        return self

    def eval(self) -> ParallelModel:
        """Switch to evaluation: no dropout, no gradients."""
        return self.train(False)

    def __call__(self, batch: Any) -> Any:
        """In training the loss, with gradients; in evaluation what the model returns."""
        return self.backward_step(batch) if self.training else self.eval_step(batch)[1]

    def train_step(self, batch: Any, *, clip_norm: float | None = None) -> Tensor:
        """Forward, backward, optional clipping, optimizer step; the loss before the step.

        Gradients are cleared afterwards. With a schedule that never drains every stage steps after
        each micro-batch instead. Raises InputError without an optimizer, and where such a schedule
        is to clip: no moment has all gradients.
        """
        if self.optimizer is None:
            raise InputError(
                "train_step needs an optimizer: parallelize(model, cluster, optimizer=...); or "
                "call backward_step and step one of your own"
            )
        if not self.engine.flushes:
            if clip_norm is not None:
                raise InputError(
                    f"clip_norm with schedule {self.plan.schedule!r}: stages update their weights "
                    "one after the other, so that there is no norm of all gradients; leave it out"
                )
            return self.engine.stale_step(batch, self._update)
        loss = self.backward_step(batch)
        if clip_norm is not None:
            self.clip_grad_norm_(clip_norm)
        self._update()
        return loss

    def _update(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def drain(self) -> None:
        """Finish the micro-batches that a schedule without a flush has under way. All ranks call
        it; the next step fills the pipeline anew. Nothing for other schedules."""
        if self.optimizer is not None:
            self.engine.drain(self._update)

    def backward_step(self, batch: Any, *, accumulate: bool = False) -> Tensor:
        """Forward and backward of the whole batch; gradients are added to `.grad`."""
        return self.engine.train_step(batch, accumulate=accumulate)

    def eval_step(self, batch: Any) -> tuple[Tensor, Any]:
        """The loss and the model's return value, whole, in its structure, on every rank."""
        loss, outputs = self.engine.eval_step(batch)
        values = [outputs[spec.name] for spec in self.program.outputs]
        return loss, rebuild(json.loads(self.program.output_tree), values, loss)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters: DTensors over their stage's mesh."""
        return self.store.tree.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with the original model's names."""
        return self.store.tree.named_parameters()

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of all gradients of the whole model, the same on every rank."""
        return grad_norm(self.store, norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their global norm is at most `max_norm`; the norm before."""
        return clip_grad_norm_(self.store, max_norm, norm_type)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the backward; 1 unless the program computes in float16.

        Gradients are divided by it before anyone sees them. A step in which one overflows, on
        whichever rank, leaves no gradients on any rank: the optimizer's step changes nothing.
        """
        return 1.0 if self.loss_scaler is None else self.loss_scaler.value

    def state_dict(self) -> dict[str, Any]:
        """All that training goes on from: stored parameters (master weights where there are any),
        optimizer state, loss scale and step; this rank's part."""
        return training_state(self.store, self.engine, self.optimizer, self.loss_scaler)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from such a state. All ranks call it."""
        load_training_state(state, self.store, self.engine, self.optimizer, self.loss_scaler)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The original model's state dict, on rank 0; empty elsewhere. All ranks call it.

        Micro-batches that are under way are finished first, see `drain`.
        """
        self.drain()
        return self.store.full_state_dict()


def _world(plan: Plan, device: torch.device | str) -> World:
    """Process groups for every axis, tie, and set of axes that some gradient is summed over."""
    names = [axis.name for axis in plan.axes]
    joins = {tuple(name for name in names if name in BATCH_AXES)}
    owners: dict[str, list[int]] = {}
    for stage in plan.stages:
        for parameter in stage.parameters:
            summed = [n for n, p in zip(names, parameter.layout, strict=True) if p == R_STAR]
            found = zero_shard(parameter, names)
            split = () if found is None else found.axes
            joins |= {tuple(summed), split, tuple(n for n in summed if n not in split)}
            if parameter.trainable:
                owners.setdefault(parameter.fqn, []).append(stage.index)
    return create_world(
        [(axis.name, axis.size) for axis in plan.axes],
        [stage.ranks for stage in plan.stages],
        stage_sizes=[stage.sizes for stage in plan.stages],
        joins=sorted(joins),
        ties=sorted({tuple(stages) for stages in owners.values() if len(stages) > 1}),
        device=device,
    )


def rebuild(tree: Any, outputs: list[Tensor], loss: Tensor) -> Any:
    """A return value from its JSON description; see `OpGraph.output_tree`."""
    if isinstance(tree, list):
        return [rebuild(item, outputs, loss) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("$loss") is True:
        return loss
    if "$output" in tree:
        return outputs[tree["$output"]]
    if "$tuple" in tree:
        return tuple(rebuild(item, outputs, loss) for item in tree["$tuple"])
    return {key: rebuild(value, outputs, loss) for key, value in tree.items()}
