"""`capture`: a model and an example batch to an `OpGraph`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from autopar.capture.convert import convert
from autopar.capture.dispatch import canonical_dispatch
from autopar.capture.entries import Batch, Entries, read_entries
from autopar.capture.flatten import flatten
from autopar.capture.names import named
from autopar.capture.normalize import normalize
from autopar.capture.sizes import FixedBatch, SizeReader, size_reader
from autopar.capture.sources import (
    constant_sources,
    entry_placeholders,
    input_sources,
    state_placeholders,
    state_sources,
)
from autopar.capture.tracing import LossFn, Trace, TraceFailed, trace
from autopar.errors import CaptureError
from autopar.ir.graph import OpGraph, OpNode, Ref, Source, SourceKind, TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A captured model.

    `constants` holds the value of each source of kind constant by its fqn, `fixed_entries` the
    entries of the batch that are no tensors, which the graph has for good.
    """

    graph: OpGraph
    constants: dict[str, Tensor]
    fixed_entries: dict[str, Any]


def capture(
    model: nn.Module,
    batch: Batch | list[Any],
    *,
    loss_fn: LossFn | None = None,
    every_call: bool = False,
) -> Captured:
    """The graph of one training (or, for a model in eval mode, evaluation) step's forward.

    `batch` is a dict of keyword arguments or a tuple of positional arguments; dim 0 of its tensors
    counts samples. The loss is `loss_fn(output, batch)`, else the output when it is a scalar, else
    its `loss` entry. Nothing is computed and no weight is read, so a model on the meta device will
    do. The graph holds for any number of samples; where the model itself depends on it the graph
    is for the example's number and a note says so.

    Repeated modules are traced once where calls of them are provably equal; with `every_call` each
    is traced, to the same graph.

    Raises CaptureError naming op, module and line of what cannot be captured faithfully.
    """
    entries = read_entries(batch)
    run_trace = partial(trace, model, entries, loss_fn, every_call=every_call)
    reason = ""
    for samples in _symbolic_examples(entries.samples):
        try:
            traced = run_trace(samples=samples, symbolic=True)
            return _captured(model, entries, traced, reason="", symbolic=True)
        except FixedBatch as fixed:
            reason = str(fixed)
            if not fixed.specialised:
                break
        except TraceFailed as failed:
            reason = reason or str(failed)
            break
    traced = run_trace(samples=entries.samples, symbolic=False)
    return _captured(model, entries, traced, reason=reason, symbolic=False)


def _symbolic_examples(samples: int) -> tuple[int, int]:
    """Numbers of samples to trace with: 0 and 1 would be taken for constants, and so would one
    that happens to equal another size of the model, so there is a second, unlikely one."""
    return max(samples, 2), 2 * samples + 37


def _captured(
    model: nn.Module, entries: Entries, traced: Trace, *, reason: str, symbolic: bool
) -> Captured:
    program = traced.program
    flat, outputs = flatten(program.graph_module)
    inputs = entry_placeholders(program, entries, flat.placeholders)
    values = {key: node.meta["val"] for key, node in inputs.items()}
    if symbolic:
        sizes = size_reader(entries, values, program.range_constraints)
    else:
        sizes = SizeReader(frozenset())
    state = state_sources(model, sizes)
    constants = constant_sources(program, flat.placeholders, sizes)
    sources = {
        **{n: state[fqn] for n, fqn in state_placeholders(program, flat.placeholders).items()},
        **{node: source for node, (source, _) in constants.items()},
        **input_sources(entries, inputs, sizes),
    }
    nodes, refs = convert(flat, outputs, sources, sizes, traced.templates)
    state_and_inputs = [*sources.values(), *state.values()]
    taken = [source.name for source in state_and_inputs]
    nodes, refs = named(_live(nodes, refs), refs, taken)
    nodes = normalize(nodes, _specs(state_and_inputs, nodes))
    nodes = _live(canonical_dispatch(nodes, _specs(state_and_inputs, nodes), refs), refs)
    notes: tuple[str, ...] = ()
    if not symbolic:
        notes = (f"batch size is fixed to {entries.samples}: {reason}",)
    read = {ref.name for node in nodes for ref in node.inputs()} | {ref.name for ref in refs}
    constants = {n: (s, value) for n, (s, value) in constants.items() if s.name in read}
    graph = OpGraph(
        sources=tuple(
            dict.fromkeys(
                s
                for s in (*state.values(), *sources.values())
                if s.kind is not SourceKind.CONSTANT or s.name in read
            )
        ),
        nodes=tuple(nodes),
        loss=refs[0],
        outputs=tuple(refs[1:]),
        output_tree=traced.output_tree,
        example_batch=entries.samples,
        notes=(*entries.notes(), *traced.notes, *notes),
    )
    _check_loss_is_trainable(graph)
    return Captured(
        graph=graph,
        constants={source.fqn: value for source, value in constants.values()},
        fixed_entries={k: v for k, v in entries.constants.items() if v is not None},
    )


def _specs(sources: Iterable[Source], nodes: Iterable[OpNode]) -> dict[Ref, TensorSpec]:
    specs = {Ref(source.name): source.spec for source in sources}
    for node in nodes:
        specs.update({Ref(node.name, i): spec for i, spec in enumerate(node.outputs)})
    return specs


def _live(nodes: list[OpNode], outputs: Iterable[Ref]) -> list[OpNode]:
    """The nodes that an output depends on."""
    needed = {ref.name for ref in outputs}
    kept = []
    for node in reversed(nodes):
        if node.name in needed:
            kept.append(node)
            needed |= {ref.name for ref in node.inputs()}
    return kept[::-1]


def _check_loss_is_trainable(graph: OpGraph) -> None:
    trainable = any(source.trainable for source in graph.sources)
    if trainable and graph.loss not in graph.differentiable():
        raise CaptureError(
            "the loss does not depend on any trainable parameter: it is computed under no_grad, "
            "from detached tensors, or from the batch alone"
        )
