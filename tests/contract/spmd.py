"""Runs one op on n virtual ranks in one process, as a strategy says, and compares with the whole.

Inputs are cut by their placements, the op runs on each rank, the outputs are put together; then
each rank gets the gradient that the output's placement stands for, and the gradients of the inputs
are put together. All of it in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.capture.grouped import grouped_mm
from autopar.ir.graph import OpNode, Ref, TensorSpec
from autopar.ir.placement import P, Placement, Replicate, Shard, local_slices
from autopar.ir.size import Size
from autopar.ir.strategy import AxisStrategy
from autopar.rules import axis_strategies

Rank = tuple[list[Any], dict[str, Any]]
Hints = dict[tuple[str, int], tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """One op with concrete arguments. `hints` as of `piece_hints`, inputs being `t0`, `t1`, ...;
    `fixed` inputs have no gradient."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    hints: Hints = field(default_factory=dict)
    fixed: frozenset[int] = frozenset()

    def __str__(self) -> str:
        shapes = "_".join("x".join(map(str, t.shape)) for t in self.tensors())
        return f"{self.target.removeprefix('aten.')}-{shapes}"

    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        substitute((list(self.args), self.kwargs), lambda t: found.append(t) or t)
        return found

    def node(self) -> tuple[OpNode, dict[Ref, TensorSpec]]:
        """The op as a graph node and the specs of its inputs."""
        specs: dict[Ref, TensorSpec] = {}

        def name(tensor: Tensor) -> Ref:
            ref = Ref(f"t{len(specs)}")
            specs[ref] = spec_of(tensor)
            return ref

        args, kwargs = substitute((list(self.args), self.kwargs), name)
        node = OpNode(
            name="op",
            target=self.target,
            args=tuple(map(frozen, args)),
            kwargs=tuple((key, frozen(value)) for key, value in kwargs.items()),
            outputs=tuple(map(spec_of, outputs_of(self.run((list(self.args), self.kwargs))))),
            requires_grad=True,
        )
        return node, specs

    def run(self, rank: Rank) -> Any:
        args, kwargs = rank
        if self.target.startswith("autopar."):
            return REFERENCE[self.target](*args, **kwargs)
        namespace, op, overload = self.target.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)(*args, **kwargs)

    def strategies(self, size: int) -> tuple[AxisStrategy, ...]:
        node, specs = self.node()
        hints = {(Ref(name), dim): pieces for (name, dim), pieces in self.hints.items()}
        return axis_strategies(node, specs, size=size, batch=1, hints=hints)


def substitute(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """The same structure with each tensor replaced, left to right."""
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, (list, tuple)):
        return type(value)(substitute(item, replace) for item in value)
    if isinstance(value, dict):
        return {key: substitute(item, replace) for key, item in value.items()}
    return value


def frozen(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return tuple(map(frozen, arg))
    return f"dtype:{arg}".replace("torch.", "") if isinstance(arg, torch.dtype) else arg


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(
        shape=tuple(map(Size, tensor.shape)), dtype=str(tensor.dtype).removeprefix("torch.")
    )


def outputs_of(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


# --- cutting and putting together -------------------------------------------------------------


def cut(tensor: Tensor, shard: Shard, size: int, rank: int) -> Tensor:
    """The part of the tensor that the rank holds."""
    ranges = local_slices(tensor.shape[shard.dim], shard, size, rank)
    return torch.cat([tensor.narrow(shard.dim, *range_) for range_ in ranges], shard.dim)


def summands(tensor: Tensor, size: int) -> list[Tensor]:
    """Random tensors that add up to `tensor`."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        parts = [torch.randint_like(tensor, 0, 5) for _ in range(size - 1)]
    else:
        parts = [torch.randn_like(tensor) for _ in range(size - 1)]
    return [*parts, tensor - sum(parts)]


def distribute(tensor: Tensor, placement: Placement, size: int) -> list[Tensor]:
    """The value of each rank."""
    if isinstance(placement, Shard):
        return [cut(tensor, placement, size, rank) for rank in range(size)]
    return summands(tensor, size) if placement == P else [tensor.clone() for _ in range(size)]


def distribute_gradient(grad: Tensor, placement: Placement, size: int) -> list[Tensor]:
    """The gradient that each rank is given for an output so placed."""
    if isinstance(placement, Shard):
        return distribute(grad, placement, size)
    partial = isinstance(placement, Replicate) and placement.grad_partial
    return summands(grad, size) if partial else [grad.clone() for _ in range(size)]


def assemble(parts: list[Tensor], placement: Placement, like: Tensor) -> Tensor:
    """The whole tensor; fails if replicas differ."""
    size = len(parts)
    if isinstance(placement, Shard):
        whole = torch.full_like(like, 99)
        for rank, part in enumerate(parts):
            start = 0
            for offset, length in local_slices(like.shape[placement.dim], placement, size, rank):
                piece = part.narrow(placement.dim, start, length)
                whole.narrow(placement.dim, offset, length).copy_(piece)
                start += length
            assert start == part.shape[placement.dim], "the local output has another size"
        return whole
    if placement == P:
        return torch.stack(parts).sum(0).to(like.dtype)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0])
    return parts[0]


def assemble_gradient(parts: list[Tensor], placement: Placement, like: Tensor) -> Tensor:
    """The whole gradient of an input so placed."""
    if isinstance(placement, Shard):
        return assemble(parts, placement, like)
    partial = isinstance(placement, Replicate) and placement.grad_partial
    return assemble(parts, P if partial else Replicate(), like)


# --- the local op -----------------------------------------------------------------------------


def _set(position: int, value: Callable[[list[Any], list[Tensor]], Any]) -> Callable[..., None]:
    def edit(args: list[Any], outs: list[Tensor]) -> None:
        args[position] = value(args, outs)

    return edit


def _unflatten(args: list[Any], outs: list[Tensor]) -> None:
    start = args[1] % args[0].dim()
    args[2] = list(outs[0].shape[start : start + len(args[2])])


def _split(args: list[Any], outs: list[Tensor]) -> None:
    dim = args[2] if len(args) > 2 else 0
    sizes = [out.shape[dim] for out in outs]
    args[1] = sizes if isinstance(args[1], (list, tuple)) else sizes[0]


def _groups(position: int) -> Callable[[list[Any], list[Tensor]], None]:
    def edit(args: list[Any], outs: list[Tensor]) -> None:
        transposed = position == 8 and args[6]
        if len(args) > position and not transposed:
            args[position] = args[0].shape[1] // args[1].shape[1]

    return edit


def _repeats(args: list[Any], outs: list[Tensor]) -> list[int]:
    shape = (*((1,) * (outs[0].dim() - args[0].dim())), *args[0].shape)
    return [
        out // own if own else copies
        for out, own, copies in zip(outs[0].shape, shape, args[1], strict=True)
    ]


_SHAPE = {position: _set(position, lambda args, outs: list(outs[0].shape)) for position in (0, 1)}
SIZE_ARGS: dict[str, Callable[[list[Any], list[Tensor]], None]] = {
    **dict.fromkeys(("zeros", "ones", "full"), _SHAPE[0]),
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "view_copy", "expand", "broadcast_to"), _SHAPE[1]
    ),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full"), _SHAPE[1]),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _groups(6)),
    "unflatten": _unflatten,
    "repeat": _set(1, _repeats),
    "tile": _set(1, _repeats),
    "convolution": _groups(8),
}


def localize(case: Case, rank: Rank, outs: list[Tensor]) -> Rank:
    """Size arguments set to the sizes of the local outputs `outs` (of which only shapes count)."""
    args, kwargs = list(rank[0]), dict(rank[1])
    op = case.target.split(".")[1]
    if op == "group_norm":
        args[1] = args[1] * args[0].shape[1] // case.args[0].shape[1]
    elif op in SIZE_ARGS:
        SIZE_ARGS[op](args, outs)
    return args, kwargs


# --- kernels ----------------------------------------------------------------------------------


def _mask(shape: torch.Size, p: float) -> Tensor:
    """The mask one device would draw."""
    generator = torch.Generator().manual_seed(7)
    return (torch.rand(shape, generator=generator) >= p).double() / (1 - p)


def _dropout(case: Case, ranks: list[Rank], strategy: AxisStrategy) -> list[Any]:
    mask = _mask(case.args[0].shape, case.args[1])
    masks = distribute(mask, strategy.outputs[0], len(ranks))
    return [args[0] * local for (args, _), local in zip(ranks, masks, strict=True)]


def _attention_dropout(case: Case, ranks: list[Rank], strategy: AxisStrategy) -> list[Any]:
    q, k = case.args[:2]
    mask = _mask(torch.Size((*q.shape[:-1], k.shape[-2])), case.args[4])
    masks = distribute(mask, strategy.outputs[0], len(ranks))
    results = []
    for (args, _), local in zip(ranks, masks, strict=True):
        query, key, value, bias = args[:4]
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        if bias is not None:
            scores = scores + bias
        results.append((scores.softmax(-1) * local) @ value)
    return results


def _causal_rows(case: Case, ranks: list[Rank], strategy: AxisStrategy) -> list[Any]:
    results, (q, k) = [], case.args[:2]
    rows = len(q.shape) - 2
    for index, (args, _) in enumerate(ranks):
        ((start, length),) = local_slices(q.shape[rows], Shard(rows), len(ranks), index)
        seen = torch.ones(q.shape[rows], k.shape[-2], dtype=torch.bool).tril()
        mask = seen[start : start + length]
        results.append(torch.nn.functional.scaled_dot_product_attention(*args[:3], mask))
    return results


def _vocab_embedding(case: Case, ranks: list[Rank], strategy: AxisStrategy) -> list[Any]:
    results, rows = [], case.args[0].shape[0]
    for index, (args, _) in enumerate(ranks):
        ((start, length),) = local_slices(rows, Shard(0), len(ranks), index)
        weight, ids = args[0], args[1]
        one_hot = torch.nn.functional.one_hot(ids, rows)[..., start : start + length].double()
        results.append(one_hot @ weight)
    return results


def _vocab_cross_entropy(case: Case, ranks: list[Rank], strategy: AxisStrategy) -> list[Any]:
    target, ignore = case.args[1], case.args[2]
    valid = target != ignore
    shards = [args[0] for args, _ in ranks]
    top = torch.cat(shards, 1).amax(1).detach()
    total = sum((shard - top.unsqueeze(1)).exp().sum(1) for shard in shards)
    results = []
    for index, shard in enumerate(shards):
        ((start, length),) = local_slices(case.args[0].shape[1], Shard(1), len(ranks), index)
        classes = torch.arange(start, start + length).view(-1, *[1] * (target.dim() - 1))
        hit = (target.unsqueeze(1) == classes) & valid.unsqueeze(1)
        loss = -(shard * hit).sum()
        results.append(loss + ((total.log() + top) * valid).sum() if index == 0 else loss)
    return results


def _partial_mean(case: Case, ranks: list[Rank], strategy: AxisStrategy) -> list[Any]:
    whole = case.args[0]
    dims = list(case.args[1]) if len(case.args) > 1 and case.args[1] else range(whole.dim())
    keep = case.args[2] if len(case.args) > 2 else False
    count = torch.tensor([whole.shape[dim] for dim in dims]).prod()
    return [args[0].sum(tuple(dims), keepdim=keep) / count for args, _ in ranks]


def _batch_norm(case: Case, ranks: list[Rank], strategy: AxisStrategy) -> list[Any]:
    shards, whole = [args[0] for args, _ in ranks], case.args[0]
    dims = [dim for dim in range(whole.dim()) if dim != 1]
    count = whole.numel() / whole.shape[1]
    mean = sum(shard.sum(dims, keepdim=True) for shard in shards) / count
    var = sum((shard - mean).square().sum(dims, keepdim=True) for shard in shards) / count
    results = []
    for (args, _), shard in zip(ranks, shards, strict=True):
        out = (shard - mean) / (var + args[7]).sqrt()
        if args[1] is not None:
            out = out * args[1].view(mean.shape) + args[2].view(mean.shape)
        results.append(out)
    return results


KERNELS = {
    "batch_norm": _batch_norm,
    "dropout": _dropout,
    "attention_dropout": _attention_dropout,
    "causal_rows": _causal_rows,
    "vocab_embedding": _vocab_embedding,
    "vocab_cross_entropy": _vocab_cross_entropy,
    "partial_mean": _partial_mean,
}


def _cross_entropy_sum(logits: Tensor, target: Tensor, ignore: int, smoothing: float) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits, target, ignore_index=ignore, label_smoothing=smoothing, reduction="sum"
    )


def _whole_batch_norm(x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
    return torch.nn.functional.batch_norm(x, None, None, weight, bias, True, eps=rest[-1])


REFERENCE: dict[str, Callable[..., Any]] = {
    "autopar.batch_norm.default": _whole_batch_norm,
    "autopar.grouped_mm.default": grouped_mm,
    "autopar.cross_entropy_sum.default": _cross_entropy_sum,
    "autopar.count_valid.default": lambda target, ignore: (target != ignore).sum(),
}


# --- the check --------------------------------------------------------------------------------


def leaf(tensor: Tensor, fixed: bool) -> Tensor:
    tensor = tensor.detach().clone()
    number = tensor.is_floating_point() or tensor.is_complex()
    return tensor.requires_grad_() if number and not fixed else tensor


def rebuild(case: Case, tensors: list[Tensor]) -> Rank:
    """The arguments with these tensors."""
    queue = iter(tensors)
    return substitute((list(case.args), dict(case.kwargs)), lambda _: next(queue))


def run_ranks(case: Case, strategy: AxisStrategy, ranks: list[Rank]) -> list[list[Tensor]]:
    """Outputs of each rank."""
    if strategy.kernel != "local":
        return [outputs_of(r) for r in KERNELS[strategy.kernel](case, ranks, strategy)]
    whole = outputs_of(case.run((list(case.args), case.kwargs)))
    results = []
    for index, rank in enumerate(ranks):
        shapes = [
            cut(out, p, len(ranks), index) if isinstance(p, Shard) else out
            for out, p in zip(whole, strategy.outputs, strict=True)
        ]
        if case.target == "aten.squeeze.default":  # which dims go must not depend on the rank
            results.append([rank[0][0].reshape(shapes[0].shape)])
        else:
            results.append(outputs_of(case.run(localize(case, rank, shapes))))
    return results


def gradients(outs: list[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Gradient of every floating input; zero where none arrives."""
    kept = [(o, g) for o, g in zip(outs, grads, strict=True) if o.requires_grad]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not kept or not wanted:
        return [torch.zeros_like(tensor) for tensor in inputs]
    found = iter(
        torch.autograd.grad([o for o, _ in kept], wanted, [g for _, g in kept], allow_unused=True)
    )
    given = [next(found) if tensor.requires_grad else None for tensor in inputs]
    return [torch.zeros_like(t) if g is None else g for g, t in zip(given, inputs, strict=True)]


def check(case: Case, strategy: AxisStrategy, size: int) -> None:
    """Assert that the strategy gives the outputs and gradients of the whole op."""
    torch.manual_seed(0)
    whole_inputs = [leaf(tensor, i in case.fixed) for i, tensor in enumerate(case.tensors())]
    whole_rank = rebuild(case, whole_inputs)
    random = strategy.kernel in ("dropout", "attention_dropout")
    one = AxisStrategy(inputs=(Replicate(),) * len(whole_inputs), outputs=(Replicate(),))
    whole_outs = outputs_of(
        KERNELS[strategy.kernel](case, [whole_rank], one)[0] if random else case.run(whole_rank)
    )

    local_inputs = [
        [leaf(part, i in case.fixed) for part in distribute(tensor.detach(), placement, size)]
        for i, (tensor, placement) in enumerate(zip(case.tensors(), strategy.inputs, strict=True))
    ]
    ranks = [rebuild(case, [parts[rank] for parts in local_inputs]) for rank in range(size)]
    local_outs = run_ranks(case, strategy, ranks)
    for index, (truth, placement) in enumerate(zip(whole_outs, strategy.outputs, strict=True)):
        parts = [outs[index].detach() for outs in local_outs]
        found = assemble(parts, placement, truth.detach())
        torch.testing.assert_close(found, truth.detach(), msg=lambda m: f"forward: {m}")

    whole_grads = [torch.randn_like(out) if out.requires_grad else out for out in whole_outs]
    expected = gradients(whole_outs, whole_inputs, whole_grads)
    placed = [
        distribute_gradient(g, p, size) for g, p in zip(whole_grads, strategy.outputs, strict=True)
    ]
    flat_outs = [out for outs in local_outs for out in outs]
    flat_grads = [parts[rank] for rank in range(size) for parts in placed]
    flat_inputs = [parts[rank] for rank in range(size) for parts in local_inputs]
    found = gradients(flat_outs, flat_inputs, flat_grads)
    count = len(whole_inputs)
    for index, placement in enumerate(strategy.inputs):
        if whole_inputs[index].requires_grad:
            whole = assemble_gradient(found[index::count], placement, expected[index])
            torch.testing.assert_close(
                whole, expected[index], msg=lambda m, i=index: f"gradient of input {i}: {m}"
            )
