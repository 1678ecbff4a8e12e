"""The program as a folder: a file per block variant and stage, the plan, and an index.

| file             | holds                                                                  |
|------------------|------------------------------------------------------------------------|
| `plan.json`      | the plan                                                               |
| `block_<n>.py`   | one way to run all blocks of a class: `forward(w, ctx, random, ...)`    |
| `stage_<k>.py`   | one pipeline stage: `forward(w, ctx, received, inputs, setup)`          |
| `__init__.py`    | the stages in order, what the model takes and returns                  |
"""

from __future__ import annotations

import ast
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from autopar.codegen.draws import refuse_other_draws
from autopar.codegen.model import ModelView
from autopar.codegen.stage import StagePrinter, variant_source
from autopar.codegen.state import check_state
from autopar.errors import InputError
from autopar.ir.graph import Ref, SourceKind
from autopar.ir.placement import Layout
from autopar.plan.pipeline import mesh_text
from autopar.plan.serialize import to_json


def program_files(view: ModelView, fixed_entries: Mapping[str, object]) -> dict[str, str]:
    """File name to text of a program.

    `fixed_entries` are the batch entries that are no tensors. Raises InputError for one that
    cannot be written as a literal, and for random numbers that no program could draw alike.
    """
    refuse_other_draws(view.graph)
    check_state(view)
    files = {"plan.json": to_json(view.plan), "__init__.py": index_source(view, fixed_entries)}
    for variant in view.plan.variants:
        files[f"{variant.name}.py"] = variant_source(view, variant)
    for stage in view.plan.stages:
        files[f"stage_{stage.index}.py"] = StagePrinter(view, stage).source()
    return files


def index_source(view: ModelView, fixed_entries: Mapping[str, object]) -> str:
    """The package's `__init__.py`."""
    count = len(view.plan.stages)
    stages = ", ".join(f"stage_{index}" for index in range(count))
    inputs = "".join(
        f'    InputSpec(key="{s.fqn}", shape={_shape(view, Ref(s.name))}, '
        f'dtype="{s.spec.dtype}"),\n'
        for s in view.graph.sources
        if s.kind is SourceKind.INPUT
    )
    outputs = "".join(f"    {_output(view, ref)},\n" for ref in view.graph.outputs)
    return (
        f'"""Program for {view.plan.model.name}: {count} stages, '
        f"mesh {mesh_text(view.plan)}, schedule {view.plan.schedule}."
        '"""\n\n'
        "from autopar.runtime.program import InputSpec, OutputSpec\n"
        "from autopar.runtime.program import Partial, Replicate, Shard, Size\n"
        f"\nfrom . import {stages}\n\n"
        f"STAGES = ({stages},)\n"
        f"INPUTS = (\n{inputs})\n"
        f"FIXED_ENTRIES = {_literal(fixed_entries)}\n"
        f"OUTPUTS = (\n{outputs})\n"
        f"OUTPUT_TREE = {view.graph.output_tree!r}\n"
        f"LOSS_LAYOUT = {_layout(_loss_layout(view))}\n"
    )


def _literal(fixed_entries: Mapping[str, object]) -> str:
    for key, value in fixed_entries.items():
        try:
            ast.literal_eval(repr(value))
        except (ValueError, SyntaxError):
            raise InputError(
                f"batch entry {key!r} has type {type(value).__name__}; besides tensors, expected "
                "numbers, texts, and tuples, lists and dicts of them: set it on the model instead"
            ) from None
    return repr(dict(fixed_entries))


def _shape(view: ModelView, ref: Ref) -> str:
    sizes = ", ".join(f"Size({s.const}, {s.per_sample})" for s in view.specs[ref].shape)
    return f"({sizes},)" if len(view.specs[ref].shape) == 1 else f"({sizes})"


def _layout(layout: Layout) -> str:
    return f"({', '.join(repr(p) for p in layout)},)"


def _stage_of(view: ModelView, ref: Ref) -> StagePrinter:
    for stage in view.plan.stages:
        printer = StagePrinter(view, stage)
        if any(ref in block.outputs for block in printer.blocks):
            return printer
    raise InputError(
        f"output {ref} of the model is made by no block; it does not depend on any "
        "parameter: return it from your own code instead"
    )


def _output(view: ModelView, ref: Ref) -> str:
    printer = _stage_of(view, ref)
    layout = _layout(printer.layout_of(ref))
    dtype = view.specs[ref].dtype
    return (
        f'OutputSpec(name="{ref}", stage={printer.stage.index}, shape={_shape(view, ref)}, '
        f'dtype="{dtype}", layout={layout})'
    )


def _loss_layout(view: ModelView) -> Layout:
    if view.graph.loss is None:
        raise InputError("the model has no loss: give one with loss_fn")
    return _stage_of(view, view.graph.loss).layout_of(view.graph.loss)


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Write a program's files so that the folder is there whole or not at all.

    Raises InputError if the folder exists and holds anything that is not a program.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; choose a folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / "plan.json").exists():
        raise InputError(f"{folder} is not empty and holds no program; choose another folder")
    if not folder.parent.is_dir():
        raise InputError(f"{folder.parent} is no folder; make it first")
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        written, earlier = Path(scratch) / "written", Path(scratch) / "earlier"
        written.mkdir()
        for name, text in files.items():
            (written / name).write_text(text, encoding="utf-8")
        if folder.exists():
            os.replace(folder, earlier)
        os.replace(written, folder)
