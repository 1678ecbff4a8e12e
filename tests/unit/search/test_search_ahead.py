"""Looking ahead takes a small share of a search, however idle those are who help."""

from types import SimpleNamespace

import pytest

from autopar.ir.mesh import stage_mesh
from autopar.search import ahead
from autopar.search.ahead import Ahead, Question
from autopar.search.grid import Grid

TELLING_S = 0.01


class Idle:
    """Helpers who never have enough to do, and note when they were told of more."""

    idle = True

    def __init__(self, clock):
        self.clock, self.told_s = clock, []

    def expect(self, questions, then):
        self.told_s.append(self.clock.now_s)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    clock.monotonic = clock.thread_time = lambda: clock.now_s
    monkeypatch.setattr(ahead, "time", clock)
    return clock


def test_telling_what_is_likely_takes_a_small_share_of_the_time(clock):
    helpers = Idle(clock)
    asking = Ahead(lambda question: None, helpers)

    def likely():
        clock.now_s += TELLING_S
        return (), None

    for _ in range(1000):
        asking.look(likely, anew=False)
        clock.now_s += TELLING_S / 2
    told = len(helpers.told_s)
    assert 0.03 < told * TELLING_S / clock.now_s < 0.06


def test_helpers_with_enough_to_do_are_told_nothing(clock):
    helpers = Idle(clock)
    helpers.idle = False
    Ahead(lambda question: None, helpers).look(lambda: pytest.fail("looked for nothing"), False)
    Ahead(lambda question: None).look(lambda: pytest.fail("looked for nobody"), True)
    assert not helpers.told_s


def asked(micro_batch=1, **mesh):
    grid = Grid(
        pipeline=1, mesh=stage_mesh(**mesh), micro_batch=micro_batch, micro_batches=1, schedule=""
    )
    return Question("computed", grid)


def test_who_knows_what_ops_take_on_a_mesh_is_asked_however_values_pass_between_blocks():
    question = asked(data=2, tensor=2)
    assert question.family == asked(data=2, tensor=2, sequence=True).family
    assert question.family == asked(data=4, tensor=2).family
    assert question.family != asked(data=2, tensor=4).family
    assert question.family != asked(micro_batch=2, data=2, tensor=2).family
    assert question.kin == asked(micro_batch=2, data=2, tensor=2).kin
