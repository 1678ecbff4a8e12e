"""`autopar.parallelize`: a model written for one device, planned and run on all ranks."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.optim import Optimizer

from autopar.capture import capture, first_difference
from autopar.codegen.program import write_files
from autopar.compiler import PlanOptions, adopt_plan, plan_model
from autopar.costs.clusters import parse_cluster
from autopar.costs.profiles import Profile
from autopar.errors import AutoparError, CaptureError, InputError, RuntimeFailure
from autopar.ir.cluster import Cluster
from autopar.ir.graph import OpGraph
from autopar.ir.precision import PRECISIONS
from autopar.plan.plan import Plan
from autopar.plan.serialize import read_plan, write_plan
from autopar.profiler.files import profile_for, read_profiles
from autopar.runtime.agree import check_alike
from autopar.runtime.data import as_mapping
from autopar.runtime.deferred import InitTape
from autopar.runtime.launch import init_from_env
from autopar.runtime.load import load_program, runnable
from autopar.runtime.optim import OptimizerSpec
from autopar.runtime.parallel import ParallelModel
from autopar.sources import LossFn, cast_batch, cast_model, needs_cast

Pins = Mapping[str, object]
_TIMEOUT_S = 1800.0
"""How long ranks wait for each other: the others wait for the first while it plans. A rank that
fails is noticed at once, by what started it."""


def parallelize(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    batch: Any = None,
    optimizer: OptimizerSpec | None = None,
    loss_fn: LossFn | None = None,
    precision: str | None = None,
    global_batch: int | None = None,
    plan: Plan | Path | str | None = None,
    pins: Pins | None = None,
    memory_limit_bytes: int | None = None,
    time_limit_s: float = 120.0,
    profile: Path | str | None = None,
    workers: int = 1,
    cache_dir: Path | str | None = None,
    seed: int = 0,
    tape: InitTape | None = None,
) -> Parallel:
    """A model that trains on all ranks of a cluster as it would on one device.

    Call it on every process of the run, started by `torchrun` or `autopar.launch`, with the same
    arguments: the same weights, and in every step the same whole batch. It plans at the first
    batch, or at once when given `batch`: the global batch, dim 0 the samples, a dict of keyword
    tensors or a tuple of positional ones. `optimizer` is a torch optimizer class with its options
    `(cls, {...})`, a function of the parameters, or an instance built on `model`, which is bound to
    the parallel parameters by name. `pins` are the command line's,
    `{"tensor": 2, "weight:head.weight": "S(0)"}`. Weights come from `model`; where it is on the
    meta device they are initialised under `seed`, to the same values whatever the plan. `profile`
    is a file of measured times that `autopar profile` or `autopar profiles` wrote. A long search is
    shared by `workers` processes, which does not change the plan; with a folder `cache_dir`, what
    it finds is kept there and found again.

    `precision` is `fp32`, `fp64`, `bf16` or `fp16`, by default what the model's parameters are in.
    In `bf16` and `fp16` the program computes as `model.to(dtype)` would, floating inputs cast, and
    the optimizer updates float32 weights; `fp16` scales the loss, see `loss_scale`.

    Raises InputError, CaptureError, InfeasiblePlan or PlanMismatch, on every rank alike.
    """
    parallel = Parallel(
        model=model,
        cluster=cluster,
        optimizer=optimizer,
        loss_fn=loss_fn,
        options=PlanOptions(
            global_batch=global_batch,
            precision=_precision(model, precision),
            optimizer=_optimizer_name(optimizer),
            pins=_pin_pairs(pins or {}),
            memory_limit_bytes=memory_limit_bytes,
            time_limit_s=time_limit_s,
            profile=None if profile is None else _profile(profile, cluster),
            workers=workers,
            cache_dir=cache_dir,
            all_devices=True,  # a process runs on each already
        ),
        plan=read_plan(plan) if isinstance(plan, (str, Path)) else plan,
        seed=seed,
        tape=tape,
    )
    if batch is not None:
        parallel.prepare(batch)
    return parallel


def _profile(path: Path | str, cluster: Cluster | str) -> Profile:
    """The measured times for a cluster. Raises InputError where the file has none."""
    where = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    return profile_for(read_profiles(path), where, str(path))


class Parallel:
    """A model under `parallelize`: plans at its first batch, then delegates to the program."""

    def __init__(
        self,
        *,
        model: nn.Module,
        cluster: Cluster | str,
        optimizer: OptimizerSpec | None,
        loss_fn: LossFn | None,
        options: PlanOptions,
        plan: Plan | None,
        seed: int,
        tape: InitTape | None,
    ) -> None:
        self._model, self._loss_fn, self._options = model, loss_fn, options
        self._cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
        self._optimizer, self._given_plan = optimizer, plan
        name = options.precision if plan is None else plan.training.precision
        dtype: torch.dtype = getattr(torch, runnable(name).param_dtype)
        self._cast_to = dtype if needs_cast(model, dtype) else None
        self._seed, self._tape = seed, tape
        self._program: ParallelModel | None = None
        self._graph: OpGraph | None = None
        self._eval_checked = False
        self._training = True
        _refuse_stale_optimizers(model, optimizer)

    def prepare(self, batch: Any) -> Parallel:
        """Plan for batches like this one, and build this rank's part. Does nothing if done."""
        if self._program is None:
            device = self._join()
            self._check_alike(batch)
            message = _from_first_rank(lambda: self._plan(self._cast(batch)))
            with tempfile.TemporaryDirectory() as folder:
                write_files(message["files"], Path(folder) / "program")
                program = load_program(Path(folder) / "program")
            self._program = ParallelModel(
                program,
                self._model,
                optimizer=self._optimizer,
                seed=self._seed,
                tape=self._tape,
                constants=message["constants"],
                device=device,
            )
        return self

    def _check_alike(self, batch: Any) -> None:
        state = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        seed = "call torch.manual_seed before building the model, or build it on the meta device"
        check_alike(state, "weight", seed)
        entries = {k: v for k, v in as_mapping(batch).items() if isinstance(v, Tensor)}
        check_alike(
            entries,
            "batch entry",
            "every rank gets the whole batch and takes its own samples, so use no sampler that "
            "gives ranks their own",
        )

    def _join(self) -> torch.device:
        """The process group of the run; a lone process makes one of its own."""
        devices, kind = self._cluster.num_devices, self._cluster.device(0).kind
        if not dist.is_initialized():
            if devices == 1 and not dist.is_torchelastic_launched():
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            else:
                return self._checked(init_from_env(timeout_s=_TIMEOUT_S), devices)
        return self._checked(torch.device("cpu" if kind == "cpu" else "cuda"), devices)

    def _checked(self, device: torch.device, devices: int) -> torch.device:
        if dist.get_world_size() != devices:
            raise InputError(
                f"cluster {self._cluster.spec} has {devices} devices, but "
                f"{dist.get_world_size()} processes were started; start {devices}, for example "
                f"with torchrun --nproc-per-node {devices} SCRIPT"
            )
        return device

    def _plan(self, batch: Any) -> dict[str, Any]:
        """Capture and plan, on one rank."""
        if self._given_plan is not None:
            planned = adopt_plan(
                self._given_plan,
                self._cast_model(),
                batch,
                cluster=self._cluster,
                loss_fn=self._loss_fn,
            )
        else:
            planned = plan_model(
                self._cast_model(),
                batch,
                self._cluster,
                self._options,
                name=type(self._model).__name__,
                loss_fn=self._loss_fn,
            )
        self._graph = planned.captured.graph
        return {"files": planned.files(), "constants": planned.captured.constants}

    def _cast_model(self) -> nn.Module:
        """The model in the precision's dtype, to be captured."""
        return self._model if self._cast_to is None else cast_model(self._model, self._cast_to)

    def _cast(self, batch: Any) -> Any:
        """A batch as the model in that dtype takes it."""
        return batch if self._cast_to is None else cast_batch(as_mapping(batch), self._cast_to)

    @property
    def program(self) -> ParallelModel:
        """This rank's part. Raises InputError before the first batch."""
        if self._program is None:
            raise InputError(
                "not planned yet: autopar plans at the first batch; call train_step(batch), or "
                "prepare(batch), or pass batch= to parallelize"
            )
        return self._program

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.program.plan

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer of this rank's parameters."""
        return self.program.optimizer

    def save_plan(self, path: Path | str) -> None:
        """Write the plan as JSON, on the first rank."""
        if dist.get_rank() == 0:
            write_plan(self.plan, path)

    def train(self, mode: bool = True) -> Parallel:
        """Switch between training and evaluation, as `nn.Module.train` does."""
        self._training = mode
        return self

    def eval(self) -> Parallel:
        """Switch to evaluation."""
        return self.train(False)

    def __call__(self, batch: Any) -> Any:
        """In training the loss, gradients added to `.grad`; in evaluation the model's output."""
        return self.backward_step(batch) if self._training else self.eval_step(batch)[1]

    def train_step(self, batch: Any, *, clip_norm: float | None = None) -> Tensor:
        """Forward, backward, clipping if asked for, optimizer step. The loss of the whole batch."""
        return self.prepare(batch).program.train_step(self._cast(batch), clip_norm=clip_norm)

    def backward_step(self, batch: Any, *, accumulate: bool = False) -> Tensor:
        """Forward and backward of the whole batch; gradients are added to `.grad`."""
        program = self.prepare(batch).program
        return program.backward_step(self._cast(batch), accumulate=accumulate)

    def eval_step(self, batch: Any) -> tuple[Tensor, Any]:
        """Loss and output in eval mode, whole, on every rank; nothing of the model changes."""
        program = self.prepare(batch).program
        if not self._eval_checked:
            _from_first_rank(lambda: self._check_eval(self._cast(batch)))
            self._eval_checked = True
        return program.eval_step(self._cast(batch))

    def _check_eval(self, batch: Any) -> None:
        """One program serves both modes where the graphs differ in their mode flags alone."""
        was_training = self._model.training
        try:
            self._model.eval()
            graph = capture(self._cast_model(), batch, loss_fn=self._loss_fn).graph
        finally:
            self._model.train(was_training)
        difference = first_difference(self._graph, graph) if self._graph else None
        if difference:
            raise CaptureError(
                f"the model computes other things in eval mode than in training ({difference}); "
                "parallelize it a second time in eval mode for evaluation"
            )

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, DTensors."""
        return self.program.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same under the original model's names."""
        return self.program.named_parameters()

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of all gradients of the whole model, the same on every rank."""
        return self.program.grad_norm(norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients to a global norm of at most `max_norm`; the norm before."""
        return self.program.clip_grad_norm_(max_norm, norm_type)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the backward; 1 unless the program computes in float16."""
        return self.program.loss_scale

    def full_state_dict(self) -> dict[str, Tensor]:
        """The original model's state dict on rank 0, empty elsewhere; all ranks call."""
        return self.program.full_state_dict()


def _from_first_rank(make: Callable[[], Any]) -> Any:
    """What `make()` gives on rank 0, on every rank; an error of it is raised on every rank."""
    message: list[Any] = [None]
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            message = [("done", make())]
        except AutoparError as error:
            message = [("error", error)]
        except Exception as error:  # others wait for a message, whatever went wrong here
            failed = error
            text = f"planning failed on rank 0: {type(error).__name__}: {error}"
            message = [("error", RuntimeFailure(text))]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(message, src=0)
    if failed is not None:
        raise failed
    status, value = message[0]
    if status == "error":
        raise value
    return value


def _precision(model: nn.Module, asked: str | None) -> str:
    """The precision asked for, or that of the model's own dtypes: a narrow dtype may stand beside
    float32, in which a model keeps what needs it."""
    if asked is not None:
        return runnable(asked).name
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    for name, row in PRECISIONS.items():
        dtype = getattr(torch, row.param_dtype)
        if dtypes <= ({dtype, torch.float32} if row.master else {dtype}):
            return name
    shown = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
    raise InputError(
        f"the model's parameters are {shown}; expected one of float32, float64, bfloat16 and "
        "float16, the last two beside float32 at most: say which with precision="
    )


def _optimizer_name(optimizer: OptimizerSpec | None) -> str:
    if isinstance(optimizer, Optimizer):
        return type(optimizer).__name__.lower()
    made = optimizer[0] if isinstance(optimizer, tuple) else optimizer
    return made.__name__.lower() if isinstance(made, type) else "adamw"


def _pin_pairs(pins: Pins) -> tuple[tuple[str, str], ...]:
    """Pins as texts; a list under a key stands for the key given several times."""
    pairs: list[tuple[str, str]] = []
    for key, value in pins.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        pairs += [(key, str(item)) for item in values]
    return tuple(pairs)


def _refuse_stale_optimizers(model: nn.Module, given: OptimizerSpec | None) -> None:
    """An optimizer that goes on stepping the original weights would train nothing, silently."""
    own = {id(p) for p in model.parameters()}
    for other in gc.get_objects():
        if not issubclass(type(other), Optimizer) or other is given:
            continue
        if any(id(p) in own for group in other.param_groups for p in group["params"]):
            raise InputError(
                f"a {type(other).__name__} was built on this model's parameters, which the "
                "parallel program does not use: pass it as optimizer=..., so that it is bound "
                "to the parallel parameters, or delete it"
            )
