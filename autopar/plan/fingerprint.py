"""What a plan was made for, and whether a model or cluster at hand is that one.

The fingerprint follows from the graph alone. Names of people's files and lines, module paths and
the names torch gives to ops do not enter it: an equal program has an equal fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from autopar.errors import PlanMismatch
from autopar.ir.cluster import Cluster, DeviceGroup, DeviceSpec
from autopar.ir.graph import Arg, OpGraph, Ref, Source, SourceKind, TensorSpec
from autopar.ir.size import Size
from autopar.plan.pipeline import rank_groups, ranks_peak_bytes
from autopar.plan.plan import ModelFingerprint, ParameterPlan, Plan, TensorEntry
from autopar.plan.text import amount, spans

_REMEDY = "make the plan again for this model"
_STATE = (SourceKind.PARAMETER, SourceKind.BUFFER, SourceKind.CONSTANT)


def fingerprint(graph: OpGraph, name: str) -> ModelFingerprint:
    """The fingerprint of a captured model. `name` is a label; it is never compared."""
    return ModelFingerprint(
        name=name,
        parameters=_entries(source for source in graph.sources if source.kind in _STATE),
        inputs=_entries(source for source in graph.sources if source.kind is SourceKind.INPUT),
        num_ops=len(graph.nodes),
        ops_digest=ops_digest(graph),
    )


def ops_digest(graph: OpGraph) -> str:
    """SHA-256 of the program: sources, ops with arguments and shapes, wiring, outputs."""
    lines = canonical_ops(graph)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def canonical_ops(graph: OpGraph) -> tuple[str, ...]:
    """The program as text, one line per source and op; two equal lists are equal programs."""
    names = [source.name for source in graph.sources] + [node.name for node in graph.nodes]
    position = {name: index for index, name in enumerate(names)}
    lines = [_source_line(source) for source in graph.sources]
    for node in graph.nodes:
        args = [_arg(arg, position) for arg in node.args]
        args += [f"{key}={_arg(value, position)}" for key, value in sorted(node.kwargs)]
        grad = " grad" if node.requires_grad else ""
        lines.append(f"{node.target}({', '.join(args)}) -> {_specs(node.outputs)}{grad}")
    loss = "none" if graph.loss is None else _arg(graph.loss, position)
    outputs = ", ".join(_arg(ref, position) for ref in graph.outputs)
    return (*lines, f"loss {loss}", f"outputs {outputs}", f"returns {graph.output_tree}")


def check_model(plan: Plan, graph: OpGraph) -> None:
    """Raise PlanMismatch that names the first field in which the model differs from the plan's.

    Compared are parameters, buffers and constants (names, shapes, dtypes, ties, trainable or not),
    inputs, and the op list, to which the ops a plan decides for must belong.
    """
    model = fingerprint(graph, plan.model.name)
    _check_entries("parameter", plan.model.parameters, model.parameters)
    sources = {source.fqn: source for source in graph.sources if source.kind in _STATE}
    for stage in plan.stages:
        for parameter in stage.parameters:
            _check_parameter(parameter, sources)
    _check_entries("input", plan.model.inputs, model.inputs)
    if plan.model.num_ops != model.num_ops:
        raise PlanMismatch(
            f"number of ops: plan has {plan.model.num_ops}, model has {model.num_ops}; {_REMEDY}"
        )
    if plan.model.ops_digest != model.ops_digest:
        raise PlanMismatch(
            f"op list: plan has digest {plan.model.ops_digest[:12]}, model has "
            f"{model.ops_digest[:12]}: ops, their arguments, shapes or wiring differ; {_REMEDY}"
        )
    names = {node.name for node in graph.nodes}
    for variant in plan.variants:
        for choice in variant.choices:
            if choice.node not in names:
                raise PlanMismatch(
                    f"op {choice.node} of variant {variant.name}: the model has no op of that name "
                    f"(the ops are the same, their names are not); {_REMEDY}"
                )


def check_cluster(plan: Plan, cluster: Cluster) -> None:
    """Raise PlanMismatch that names the first field in which the cluster cannot run the plan.

    Compared are the number of devices, and of every rank the plan uses the device and whether its
    memory holds what the plan needs there. Link speeds change the time, not the program.
    """
    cluster = _used(plan, cluster)
    if plan.cluster.num_devices != cluster.num_devices:
        raise PlanMismatch(
            f"number of devices: plan has {plan.cluster.num_devices} ({plan.cluster.spec}), "
            f"cluster has {cluster.num_devices} ({cluster.spec}); make the plan again for it"
        )
    for stages in rank_groups(plan.stages):
        needed_bytes = ranks_peak_bytes(stages)
        held = f"stage {spans(stage.index for stage in stages)}"
        for rank in stages[0].ranks:
            where = f"rank {rank} ({held})"
            _check_device(where, plan.cluster.device(rank), cluster.device(rank), needed_bytes)


def _used(plan: Plan, cluster: Cluster) -> Cluster:
    """The devices that the plan uses, in its order, of the cluster that it was asked for."""
    asked = len(plan.devices) + sum(len(left.devices) for left in plan.left_out)
    names = [plan.cluster.device(rank).name for rank in range(len(plan.devices))]
    if not plan.devices or asked != cluster.num_devices:
        return cluster
    if names != [cluster.device(device).name for device in plan.devices]:
        return cluster
    groups = tuple(
        DeviceGroup(device=cluster.device(device), nodes=1, devices_per_node=1)
        for device in plan.devices
    )
    return replace(cluster, groups=groups)


def _check_device(where: str, planned: DeviceSpec, found: DeviceSpec, needed_bytes: float) -> None:
    for field, want, have in (
        ("device", planned.name, found.name),
        ("device kind", planned.kind, found.kind),
    ):
        if want != have:
            raise PlanMismatch(
                f"{field} of {where}: plan has {want}, cluster has {have}; make the plan again"
            )
    if needed_bytes > found.memory_bytes:
        raise PlanMismatch(
            f"memory of {where}: plan needs {amount(needed_bytes)}, cluster has "
            f"{amount(found.memory_bytes)}; make the plan again"
        )


def _check_entries(
    what: str, planned: tuple[TensorEntry, ...], found: tuple[TensorEntry, ...]
) -> None:
    have = {entry.fqn: entry for entry in found}
    for entry in planned:
        if entry.fqn not in have:
            raise PlanMismatch(f"{what} {entry.fqn}: in the plan, not in the model; {_REMEDY}")
        other = have.pop(entry.fqn)
        if entry.shape != other.shape:
            raise PlanMismatch(
                f"{what} {entry.fqn}: plan has {_shape(entry)}, model has {_shape(other)}; "
                + _REMEDY
            )
        if entry.dtype != other.dtype:
            raise PlanMismatch(
                f"{what} {entry.fqn}: plan has {entry.dtype}, model has {other.dtype}; {_REMEDY}"
            )
    for fqn in have:
        raise PlanMismatch(f"{what} {fqn}: in the model, not in the plan; {_REMEDY}")


def _check_parameter(parameter: ParameterPlan, sources: dict[str, Source]) -> None:
    source = sources.get(parameter.fqn)
    if source is None:
        raise PlanMismatch(f"parameter {parameter.fqn}: in the plan, not in the model; {_REMEDY}")
    for what, want, have in (
        ("tied to", _names(parameter.tied), _names(source.tied)),
        ("trainable", parameter.trainable, source.trainable),
    ):
        if want != have:
            raise PlanMismatch(
                f"parameter {parameter.fqn}, {what}: plan has {want}, model has {have}; {_REMEDY}"
            )


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _shape(entry: TensorEntry) -> str:
    return f"[{', '.join(map(str, entry.shape))}]"


def _entries(sources: Iterable[Source]) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(fqn=source.fqn, shape=source.spec.shape, dtype=source.spec.dtype)
        for source in sources
    )


def _source_line(source: Source) -> str:
    trainable = " trainable" if source.trainable else ""
    tied = f" tied {_names(source.tied)}" if source.tied else ""
    return f"{source.kind} {source.fqn!r} {source.spec}{trainable}{tied}"


def _specs(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(map(str, specs))


def _arg(arg: Arg, position: dict[str, int]) -> str:
    """An argument as text; the types that compare equal in Python (1, 1.0, True) stay apart."""
    if isinstance(arg, Ref):
        return f"%{position[arg.name]}.{arg.index}"
    if isinstance(arg, Size):
        return f"<{arg}>"
    if isinstance(arg, tuple):
        return f"[{', '.join(_arg(item, position) for item in arg)}]"
    return repr(arg)
