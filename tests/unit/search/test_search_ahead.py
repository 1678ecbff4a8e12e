"""Looking ahead takes a small share of a search, however idle those are who help."""

from types import SimpleNamespace

import pytest

from autopar.search import ahead
from autopar.search.ahead import Ahead

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
