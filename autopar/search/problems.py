"""The sharding problems of one setting, each priced once for all grids that it is the same for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import Ref
from autopar.ir.mesh import batch_count
from autopar.ir.placement import Layout
from autopar.search.block import BlockSpace
from autopar.search.block_cost import BlockCost
from autopar.search.grid import Grid
from autopar.search.home import Home
from autopar.search.pricer import Pricer
from autopar.search.prices import CollectiveTime, Prices
from autopar.search.sharding import Sharding, ShardingProblem


@dataclass
class ShardingProblems:
    """Makes the problems of blocks, and remembers them.

    What a block runs on one rank depends on the sizes of the axes that split samples only where
    it has collectives over them. Grids that differ in these sizes alone share a problem otherwise,
    if their other collectives take the same routes. `shardings` are those found for options.
    """

    pricer: Pricer
    shardings: dict[object, list[Sharding]] = field(default_factory=dict)
    _at: dict[Home, ShardingProblems] = field(default_factory=dict)
    _known: dict[object, ShardingProblem] = field(default_factory=dict)
    _made: dict[object, ShardingProblem] = field(default_factory=dict)
    _crosses: dict[int, bool] = field(default_factory=dict)
    _costs: dict[object, BlockCost] = field(default_factory=dict)
    _fastest: dict[ShardingProblem, Sharding | None] = field(default_factory=dict)
    _passes: dict[ShardingProblem, BlockCost | None] = field(default_factory=dict)

    def at(self, home: Home) -> ShardingProblems:
        """The same problems at the prices of a home."""
        if home == self.pricer.home:
            return self
        if home not in self._at:
            self._at[home] = ShardingProblems(self.pricer.at(home), _crosses=self._crosses)
        return self._at[home]

    def of(
        self, grid: Grid, class_index: int, fixed: Mapping[str, Layout] | None = None
    ) -> ShardingProblem:
        """The problem of a class's block; `fixed` are layouts of parameters shared with others."""
        return self._problem(grid, class_index, fixed or {}, over_samples=True)

    def bounding(self, grid: Grid, class_index: int) -> ShardingProblem:
        """The same, but for free collectives over the axes that split samples, if it has any."""
        return self._problem(grid, class_index, {}, over_samples=False)

    def cost(
        self,
        grid: Grid,
        class_index: int,
        sharding: Sharding,
        fixed: Mapping[str, Layout] | None = None,
    ) -> BlockCost:
        """What a class's block costs in a sharding of the problem `of` it."""
        key = (self.of(grid, class_index, fixed), sharding.choices, sharding.parameters)
        if key not in self._costs:
            block = self.pricer.setting.chain.representative(class_index)
            layouts = dict(sharding.parameters)
            self._costs[key] = self.pricer.cost(block, sharding.choices, layouts, grid)
        return self._costs[key]

    def fastest(self, grid: Grid, class_index: int) -> Sharding | None:
        """The sharding of the `bounding` problem with gradients summed for free."""
        problem = self.bounding(grid, class_index)
        if problem not in self._fastest:
            self._fastest[problem] = problem.solve()
        return self._fastest[problem]

    def fastest_passes(self, grid: Grid, class_index: int) -> BlockCost | None:
        """What the `fastest` sharding costs, without ways to run parts of it again."""
        problem = self.of(grid, class_index)
        if problem not in self._passes:
            solved = self.fastest(grid, class_index)
            block = self.pricer.setting.chain.representative(class_index)
            self._passes[problem] = (
                None
                if solved is None
                else self.pricer.passes(block, solved.choices, dict(solved.parameters), grid)
            )
        return self._passes[problem]

    def _problem(
        self, grid: Grid, class_index: int, fixed: Mapping[str, Layout], *, over_samples: bool
    ) -> ShardingProblem:
        asked = (
            grid.mesh,
            grid.micro_batch,
            class_index,
            tuple(sorted(fixed.items())),
            over_samples,
        )
        if asked not in self._known:
            self._known[asked] = self._make(grid, class_index, fixed, over_samples=over_samples)
        return self._known[asked]

    def _make(
        self, grid: Grid, class_index: int, fixed: Mapping[str, Layout], *, over_samples: bool
    ) -> ShardingProblem:
        pricer = self.pricer
        block = pricer.setting.chain.representative(class_index)
        space = pricer.space(block, pricer.block_mesh(grid, block), fixed)
        samples, links = batch_count(grid.names), pricer.links(grid)
        if id(space) not in self._crosses:
            self._crosses[id(space)] = crosses_samples(space, samples)
        crosses = self._crosses[id(space)]
        paid = crosses and over_samples
        key = (
            id(space),
            grid.micro_batch,
            crosses and not over_samples,
            grid.sizes if paid or pricer.splits_experts(block) else grid.sizes[samples:],
            tuple(links.routes(name) for name in grid.names[0 if paid else samples :]),
        )
        if key not in self._made:
            prices = pricer.prices(grid)
            if crosses and not over_samples:
                prices = replace(prices, collective=_free_over(grid.names[:samples], prices))
            self._made[key] = ShardingProblem(
                space,
                prices,
                kept=pricer.made(block),
                products=pricer.products(block),
                backend=pricer.setting.backend,
                time_limit_s=pricer.setting.time_limit_s,
                store=pricer.setting.store,
            )
        return self._made[key]


def _free_over(axes: tuple[str, ...], prices: Prices) -> CollectiveTime:
    def seconds(op: CollectiveOp, nbytes: float, axis: str) -> float:
        return 0.0 if axis in axes else prices.collective(op, nbytes, axis)

    return seconds


def crosses_samples(space: BlockSpace, samples: int) -> bool:
    """Whether a block may have collectives over the first `samples` axes, which split samples: in
    an op, or because a value is made and read in different placements there."""
    seen: dict[Ref, set[Layout]] = {}

    def see(ref: Ref, layouts: Iterable[Layout]) -> None:
        seen.setdefault(ref, set()).update(layout[:samples] for layout in layouts)

    for ref, layout in (*space.given.items(), *space.required.items()):
        see(ref, [layout])
    for source, layouts in space.parameters:
        see(Ref(source.name), layouts)
    for node, options in zip(space.nodes, space.options, strict=True):
        if any(s.collectives for option in options for s in option.strategies[:samples]):
            return True
        for position, ref in enumerate(node.inputs()):
            see(ref, [option.inputs[position] for option in options])
        for index in range(len(node.outputs)):
            see(Ref(node.name, index), [option.outputs[index] for option in options])
    return any(len(layouts) > 1 for layouts in seen.values())
