"""The sharding problems of one setting, each priced once for all grids that it is the same for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.mesh import batch_count
from autopar.ir.placement import Layout
from autopar.search.block import BlockSpace
from autopar.search.block_cost import BlockCost, block_cost, block_passes
from autopar.search.grid import Grid
from autopar.search.home import Home
from autopar.search.pricer import Pricer
from autopar.search.sharding import Sharding, ShardingProblem
from autopar.search.shared_sharding import SharedSharding, varying_links
from autopar.search.wiring import Link, Wiring, wired


@dataclass
class ShardingProblems:
    """Makes the problems of blocks, and remembers them.

    What a block runs on one rank depends on the sizes of the axes that split samples only where
    it has collectives or experts over them. Grids that differ in these sizes alone share a problem
    otherwise, if their other collectives take the same routes, and what does not depend on them in
    any case. `shardings` are those found for options.
    """

    pricer: Pricer
    shardings: dict[object, list[Sharding]] = field(default_factory=dict)
    _at: dict[Home, ShardingProblems] = field(default_factory=dict)
    _known: dict[object, ShardingProblem] = field(default_factory=dict)
    _made: dict[object, ShardingProblem] = field(default_factory=dict)
    _wirings: dict[int, Wiring | None] = field(default_factory=dict)
    _open_links: dict[int, tuple[Link, ...]] = field(default_factory=dict)
    _shared: dict[object, SharedSharding] = field(default_factory=dict)
    _costs: dict[object, BlockCost] = field(default_factory=dict)
    _fastest: dict[ShardingProblem, Sharding | None] = field(default_factory=dict)
    _passes: dict[ShardingProblem, BlockCost | None] = field(default_factory=dict)

    def at(self, home: Home) -> ShardingProblems:
        """The same problems at the prices of a home."""
        if home == self.pricer.home:
            return self
        if home not in self._at:
            self._at[home] = ShardingProblems(self.pricer.at(home), _wirings=self._wirings)
        return self._at[home]

    def of(
        self, grid: Grid, class_index: int, fixed: Mapping[str, Layout] | None = None
    ) -> ShardingProblem:
        """The problem of a class's block; `fixed` are layouts of parameters shared with others."""
        return self._problem(grid, class_index, fixed or {})

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
            self._costs[key] = block_cost(self.pricer, block, sharding.choices, layouts, grid)
        return self._costs[key]

    def fastest(self, grid: Grid, class_index: int) -> Sharding | None:
        """The sharding of the problem `of` a class with gradients summed for free."""
        problem = self.of(grid, class_index)
        if problem not in self._fastest:
            self._fastest[problem] = problem.fastest()
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
                else block_passes(self.pricer, block, solved.choices, dict(solved.parameters), grid)
            )
        return self._passes[problem]

    def _problem(
        self, grid: Grid, class_index: int, fixed: Mapping[str, Layout]
    ) -> ShardingProblem:
        asked = (grid.mesh, grid.micro_batch, class_index, tuple(sorted(fixed.items())))
        if asked not in self._known:
            self._known[asked] = self._make(grid, class_index, fixed)
        return self._known[asked]

    def _make(self, grid: Grid, class_index: int, fixed: Mapping[str, Layout]) -> ShardingProblem:
        pricer = self.pricer
        block = pricer.setting.chain.representative(class_index)
        space = pricer.spaces.of(block, grid, fixed)
        samples, links = batch_count(grid.names), pricer.links(grid)
        alike = (
            id(space),
            grid.micro_batch,
            grid.sizes[samples:],
            tuple(links.routes(name) for name in grid.names[samples:]),
        )
        wiring = self._wired(space)
        if wiring is not None and alike not in self._shared:
            products, prices = pricer.backwards.products(block), pricer.prices(grid)
            if id(space) not in self._open_links:
                self._open_links[id(space)] = varying_links(wiring, prices)
            links_open = self._open_links[id(space)]
            self._shared[alike] = SharedSharding(wiring, prices, products, links_open)
        shared = self._shared.get(alike)
        own: tuple[object, ...] = ()
        if shared is not None and shared.varies:
            routes = tuple(links.routes(name) for name in grid.names[:samples])
            own = (grid.sizes[:samples], routes)
        key = (alike, own)
        if key not in self._made:
            self._made[key] = ShardingProblem(
                wiring,
                pricer.prices(grid),
                space=space,
                shared=shared,
                kept=pricer.backwards.made(block),
                backend=pricer.setting.backend,
                time_limit_s=pricer.setting.time_limit_s,
                store=pricer.setting.store,
            )
        return self._made[key]

    def _wired(self, space: BlockSpace) -> Wiring | None:
        if id(space) not in self._wirings:
            self._wirings[id(space)] = wired(space)
        return self._wirings[id(space)]
