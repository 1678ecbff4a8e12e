"""Which ops the plans of a setting can need: those the search prices, on their local shapes."""

from __future__ import annotations

from collections.abc import Callable

from autopar.costs.local_op import LocalOp
from autopar.costs.traffic import op_traffic
from autopar.search.grids import grids
from autopar.search.pricer import Pricer
from autopar.search.setting import Setting

Progress = Callable[[str, float | None], None]


def needed_ops(
    setting: Setting, progress: Progress = lambda what, done: None
) -> tuple[LocalOp, ...]:
    """Every distinct op that takes time, of every option of every block on every grid.

    The grids, options and local shapes are the search's own (`grids`, `Spaces`,
    `Pricer.local`). Raises InputError where the pins leave no grid.
    """
    pricer, found = Pricer(setting), dict[str, LocalOp]()
    candidates = {
        (g.mesh if setting.experts else g.block_mesh, g.micro_batch): g for g in grids(setting)
    }
    for done, ((mesh, _), grid) in enumerate(candidates.items()):
        progress("listing the ops of all plans", done / len(candidates))
        prices = pricer.prices(grid)
        for block_class in setting.chain.classes:
            space = pricer.spaces.on(setting.chain.representative(block_class.index), mesh)
            for node, options in zip(space.nodes, space.options, strict=True):
                layouts = {(o.inputs, o.outputs): o for o in options}
                for option in layouts.values():
                    op = pricer.local(node, option, prices)
                    found.setdefault(op.key, op)
    kind = pricer.device.kind
    return tuple(op for op in found.values() if _moves(op, kind))


def _moves(op: LocalOp, kind: str) -> bool:
    traffic = op_traffic(op, kind)
    return bool(traffic.forward_kernels or traffic.backward_kernels)
