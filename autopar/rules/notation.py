"""The text form of a rule: `b s (h d), h -> b s h d`."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod

from autopar.ir.graph import TensorSpec
from autopar.ir.size import Size
from autopar.rules.index_expr import Dims, IndexExpr, Op
from autopar.rules.letters import FROZEN_ONE, GENERIC_BATCH, from_generic

_DIM = re.compile(r"\s*(\.\.\.|\([^()\[\]]*\)|\[\w+\]|\w+)")
_Token = tuple[str, ...]
_ELLIPSIS: _Token = ("...",)


def parse_rule(text: str) -> Callable[[Op], IndexExpr]:
    """The rule that `text` describes. Raises ValueError if the text is malformed."""
    if text.count("->") != 1:
        raise ValueError(f"rule {text!r}: expected one '->' between inputs and outputs")
    left, right = text.split("->")
    inputs, outputs = (_parse_tensors(side, text) for side in (left, right))
    blocked = frozenset(re.findall(r"\[(\w+)\]", text))

    def rule(op: Op) -> IndexExpr:
        tensors, sizes = [], dict[str, Size]()
        specs = (*op.inputs, *op.outputs)
        if len(specs) != len(inputs) + len(outputs):
            raise ValueError(
                f"rule {text!r} of {op.node.target}: expected {len(inputs)} tensor inputs and "
                f"{len(outputs)} outputs, found {len(op.inputs)} and {len(op.outputs)}"
            )
        for tokens, spec in zip((*inputs, *outputs), specs, strict=True):
            tensors.append(_expand(tokens, spec, f"rule {text!r} of {op.node.target}"))
        _solve_sizes(tensors, specs, sizes, f"rule {text!r} of {op.node.target}")
        return IndexExpr(
            inputs=tuple(tensors[: len(inputs)]),
            outputs=tuple(tensors[len(inputs) :]),
            sizes=sizes,
            blocked=blocked,
        )

    return rule


def _parse_tensors(side: str, text: str) -> list[tuple[_Token, ...]]:
    """The dims of each tensor on one side of the arrow."""
    return [_parse_dims(tensor, text) for tensor in side.split(",")] if side.strip() else [()]


def _parse_dims(tensor: str, text: str) -> tuple[_Token, ...]:
    dims, position, tensor = [], 0, tensor.rstrip()
    while position < len(tensor):
        match = _DIM.match(tensor, position)
        if match is None:
            raise ValueError(f"rule {text!r}: cannot read {tensor[position:]!r} as a dim")
        dims.append(tuple(match.group(1).strip("()[]").split()))
        position = match.end()
    return tuple(dims)


def _expand(tokens: tuple[_Token, ...], spec: TensorSpec, where: str) -> Dims:
    """Dims of a tensor: the ellipsis becomes as many letters as there are dims left over."""
    extra = len(spec.shape) - len(tokens) + tokens.count(_ELLIPSIS)
    if extra < 0 or (extra and _ELLIPSIS not in tokens):
        raise ValueError(f"{where}: expected {len(tokens)} dims, found {spec}")
    dims: list[_Token] = []
    for token in tokens:
        # counted from the right, as broadcasting does
        dims += [(f"...{i}",) for i in range(extra, 0, -1)] if token == _ELLIPSIS else [token]
    return tuple(
        () if size == FROZEN_ONE and len(dim) == 1 else dim
        for dim, size in zip(dims, spec.shape, strict=True)
    )


def _solve_sizes(
    tensors: list[Dims], specs: tuple[TensorSpec, ...], sizes: dict[str, Size], where: str
) -> None:
    """Fill `sizes`: whole dims first, then the one unknown factor of each longer dim."""
    pairs = [
        (dim, size)
        for dims, spec in zip(tensors, specs, strict=True)
        for dim, size in zip(dims, spec.shape, strict=True)
    ]
    for dim, size in sorted(pairs, key=lambda pair: len(pair[0])):
        unknown = [letter for letter in dim if letter not in sizes]
        if len(unknown) > 1:
            raise ValueError(f"{where}: sizes of {' and '.join(unknown)} cannot be told apart")
        known = prod(sizes[letter].at(GENERIC_BATCH) for letter in dim if letter in sizes)
        extent = size.at(GENERIC_BATCH)
        if unknown:
            sizes[unknown[0]] = from_generic(extent // known)
            known *= extent // known
        if dim and known != extent:
            raise ValueError(f"{where}: {' '.join(dim)} has size {size}, which does not fit")


__all__ = ["parse_rule"]
