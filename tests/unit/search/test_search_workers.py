"""Workers change how long a search takes, and nothing else."""

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from autopar.compiler import PlanOptions, load_source, source_setting
from autopar.plan.serialize import to_json
from autopar.rules import register_elementwise
from autopar.rules.registry import RULES
from autopar.search import make_plan, team
from autopar.search.bounds import Sharpness
from autopar.search.grids import grids
from autopar.search.planner import ANSWERS, Planner, Question
from autopar.search.seen import Entry, Seen, likely_next
from autopar.search.team import Team, working

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0

ASKED = {
    "dense": ("llama_tiny", "1x4:a100-40gb", {}),
    "tied": ("gpt_tiny", "1x4:a100-40gb", {"top": 2}),
    "experts": ("mixtral_tiny", "1x4:a100-40gb", {}),
    "pinned": ("llama_tiny", "1x4:a100-40gb", {"pins": (("tensor", "2"),)}),
    "two kinds": ("gpt_tiny", "1x1:a100-40gb+1x2:h100-sxm", {}),
}


def setting_of(name):
    model, cluster, options = ASKED[name]
    request = PlanOptions(precision="bf16", global_batch=4, **options)
    return source_setting(load_source(model), cluster, request)


@pytest.fixture(scope="module")
def dense():
    return setting_of("dense")


@pytest.fixture
def every_search(monkeypatch):
    """Workers help with the shortest search."""
    monkeypatch.setattr(team, "_WORTH", 1)


def await_that(holds):
    ends = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def when_ready(helping, what, done):
    """Progress of a search that lets its workers get ready before it asks."""
    if what == "bounding grids" and not done and not helping._settings[1:]:
        await_that(lambda: all(w.answered or not w.alive for w in helping._workers))


def planned(setting, processes, progress=when_ready):
    """A plan as text, and how many questions other processes than this one answered."""
    with working(processes) as helping:
        watched = (lambda what, done: None) if helping is None else partial(progress, helping)
        setting = replace(setting, worked_out={}, team=helping)
        text = to_json(make_plan(setting, watched))
        workers = [] if helping is None else helping._workers
        return text, sum(worker.answered for worker in workers)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("name", ASKED)
def test_plans_are_the_same_whatever_the_number_of_processes(every_search, name):
    setting = setting_of(name)
    alone, _ = planned(setting, 1)
    for processes in (2, 3) if name == "dense" else (2,):
        text, answered = planned(setting, processes)
        assert text == alone
        assert answered > 10


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_answers_do_not_depend_on_what_was_asked_before(name):
    setting = setting_of(name)
    levels = range(Sharpness.SCHEDULED)
    offered = grids(setting)[::4]
    asked = [Question("sharper", grid, level) for grid in offered for level in levels]
    asked += [Question(what, grid) for grid in offered for what in ("computed", "sharded")]
    asked += [Question("problems", grid) for grid in offered[::3]]
    assert {question.what for question in asked} == set(ANSWERS)
    first = Planner(setting=setting)
    answers = {question: first.answer(question) for question in asked}
    random.Random(0).shuffle(asked)
    other = Planner(setting=replace(setting, worked_out={}))
    for question in asked:
        assert other.answer(question) == answers[question]


@pytest.mark.parametrize("when", ["bounding grids", "searching grids"])
def test_a_search_whose_workers_die_goes_on_alone(every_search, dense, when):
    alone, _ = planned(dense, 1)
    killed = []

    def kill(helping, what, done):
        when_ready(helping, what, done)
        if what == when and not killed:
            killed.extend(worker.process for worker in helping._workers)
            for process in killed:
                process.kill()

    assert planned(dense, 3, kill)[0] == alone
    assert len(killed) == 2


def test_one_worker_that_dies_leaves_its_share_to_others(every_search, dense):
    alone, _ = planned(dense, 1)
    answered = []

    def kill_one(helping, what, done):
        when_ready(helping, what, done)
        first, second = helping._workers
        if what == "searching grids" and not answered:
            first.process.kill()
            first.process.wait()
            answered.append(second.answered)
        assert second.alive

    text, in_all = planned(dense, 3, kill_one)
    assert text == alone
    assert in_all > answered[0]


@pytest.mark.parametrize("when", ["bounding grids", "searching grids"])
def test_a_worker_that_hangs_is_not_waited_for(every_search, dense, monkeypatch, when):
    monkeypatch.setattr(team, "_PATIENCE_S", 0.05)
    alone, _ = planned(dense, 1)
    stopped = []

    def stop(helping, what, done):
        when_ready(helping, what, done)
        if what == when and not stopped:
            (worker,) = helping._workers
            worker.process.send_signal(signal.SIGSTOP)
            stopped.append(worker)

    assert planned(dense, 2, stop)[0] == alone
    assert stopped[0].stalled or when != "bounding grids"


def test_workers_get_ready_at_once_where_a_search_is_long():
    with working(3, devices=team._LARGE - 1) as helping:
        assert not helping._workers
    with working(3, devices=team._LARGE) as helping:
        assert len(helping._workers) == 2


def test_a_copy_of_a_setting_knows_what_was_worked_out(dense):
    grids(dense)
    copy = pickle.loads(pickle.dumps(dense))
    assert list(copy.worked_out) == [id(copy.graph)]
    assert copy.worked_out[id(copy.graph)]["batch"] == dense.batch


def test_a_search_without_any_process_for_workers_goes_on_alone(every_search, dense, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(ROOT / "no-such-interpreter"))
    assert planned(dense, 2) == planned(dense, 1)


def test_a_setting_that_cannot_be_copied_is_searched_alone(every_search, dense):
    local = replace(dense, name=type("Text", (str,), {})("name"))
    with working(2) as helping:
        found = Planner(setting=replace(local, team=helping)).search()
        assert not helping._workers
    assert found.best.grid == Planner(setting=dense).search().best.grid


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_no_worker_outlives_a_search_that_fails(every_search, dense, error):
    workers = []

    def fail(helping, what, done):
        when_ready(helping, what, done)
        if what == "searching grids":
            workers.extend(worker.process for worker in helping._workers)
            raise error

    with pytest.raises(error):
        planned(dense, 3, fail)
    assert len(workers) == 2
    assert all(process.returncode is not None for process in workers)


SCRIPT = """
import sys, time
sys.path.insert(0, {root!r})
from autopar.compiler import PlanOptions, load_source, plan_source
from autopar.search import team
team._WORTH = 1
started = team.Team.start

def start(self):
    started(self)
    print(*[worker.process.pid for worker in self._workers], flush=True)

def watch(what, done):
    if what == "searching grids":
        time.sleep({sleep_s})

team.Team.start = start
options = PlanOptions(global_batch=16, workers=3)
plan = plan_source(load_source("mlp"), "2x2:a100-40gb", options, watch).plan
print(plan.pipeline)
"""


def script(sleep_s):
    """A program that plans with workers, without a guard around its main module, and does not have
    autopar on its path but by what it does itself."""
    text = SCRIPT.format(root=str(ROOT), sleep_s=sleep_s)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env=environment, cwd="/"
    )


def test_a_script_needs_no_guard():
    lines = script(0).communicate(timeout=PATIENCE_S)[0].splitlines()
    assert len(lines) == 2
    await_that(lambda: not any(map(is_running, map(int, lines[0].split()))))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_the_process_that_started_it(how):
    with script(PATIENCE_S) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        process.send_signal(how)
        process.wait()
        await_that(lambda: not any(map(is_running, pids)))


def test_workers_go_on_with_what_follows_from_their_answers(every_search, dense):
    grid = next(grid for grid in grids(dense) if not grid.pipe.splits_backward)
    bound, *_ = Planner(setting=dense).answer(Question("sharper", grid))
    entry = Entry(0.0, (), 0.0, Sharpness.COMPUTE, grid, 0.0)
    levels = [Sharpness.COMPUTE, Sharpness.SHARDED, Sharpness.STARTED, Sharpness.IN_FLIGHT]
    for ceiling_s, last in ((10 * bound.step_s, 4), (bound.step_s, 1)):
        with working(2) as helping:
            helpers = helping.helpers(dense, 1)
            helping._here.alive = False  # all is the worker's
            helpers.expect(*likely_next([entry], Seen(ceiling_s=ceiling_s)))
            (worker,) = helping._workers
            await_that(lambda worker=worker: worker.answered and not worker.keys)
            await_that(lambda helping=helping: not helping._expected and not helping._taken)
            assert [question.more for _, question in helping._answers] == levels[:last]


def test_who_has_a_question_is_told_of_it_however_much_there_is_to_do_here(
    every_search, dense, monkeypatch
):
    monkeypatch.setattr(team, "_FEW", float("inf"))  # what is to do here stays here
    with working(2) as helping:
        helpers, (worker,) = helping.helpers(dense, 1), helping._workers
        asked = [Question("computed", grid) for grid in grids(dense)]
        helpers.expect(asked, lambda question, answer: None)
        await_that(lambda: worker.answered)
        theirs = [q for q in asked if helping._owner_of(helping._place((0, q))) is worker]
        here = []

        def answer(question):
            here.append(question)
            time.sleep(0.2)

        urgent = Question("sharper", theirs[0].grid)
        helpers.get(urgent, answer)
        assert urgent not in here
        assert len(here) < (len(asked) - len(theirs)) / 2


def test_short_searches_are_not_shared(dense, monkeypatch):
    monkeypatch.setattr(team, "_WORTH", len(grids(dense)) + 1)
    assert planned(dense, 2)[1] == 0


def test_rules_from_outside_are_not_known_to_workers(every_search, dense):
    with closing(Team(1)) as helping:
        assert helping.helpers(dense, 1) is not None
        register_elementwise("mylib::square")
        try:
            assert helping.helpers(dense, 1) is None
        finally:
            del RULES["mylib.square"]
