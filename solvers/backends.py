"""MILP engines behind one contract: `solve(model, ...) -> BackendResult`.

PuLP's own status is not enough: it says "Optimal" on a time-limit stop and, for CBC, may leave the
value of an infeasible point as objective. Each backend here tells proven from found from nothing,
and returns a lower bound that holds. An engine is imported or looked up only when it is asked for.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pulp

from solvers.solution import Status, label

_MIN_TIME_LIMIT_S = 0.01
_FEASIBILITY_TOLERANCE = 1e-9
_POINT_TOLERANCE = 1e-6
_MIN_GAP_ABS = 1e-9


class BackendUnavailable(RuntimeError):
    """The engine is unknown or is not installed here; the message says which ones are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendResult:
    """Outcome of one minimisation; where `status.has_solution`, the values are in the variables.

    `bound` is a proven lower bound: -inf where nothing is proven, inf when infeasible.
    """

    status: Status
    objective: float
    bound: float


class Backend(Protocol):
    """One engine. Models are minimised; integer variables are relaxed where `relax`."""

    name: str

    def available(self) -> bool:
        """Whether the engine can run here."""
        ...

    def solve(
        self,
        model: pulp.LpProblem,
        *,
        time_limit_s: float,
        gap: float,
        gap_abs: float = _MIN_GAP_ABS,
        relax: bool = False,
    ) -> BackendResult:
        """Minimise until the gap is at most `gap` (relative) or `gap_abs`, or time is up."""
        ...


class Highs:
    """HiGHS through PuLP's solver interface and highspy."""

    name = "highs"

    def available(self) -> bool:
        """Whether highspy is installed."""
        return bool(pulp.HiGHS().available())

    def solve(
        self,
        model: pulp.LpProblem,
        *,
        time_limit_s: float,
        gap: float,
        gap_abs: float = _MIN_GAP_ABS,
        relax: bool = False,
    ) -> BackendResult:
        """See `Backend.solve`. The bound is HiGHS' own dual bound."""
        _check_minimises(model)
        engine = _array_highs()(mip=not relax, msg=False, gapRel=gap, gapAbs=gap_abs)
        engine.timeLimit = max(time_limit_s, _MIN_TIME_LIMIT_S)
        model.solve(engine)
        if model.status == pulp.LpStatusInfeasible:
            return BackendResult(status=Status.INFEASIBLE, objective=math.inf, bound=math.inf)
        solver = model.solverModel
        proven = model.sol_status == pulp.LpSolutionOptimal
        if relax or not any(v.cat == pulp.LpInteger for v in model.variables()):
            bound = solver.getObjectiveValue() if proven else -math.inf
        else:
            bound = solver.getInfo().mip_dual_bound
        if model.sol_status == pulp.LpSolutionNoSolutionFound:
            return _nothing_found(bound)
        return _found(model, bound, proven=proven, gap=gap)


class Cbc:
    """CBC: the `cbc` on the path, else the executable that PuLP brings."""

    name = "cbc"

    def available(self) -> bool:
        """Whether a CBC executable is found."""
        return self._executable() is not None

    def solve(
        self,
        model: pulp.LpProblem,
        *,
        time_limit_s: float,
        gap: float,
        gap_abs: float = _MIN_GAP_ABS,
        relax: bool = False,
    ) -> BackendResult:
        """See `Backend.solve`. The bound is read from CBC's log.

        Its search tree drops nodes within the allowed gap of the best, so "optimal" proves the
        objective less that gap only.
        """
        _check_minimises(model)
        with tempfile.TemporaryDirectory(prefix="cbc-") as folder:
            log = Path(folder) / "log"
            engine = pulp.COIN_CMD(
                path=self._executable(),
                msg=False,
                mip=not relax,
                timeLimit=max(time_limit_s, _MIN_TIME_LIMIT_S),
                gapRel=gap,
                gapAbs=gap_abs,
                logPath=str(log),
                options=[
                    f"{name}Tolerance {_FEASIBILITY_TOLERANCE}" for name in ("primal", "integer")
                ],
            )
            engine.tmpDir = folder
            started = time.perf_counter()
            model.solve(engine)
            out_of_time = time.perf_counter() - started >= engine.timeLimit
            text = log.read_text(errors="replace")
        if model.status == pulp.LpStatusInfeasible:
            # out of time while preprocessing, CBC 2.10 claims that the model is infeasible
            if out_of_time and "Problem is infeasible" not in text:
                return _nothing_found(-math.inf)
            return BackendResult(status=Status.INFEASIBLE, objective=math.inf, bound=math.inf)
        return self._interpret(model, text, allowed=0.0 if relax else gap, gap_abs=gap_abs)

    @staticmethod
    def _executable() -> str | None:
        bundled = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
        return shutil.which("cbc") or (shutil.which(bundled) if bundled else None)

    @staticmethod
    def _interpret(
        model: pulp.LpProblem, log: str, *, allowed: float, gap_abs: float
    ) -> BackendResult:
        proven = model.sol_status == pulp.LpSolutionOptimal
        constant = model.objective.constant  # CBC does not see it
        bound = constant + _logged_bound(log)
        if proven:
            value = pulp.value(model.objective) - constant
            slack = max(allowed * abs(value), gap_abs) if allowed else 0.0
            bound = max(bound, constant + value - slack)
        if model.sol_status == pulp.LpSolutionNoSolutionFound:
            return _nothing_found(bound)
        return _found(model, bound, proven=proven, gap=allowed)


BACKENDS: dict[str, type[Backend]] = {Highs.name: Highs, Cbc.name: Cbc}


def get_backend(name: str) -> Backend:
    """The backend called `name`; raises `BackendUnavailable` if unknown or not installed."""
    if name not in BACKENDS:
        raise BackendUnavailable(f"no solver backend {name!r}; known: {', '.join(BACKENDS)}")
    backend = BACKENDS[name]()
    if not backend.available():
        others = [other for other, kind in BACKENDS.items() if kind().available()]
        raise BackendUnavailable(
            f"solver backend {name!r} is not installed (HiGHS: pip install highspy; CBC: pip "
            f"install 'pulp[cbc]'); installed here: {', '.join(others) or 'none'}"
        )
    return backend


def _logged_bound(log: str) -> float:
    """The best lower bound CBC's log prints, less half a unit of its last printed digit."""
    bounds = [-math.inf]
    for pattern in (r"^Lower bound:\s+(\S+)", r"^Continuous objective value is (\S+)"):
        for printed in re.findall(pattern, log, re.MULTILINE):
            exponent = Decimal(printed).as_tuple().exponent
            bounds.append(float(printed) - 0.5 * 10.0 ** int(exponent))
    return max(bounds)


def _check_minimises(model: pulp.LpProblem) -> None:
    if model.sense != pulp.LpMinimize:
        raise ValueError(f"model {model.name!r} maximises; backends minimise: negate its objective")


def _nothing_found(bound: float) -> BackendResult:
    return BackendResult(status=Status.TIME_LIMIT, objective=math.inf, bound=bound)


def _found(model: pulp.LpProblem, bound: float, *, proven: bool, gap: float) -> BackendResult:
    """A result with a solution, unless an interrupted engine left a point that violates rows."""
    if not proven and not _holds(model):
        return _nothing_found(bound)
    objective = float(pulp.value(model.objective))
    bound = min(bound, objective)
    status = Status.OPTIMAL if proven else label(objective, bound, gap)
    return BackendResult(status=status, objective=objective, bound=bound)


def _holds(model: pulp.LpProblem) -> bool:
    """Whether the variables' values satisfy bounds, rows and integrality."""
    for variable in model.variables():
        value = variable.varValue
        if value is None or not variable.valid(_POINT_TOLERANCE):
            return False
    return all(row.valid(_POINT_TOLERANCE) for row in model.constraints())


@contextlib.contextmanager
def _silence_stdout() -> Iterator[None]:
    """HiGHS prints a banner, from C, when its first instance is made, before any option is set."""
    saved, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null)


def _array_highs() -> type[Any]:
    """PuLP's HiGHS class, handing the model over as arrays instead of row by row (10x faster)."""
    import highspy

    class ArrayHighs(pulp.HiGHS):  # type: ignore[misc]
        def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802
            with _silence_stdout():
                super().createAndConfigureSolver(lp)
            for option in ("primal_feasibility_tolerance", "mip_feasibility_tolerance"):
                lp.solverModel.setOptionValue(option, _FEASIBILITY_TOLERANCE)

        def buildSolverModel(self, lp: pulp.LpProblem) -> None:  # noqa: N802
            lp.solverModel.passModel(_highs_arrays(highspy, lp, integers=self.mip))

        def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:  # noqa: N802
            return _read_highs(highspy, lp)

    return ArrayHighs


def _highs_arrays(highspy: Any, lp: pulp.LpProblem, *, integers: bool) -> Any:
    """The model as a `HighsLp` with a row-wise matrix."""
    variables, rows = lp.variables(), lp.constraints()
    for i, variable in enumerate(variables):
        variable.index = i
    infinity = highspy.kHighsInf
    arrays = highspy.HighsLp()
    arrays.num_col_, arrays.num_row_ = len(variables), len(rows)
    arrays.offset_ = lp.objective.constant
    arrays.col_cost_ = [lp.objective.get(v, 0.0) for v in variables]
    arrays.col_lower_ = [-infinity if v.lowBound is None else v.lowBound for v in variables]
    arrays.col_upper_ = [infinity if v.upBound is None else v.upBound for v in variables]
    lower, upper = [row.getLb() for row in rows], [row.getUb() for row in rows]
    arrays.row_lower_ = [-infinity if value is None else value for value in lower]
    arrays.row_upper_ = [infinity if value is None else value for value in upper]
    matrix = arrays.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    matrix.index_ = [variable.index for row in rows for variable in row.keys()]  # noqa: SIM118
    matrix.value_ = [value for row in rows for value in row.values()]
    if integers:
        kinds = highspy.HighsVarType
        arrays.integrality_ = [
            kinds.kInteger if v.cat == pulp.LpInteger else kinds.kContinuous for v in variables
        ]
    return arrays


def _read_highs(highspy: Any, lp: pulp.LpProblem) -> tuple[int, int]:
    """PuLP's (status, solution status), with the values put into the variables."""
    solver, statuses = lp.solverModel, highspy.HighsModelStatus
    status = solver.getModelStatus()
    if status in (statuses.kInfeasible, statuses.kUnboundedOrInfeasible):
        return pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible
    feasible = highspy.SolutionStatus.kSolutionStatusFeasible
    if solver.getInfo().primal_solution_status != int(feasible):
        return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
    for variable, value in zip(lp.variables(), solver.getSolution().col_value, strict=True):
        variable.varValue = value
    if status in (statuses.kOptimal, statuses.kModelEmpty):
        return pulp.LpStatusOptimal, pulp.LpSolutionOptimal
    return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible
