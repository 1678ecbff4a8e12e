"""Why no plan fits, in numbers."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costs.memory import GIB
from autopar.search.assemble import stage_terms
from autopar.search.block import HEAVY_OPS
from autopar.search.grids import widest_tensor
from autopar.search.pricer import Pricer
from autopar.search.setting import Setting
from autopar.search.stages import Staged

_ATTENTION = "aten.scaled_dot_product_attention"


def gib(nbytes: float) -> str:
    """Bytes as GiB with one decimal, as MiB below that."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB / 10 else f"{nbytes / 2**20:.1f} MiB"


def explain_infeasible(pricer: Pricer, unfit: Sequence[Staged]) -> str:
    """The closest miss: which stage needs how much, for what, and what would help."""
    setting = pricer.setting
    cluster = setting.cluster
    head = (
        f"no plan for {setting.name} fits {cluster.spec or f'{cluster.num_devices} devices'} "
        f"(global batch {setting.global_batch}, {setting.training.precision.name}, "
        f"{setting.training.optimizer})"
    )
    if not unfit:
        return f"{head}: the pins leave no sharding; {_pins(setting)}"
    closest = min(unfit, key=lambda staged: sum(short for _, short in staged.solution.conflict))
    grid = closest.grid
    lines = [
        f"{head}. The closest of {len(unfit)} grids is pipeline {grid.pipeline} x data {grid.data} "
        f"x tensor {grid.tensor}, micro-batch {grid.micro_batch}:"
    ]
    worst = max(
        range(grid.pipeline),
        key=lambda k: closest.solution.stage_bytes[k] - closest.problem.capacity_bytes[k],
    )
    needs, has = closest.solution.stage_bytes[worst], closest.problem.capacity_bytes[worst]
    terms = _least_terms(pricer, closest, worst)
    shown = ", ".join(f"{name} {gib(value)}" for name, value in terms if value)
    lines.append(
        f"  stage {worst} needs {gib(needs)} of {gib(has)}, {gib(needs - has)} too much: {shown}"
    )
    states = sum(
        value for name, value in terms if name in ("weights", "gradients", "master", "optimizer")
    )
    more = -(-int(needs * cluster.num_devices) // int(has))
    lines.append(
        f"  what would help: about {more} such devices or more, devices of {gib(needs)}, "
        + ("a smaller model or optimizer state" if states > needs / 2 else "a shorter sequence")
        + (f"; {_pins(setting)}" if setting.pins.items() else "")
    )
    return "\n".join(lines)


def _pins(setting: Setting) -> str:
    items = setting.pins.items()
    if not items:
        return "nothing is pinned"
    return "pinned: " + ", ".join(f"{key}={value}" for key, value in items) + " (try without)"


def _least_terms(pricer: Pricer, staged: Staged, stage: int) -> list[tuple[str, float]]:
    """Memory terms of a stage with every block at its smallest option."""
    problem = staged.problem
    cuts = staged.solution.cuts
    held = problem.in_flight[stage]
    options = []
    for block in problem.stages(cuts)[stage]:
        offered = staged.options[problem.blocks[block]]
        options.append(
            min(
                offered,
                key=lambda o: (
                    o.cost.state.terms.total_bytes + held * o.saved_bytes + o.transient_bytes
                ),
            )
        )
    blocks = [pricer.setting.chain.blocks[b] for b in problem.stages(cuts)[stage]]
    return list(stage_terms(pricer, staged.grid, stage, blocks, options, held))


def explain_unsplittable(pricer: Pricer, degree: int) -> str | None:
    """Why a pinned tensor degree cannot be honoured, or None if it can.

    A tensor degree is a promise that the matrix products with weights and the attention of every
    repeated block are split; replicating them over the axis would honour it in name only.
    """
    setting = pricer.setting
    for block_class in setting.chain.classes:
        block = setting.chain.representative(block_class.index)
        weights = {ref.name for ref in block.parameters}
        for node in setting.block_nodes(block):
            weighted = node.op in HEAVY_OPS and any(r.name in weights for r in node.inputs())
            if not weighted and node.op != _ATTENTION:
                continue
            offered = pricer.strategies(node, 1, degree)
            if any(pricer.splits_work(node, strategy) for strategy in offered):
                continue
            shapes = ", ".join(str(setting.specs[ref]) for ref in node.inputs()[:3])
            heads = setting.specs[node.inputs()[0]].shape[1] if node.op == _ATTENTION else None
            why = (
                f"its {heads} heads cannot be split evenly over {degree} ranks"
                if heads is not None
                else f"no dim of it can be split over {degree} ranks"
            )
            fits = [
                str(d)
                for d in range(2, widest_tensor(setting) + 1)
                if heads is not None
                and heads.const % d == 0
                and setting.cluster.num_devices % d == 0
            ]
            remedy = f"; degrees that fit the heads and the cluster: {', '.join(fits) or 'none'}"
            return (
                f"tensor={degree} is pinned, but {node.target} in "
                f"{node.module_path or block.module_path} ({shapes}) is in the way: {why}"
                + (remedy if heads is not None else "")
            )
    return None
