"""A program's folder as stages that run."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from autopar.errors import InputError, PlanMismatch
from autopar.ir.placement import Layout
from autopar.ir.precision import PRECISIONS, Precision, grad_dtype, stored_dtype
from autopar.plan.plan import ParameterPlan, Plan
from autopar.plan.serialize import read_plan
from autopar.runtime.data import InputSpec
from autopar.runtime.parameters import ParameterSpec
from autopar.runtime.program import OutputSpec, StageProgram

_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedProgram:
    """A program in memory.

    `fixed_entries` are the batch entries that are no tensors and have gone into its code;
    `output_tree` is JSON that the return value is rebuilt from.
    """

    plan: Plan
    stages: tuple[StageProgram, ...]
    inputs: tuple[InputSpec, ...]
    fixed_entries: Mapping[str, object]
    outputs: tuple[OutputSpec, ...]
    output_tree: str
    loss_layout: Layout


def load_program(folder: Path | str) -> LoadedProgram:
    """Import the source files of a program under a package name of their own.

    Raises PlanMismatch if the folder holds no program.
    """
    folder = Path(folder)
    index = folder / "__init__.py"
    if not index.is_file() or not (folder / "plan.json").is_file():
        raise PlanMismatch(
            f"{folder} holds no program (plan.json and __init__.py); write one with "
            "`autopar codegen plan.json -o DIR`"
        )
    plan = read_plan(folder / "plan.json")
    package = _package(index)
    return LoadedProgram(
        plan=plan,
        stages=tuple(_stage(i, module) for i, module in enumerate(package.STAGES)),
        inputs=package.INPUTS,
        fixed_entries=package.FIXED_ENTRIES,
        outputs=package.OUTPUTS,
        output_tree=package.OUTPUT_TREE,
        loss_layout=package.LOSS_LAYOUT,
    )


def _package(index: Path) -> ModuleType:
    """The folder as a package; every load is a new one, so that programs do not mix."""
    name = f"autopar_program_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(
        name, index, submodule_search_locations=[str(index.parent)]
    )
    if spec is None or spec.loader is None:
        raise PlanMismatch(f"{index} cannot be imported")
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    return package


def _stage(index: int, module: ModuleType) -> StageProgram:
    return StageProgram(
        index=index,
        forward=module.forward,
        receives=module.RECEIVES,
        sends=module.SENDS,
        inputs=module.INPUTS,
        setup=module.SETUP_SUMS,
    )


def parameter_specs(plan: Plan) -> dict[int, tuple[ParameterSpec, ...]]:
    """What every stage holds, as the parameter store takes it.

    Raises InputError for a precision that no program runs in.
    """
    precision = runnable(plan.training.precision)
    return {
        stage.index: tuple(_spec(parameter, precision) for parameter in stage.parameters)
        for stage in plan.stages
    }


def runnable(name: str) -> Precision:
    """A precision that programs run in. Raises InputError if it is none."""
    if name not in PRECISIONS or not PRECISIONS[name].runs:
        raise InputError(
            f"precision {name} cannot be run: no program computes in it; choose one of "
            f"{', '.join(name for name, row in PRECISIONS.items() if row.runs)}"
        )
    return PRECISIONS[name]


def _spec(parameter: ParameterPlan, precision: Precision) -> ParameterSpec:
    dtype, trained = parameter.dtype, parameter.trainable and not parameter.buffer
    return ParameterSpec(
        fqn=parameter.fqn,
        shape=parameter.shape,
        dtype=dtype,
        layout=parameter.layout,
        trainable=parameter.trainable,
        is_buffer=parameter.buffer,
        persistent=parameter.persistent,
        tied=parameter.tied,
        zero=parameter.zero,
        stored=parameter.stored,
        stored_dtype=stored_dtype(precision, dtype, trainable=trained),
        grad_dtype=grad_dtype(precision, dtype),
    )
