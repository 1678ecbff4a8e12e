"""Search: grids, sharding of block classes and stages, solved and put together as a plan."""

from autopar.search.make import make_plan
from autopar.search.pins import Pins, parse_pins
from autopar.search.planner import Progress
from autopar.search.setting import Setting

__all__ = ["Pins", "Progress", "Setting", "make_plan", "parse_pins"]
