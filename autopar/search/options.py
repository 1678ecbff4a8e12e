"""Ways to run a block class on a grid: a few that trade time for memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import Ref
from autopar.ir.placement import Layout
from autopar.plan.plan import NodeChoice
from autopar.search.pricer import BlockCost, Grid, Pricer
from autopar.search.sharding import Sharding, ShardingProblem, pareto_shardings
from solvers.partition import BlockOption


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassOption:
    """One way to run the blocks of a class: a sharding, with or without running forward twice."""

    choices: tuple[NodeChoice, ...]
    layouts: tuple[tuple[str, Layout], ...]
    recompute: bool
    cost: BlockCost
    bound_s: float

    @property
    def backward_s(self) -> float:
        """Backward seconds, with the forward that is run again."""
        return self.cost.backward_s + (self.cost.forward_s if self.recompute else 0.0)

    @property
    def saved_bytes(self) -> int:
        """Bytes held per micro-batch in flight."""
        return self.cost.input_bytes if self.recompute else self.cost.saved_bytes

    @property
    def transient_bytes(self) -> int:
        """Bytes held while the block runs."""
        again = self.cost.saved_bytes if self.recompute else 0
        return self.cost.transient_bytes + again

    def as_option(self) -> BlockOption:
        """The option as the partition problem sees it."""
        return BlockOption(
            time_s=self.cost.forward_s + self.backward_s,
            static_bytes=float(self.cost.state.terms.total_bytes),
            saved_bytes=float(self.saved_bytes),
            sync_s=self.cost.sync_s + self.cost.optimizer_s,
            transient_bytes=float(self.transient_bytes),
        )


def class_options(
    pricer: Pricer,
    grid: Grid,
    class_index: int,
    fixed: Mapping[str, Layout],
    recompute: str | None,
) -> tuple[ClassOption, ...]:
    """The options of a class that no other option of it beats in time and memory both.

    Empty if the pins leave no sharding. `fixed` has layouts of parameters shared with other
    classes; `recompute` is the pin (`none`, `all`) or None.
    """
    block = pricer.setting.chain.representative(class_index)
    found: list[ClassOption] = []
    for sharding in _shardings(pricer, grid, class_index, fixed):
        cost = pricer.cost(block, sharding.choices, dict(sharding.parameters), grid)
        option = ClassOption(
            choices=sharding.choices,
            layouts=sharding.parameters,
            recompute=False,
            cost=cost,
            bound_s=sharding.bound,
        )
        if recompute != "all":
            found.append(option)
        if recompute != "none":
            found.append(replace(option, recompute=True))
    return tuple(_undominated(found))


def _shardings(
    pricer: Pricer, grid: Grid, class_index: int, fixed: Mapping[str, Layout]
) -> list[Sharding]:
    setting = pricer.setting
    block = setting.chain.representative(class_index)
    problem = ShardingProblem(
        pricer.space(block, grid.block_mesh, fixed),
        pricer.prices(grid),
        kept=_kept(pricer, grid, class_index),
        backend=setting.backend,
        time_limit_s=setting.time_limit_s,
    )
    return pareto_shardings(problem)


def _kept(pricer: Pricer, grid: Grid, class_index: int) -> dict[Ref, float]:
    """Bytes held per byte of each value: state of parameters, activations of all in flight."""
    setting = pricer.setting
    block = setting.chain.representative(class_index)
    in_flight = min(grid.pipeline, grid.micro_batches)
    kept = {
        value.ref: float(in_flight) for value in pricer.saved(block).values if value.kind == "made"
    }
    for ref in block.parameters:
        kept[ref] = pricer.state_factor(setting.sources[ref.name])
    return kept


def _undominated(options: Iterable[ClassOption]) -> Iterator[ClassOption]:
    kept: list[ClassOption] = []
    for option in options:
        new = option.as_option()
        others = [other.as_option() for other in kept]
        if not any(_beats(other, new) for other in others):
            kept.append(option)
    yield from kept


def _beats(a: BlockOption, b: BlockOption) -> bool:
    return (
        a.time_s <= b.time_s
        and a.sync_s <= b.sync_s
        and a.static_bytes <= b.static_bytes
        and a.saved_bytes <= b.saved_bytes
        and a.transient_bytes <= b.transient_bytes
    )
