"""Search: grids, sharding of block classes and stages, solved and put together as a plan."""

from autopar.search.classes import split_classes
from autopar.search.make import check_backend
from autopar.search.objective import check_objective, make_plan
from autopar.search.pins import Pins, parse_pins
from autopar.search.planner import Progress
from autopar.search.remembered import remembered_plan
from autopar.search.setting import Setting
from autopar.search.store import Store
from autopar.search.team import Team, working

__all__ = [
    "Pins",
    "Progress",
    "Setting",
    "Store",
    "Team",
    "check_backend",
    "check_objective",
    "make_plan",
    "parse_pins",
    "remembered_plan",
    "split_classes",
    "working",
]
