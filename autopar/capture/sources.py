"""The values that exist before the first op: parameters, buffers, constants, batch entries."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator

from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autopar.capture.entries import Entries
from autopar.capture.sizes import SizeReader
from autopar.capture.tracing import PREFIX
from autopar.ir.graph import Source, SourceKind

_STATE = (InputKind.PARAMETER, InputKind.BUFFER)


def state_sources(model: nn.Module, sizes: SizeReader) -> dict[str, Source]:
    """The source of every parameter and buffer by every name it has; tied names share one.

    In the order of `named_parameters`, then `named_buffers`; the first name is the source's own.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    kept = model.state_dict(keep_vars=True)
    return {
        **_by_name(parameters, SourceKind.PARAMETER, "p_", sizes, kept),
        **_by_name(buffers, SourceKind.BUFFER, "b_", sizes, kept),
    }


def _by_name(
    named: Iterable[tuple[str, Tensor]],
    kind: SourceKind,
    prefix: str,
    sizes: SizeReader,
    kept: Container[str],
) -> dict[str, Source]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for fqn, tensor in named:
        names.setdefault(id(tensor), []).append(fqn)
        tensors[id(tensor)] = tensor
    sources: dict[str, Source] = {}
    for key, (first, *others) in names.items():
        tensor = tensors[key]
        source = Source(
            name=prefix + identifier(first),
            kind=kind,
            fqn=first,
            spec=sizes.spec(tensor),
            trainable=kind is SourceKind.PARAMETER and tensor.requires_grad,
            persistent=first in kept,
            tied=tuple(others),
        )
        sources.update(dict.fromkeys((first, *others), source))
    return sources


def input_sources(
    entries: Entries, placeholders: dict[str, fx.Node], sizes: SizeReader
) -> dict[fx.Node, Source]:
    """The source of each batch entry, by its placeholder."""
    return {
        placeholders[key]: Source(
            name=f"input_{key}" if key.isdigit() else identifier(key),
            kind=SourceKind.INPUT,
            fqn=key,
            spec=sizes.spec(placeholders[key].meta["val"]),
        )
        for key in entries.tensors
    }


def constant_sources(
    program: ExportedProgram, placeholders: Iterable[fx.Node], sizes: SizeReader
) -> dict[fx.Node, tuple[Source, Tensor]]:
    """The source and value of each tensor constant, by its placeholder."""
    constants = {}
    for node, target in _placeholders_of(program, placeholders, (InputKind.CONSTANT_TENSOR,)):
        fqn = target.removeprefix(f"{PREFIX}.")
        source = Source(
            name="c_" + identifier(fqn),
            kind=SourceKind.CONSTANT,
            persistent=False,
            fqn=fqn,
            spec=sizes.spec(node.meta["val"]),
        )
        constants[node] = (source, program.constants[target])
    return constants


def state_placeholders(
    program: ExportedProgram, placeholders: Iterable[fx.Node]
) -> dict[fx.Node, str]:
    """The dotted name, in the model, of each parameter or buffer placeholder."""
    found = _placeholders_of(program, placeholders, _STATE)
    return {node: target.removeprefix(f"{PREFIX}.") for node, target in found}


def entry_placeholders(
    program: ExportedProgram, entries: Entries, placeholders: Iterable[fx.Node]
) -> dict[str, fx.Node]:
    """The placeholder of each tensor entry of the batch."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    inputs = (node for node in placeholders if kinds[node.name] is InputKind.USER_INPUT)
    return dict(zip(entries.tensors, inputs, strict=True))


def _placeholders_of(
    program: ExportedProgram, placeholders: Iterable[fx.Node], kinds: tuple[InputKind, ...]
) -> Iterator[tuple[fx.Node, str]]:
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in placeholders:
        spec = specs[node.name]
        if spec.kind in kinds and spec.target is not None:
            yield node, spec.target


def identifier(name: str) -> str:
    """A dotted name as a Python identifier."""
    return re.sub(r"\W", "_", name)
