"""Which tensors autograd keeps from the forward to the backward pass.

`SAVES` is a table from op to what its backward formula reads (torch's `derivatives.yaml`, checked
op by op with `saved_tensors_hooks`). Storages are counted once however many ops keep them: a view
keeps the storage of its base.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod

from autopar.costs.attention import DROPOUT, FUSED, attention_kernel
from autopar.costs.local_op import op_name
from autopar.costs.saved_table import KEEPS_ALL, Keep, keep_rule
from autopar.costs.strides import TRACE_BATCH, StorageMap, is_view, trace_storage, view_strides
from autopar.ir.graph import DTYPE_BYTES, OpNode, Ref, TensorSpec, refs_in
from autopar.ir.size import shape_at

MADE = "made"
INPUT = "input"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SavedValue:
    """A storage kept for backward: all of the value `ref` that owns it.

    `kind` is `made` if one of the nodes asked about made it, else `input`.
    """

    ref: Ref
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedExtra:
    """A tensor that is no value of the graph (a mask, a log-sum-exp, a copy), kept by `node`.

    Its size is the number of local elements of `like` times `bytes_per_element`.
    """

    node: str
    like: Ref
    bytes_per_element: float
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedSet:
    """What a run of nodes keeps. `assumed` names ops that are not in the table.

    `kept` has every (node, value it keeps), parameters and views among them.
    """

    values: tuple[SavedValue, ...]
    extras: tuple[SavedExtra, ...]
    kept: tuple[tuple[str, Ref], ...] = ()
    assumed: tuple[str, ...] = ()

    def nbytes(self, numel: Callable[[Ref], int], specs: Mapping[Ref, TensorSpec]) -> int:
        """Bytes kept, given the number of local elements of every value."""
        values = sum(numel(v.ref) * DTYPE_BYTES[specs[v.ref].dtype] for v in self.values)
        return values + round(sum(numel(e.like) * e.bytes_per_element for e in self.extras))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    """One node with the facts its rule reads."""

    node: OpNode
    inputs: tuple[Ref, ...]
    needs: tuple[bool, ...]
    specs: Mapping[Ref, TensorSpec]
    storage: StorageMap
    device_kind: str
    uncast: Mapping[Ref, Ref]

    @property
    def output(self) -> Ref:
        return Ref(self.node.name)

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return shape_at(self.specs[ref].shape, TRACE_BATCH)

    def itemsize(self, ref: Ref) -> int:
        return DTYPE_BYTES[self.specs[ref].dtype]

    def extra(self, what: str, like: Ref, bytes_per_element: float) -> SavedExtra:
        return SavedExtra(
            node=self.node.name, like=like, bytes_per_element=bytes_per_element, what=what
        )

    def optional(self, position: int, name: str) -> Ref | None:
        return next(refs_in(self.node.arg(position, name)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    refs: tuple[Ref, ...] = ()
    extras: tuple[SavedExtra, ...] = ()
    assumed: bool = False


def saved_refs(
    nodes: Sequence[OpNode],
    specs: Mapping[Ref, TensorSpec],
    differentiable: Set[Ref],
    *,
    storage: StorageMap | None = None,
    exclude: Collection[Ref] = (),
    device_kind: str = "cuda",
    fuses_loss: bool = False,
) -> SavedSet:
    """What `nodes`, in execution order, keep for their backward pass, each storage once.

    `storage` is `trace_storage` of the whole graph; without it values from outside `nodes` are
    taken to own their storage. `exclude` are parameters and buffers, which are held anyway: nothing
    that lies in their storage is counted. With `fuses_loss` a loss keeps its logits as they are
    before they are widened for it. Values keep the order of first use.
    """
    storage = storage or trace_storage(nodes, specs, device_kind=device_kind)
    made = {Ref(node.name, i) for node in nodes for i in range(len(node.outputs))}
    casts = [node for node in nodes if fuses_loss and op_name(node.target) == "to"]
    uncast = {Ref(node.name): node.inputs()[0] for node in casts}
    refs: dict[Ref, None] = {}
    pairs: list[tuple[str, Ref]] = []
    extras: list[SavedExtra] = []
    assumed: dict[str, None] = {}
    for node in nodes:
        inputs = node.inputs()
        context = _Context(
            node=node,
            inputs=inputs,
            needs=tuple(ref in differentiable for ref in inputs),
            specs=specs,
            storage=storage,
            device_kind=device_kind,
            uncast=uncast,
        )
        kept = _kept(context)
        refs.update(dict.fromkeys(storage.base(ref) for ref in kept.refs))
        pairs.extend((node.name, ref) for ref in kept.refs)
        extras.extend(kept.extras)
        if kept.assumed:
            assumed[node.target] = None
    values = tuple(
        SavedValue(ref=ref, kind=MADE if ref in made else INPUT)
        for ref in refs
        if ref not in exclude
    )
    return SavedSet(values=values, extras=tuple(extras), kept=tuple(pairs), assumed=tuple(assumed))


def kept_parameters(
    nodes: Sequence[OpNode],
    specs: Mapping[Ref, TensorSpec],
    differentiable: Set[Ref],
    parameters: Collection[Ref],
    *,
    storage: StorageMap | None = None,
    device_kind: str = "cuda",
) -> frozenset[Ref]:
    """The `parameters` whose values, or views of them, the backward of `nodes` reads.

    A bias is not among them, nor the table of an embedding; see `saved_refs`.
    """
    found = saved_refs(nodes, specs, differentiable, storage=storage, device_kind=device_kind)
    return frozenset(value.ref for value in found.values if value.ref in parameters)


def _kept(context: _Context) -> _Kept:
    node, name = context.node, op_name(context.node.target)
    if not node.requires_grad or not any(context.needs):
        return _Kept()
    if is_view(node.target) and context.storage.base(context.output) != context.output:
        return _Kept()
    if special := SPECIAL.get(name):
        return special(context)
    rule = keep_rule(node.target)
    if rule is None and is_view(node.target):
        return _Kept()
    kept = _apply(rule or KEEPS_ALL, context)
    extras = EXTRAS[name](context) if name in EXTRAS else ()
    return _Kept(refs=kept, extras=extras, assumed=rule is None)


def _apply(rule: Keep, context: _Context) -> tuple[Ref, ...]:
    node = context.node
    inputs = (context.inputs[i] for i in rule.kept_inputs(context.needs))
    return (*inputs, *(Ref(node.name, i) for i in rule.kept_outputs(len(node.outputs))))


def _product(context: _Context) -> _Kept:
    """Operands of a product; one that cannot be viewed as a matrix is kept as a copy."""
    rule = keep_rule(context.node.target) or KEEPS_ALL
    refs: list[Ref] = []
    extras: list[SavedExtra] = []
    for ref in _apply(rule, context):
        if _is_matrix_view(context, ref):
            refs.append(ref)
        else:
            extras.append(context.extra("copy of an operand", ref, context.itemsize(ref)))
    return _Kept(refs=tuple(refs), extras=tuple(extras))


def _is_matrix_view(context: _Context, ref: Ref) -> bool:
    """Whether `matmul` can fold the leading dims of `ref` into one without a copy."""
    shape = context.shape(ref)
    stored = context.storage.stored.get(ref)
    if stored is None or len(shape) <= 2:
        return True
    ranks = [len(context.shape(other)) for other in context.inputs[:2]]
    folded = (prod(shape[:-1]), shape[-1])
    batched = (prod(shape[:-2]), *shape[-2:])
    target = folded if min(ranks) <= 2 else batched
    return view_strides(shape, stored.strides, target) is not None


def _attention(context: _Context) -> _Kept:
    query, key, value = context.inputs[:3]
    shapes = [context.shape(ref) for ref in (query, key, value)]
    dtype = context.specs[query].dtype
    kernel = attention_kernel(context.node, shapes, dtype, context.device_kind)
    if kernel == FUSED:
        return _fused_attention(context)
    item = context.itemsize(query)
    scores_per_output = shapes[1][-2] / shapes[2][-1]
    extras = [
        context.extra("scaled query", query, item),
        context.extra("scaled key", key, item),
        context.extra("attention probabilities", context.output, item * scores_per_output),
    ]
    if kernel == DROPOUT:
        extras += [
            context.extra("attention dropout mask", context.output, scores_per_output),
            context.extra("dropped probabilities", context.output, item * scores_per_output),
        ]
    held = _is_matrix_view(context, value)
    if not held:
        extras.append(context.extra("copy of the values", value, item))
    return _Kept(refs=(value,) if held else (), extras=tuple(extras))


def _fused_attention(context: _Context) -> _Kept:
    """Query, key, value, result, log-sum-exp; the mask, which a boolean one is converted for."""
    width = context.shape(context.inputs[2])[-1]
    item = context.itemsize(context.inputs[0])
    refs = [*context.inputs[:3], context.output]
    extras = [context.extra("log-sum-exp", context.output, _accumulator(item) / width)]
    if mask := context.optional(3, "attn_mask"):
        if context.specs[mask].dtype == "bool":
            extras.append(context.extra("additive mask", mask, item))
        else:
            refs.append(mask)
    return _Kept(refs=tuple(refs), extras=tuple(extras))


def _accumulator(itemsize: int) -> int:
    """Width of statistics: float32 at least."""
    return max(4, itemsize)


def _dropout_extras(context: _Context) -> tuple[SavedExtra, ...]:
    return (context.extra("dropout mask", context.output, 1),)


def _layer_norm_extras(context: _Context) -> tuple[SavedExtra, ...]:
    shape = context.node.arg(1, "normalized_shape")
    dims = len(shape) if isinstance(shape, tuple) else 1
    width = prod(context.shape(context.output)[-dims:])
    statistics = 2 * _accumulator(context.itemsize(context.inputs[0])) / width
    return (context.extra("mean and rstd", context.output, statistics),)


def _rms_norm_extras(context: _Context) -> tuple[SavedExtra, ...]:
    """One statistic a row; where there is no fused kernel, the normalised input too."""
    item = context.itemsize(context.inputs[0])
    width = context.shape(context.output)[-1]
    extras = [context.extra("rstd", context.output, _accumulator(item) / width)]
    if context.device_kind not in _FUSED_RMS_NORM and len(context.inputs) > 1:
        extras.append(context.extra("normalised input", context.output, item))
    return tuple(extras)


def _loss_extras(context: _Context) -> tuple[SavedExtra, ...]:
    logits = context.inputs[0]
    return (context.extra("log-softmax", logits, context.itemsize(logits)),)


def _sum_loss_extras(context: _Context) -> tuple[SavedExtra, ...]:
    logits = context.inputs[0]
    if (narrow := context.uncast.get(logits)) is not None:
        return (context.extra("logits", logits, context.itemsize(narrow)),)
    return (context.extra("log-softmax", logits, _accumulator(context.itemsize(logits))),)


def _pool_extras(context: _Context) -> tuple[SavedExtra, ...]:
    return (context.extra("indices of the maxima", context.output, DTYPE_BYTES["int64"]),)


_FUSED_RMS_NORM = frozenset({"cuda"})

SPECIAL: dict[str, Callable[[_Context], _Kept]] = {
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("linear", "matmul"), _product),
}
"""Ops whose kept inputs depend on arguments or strides."""

EXTRAS: dict[str, Callable[[_Context], tuple[SavedExtra, ...]]] = {
    "dropout": _dropout_extras,
    "layer_norm": _layer_norm_extras,
    "rms_norm": _rms_norm_extras,
    "cross_entropy_loss": _loss_extras,
    "cross_entropy_sum": _sum_loss_extras,
    "max_pool2d": _pool_extras,
}
"""Tensors kept that are no values of the graph, beside what `KEEP` lists."""
