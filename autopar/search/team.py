"""Processes that answer the questions of searches, each for as long as its search asks.

They are plain interpreters that talk over pipes, so that nothing is asked of the program that
starts them: no guard around its main module, no fork of its threads. They die with it. The process
that searches is one of those that answer, and waits for others only while it has nothing to do.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import IO

from autopar.rules import is_extended
from autopar.search.ahead import Answer, Question, Then, Unanswered
from autopar.search.setting import Setting
from autopar.threads import ONE_THREAD, taking_turns

_BOOT = (
    "import json, os, sys; sys.path[:] = json.loads(sys.argv[1]); "
    f"os.environ.setdefault(*{ONE_THREAD}); "
    "from autopar.search.worker import main; main()"
)

_TOGETHER = 6
"""Questions that a worker is given at once, which hides what giving them takes."""

_FEW = 24
"""Expected questions below which those that know most of them answer them alone."""

_SOON = 512
"""Expected questions, for each worker, below which more are worth telling: what is done here before
that is thought of again may take many seconds."""

_WORTH = 256
"""Grids of a search from which it is worth the second that a worker takes to be ready for it."""

_LARGE = 128
"""Devices of a cluster whose searches are long, whatever the model: for these, workers get ready
while it is captured."""

_PATIENCE_S = 2.0
"""Seconds that a worker is waited for, with nothing else to do here, before it is taken to hang."""

Key = tuple[int, Question]
_Place = tuple[int, int]
"""Numbers of a question's family and of its kin."""


@dataclass(eq=False, kw_only=True)
class _Who:
    """Who answers questions, by itself this process: whether it still does, and whether it has been
    waited for in vain since it last did."""

    alive: bool = True
    stalled: bool = False

    @property
    def helps(self) -> bool:
        """Whether an answer is worth waiting for."""
        return self.alive and not self.stalled


@dataclass(eq=False, kw_only=True)
class _Worker(_Who):
    """A process, the settings it has, what it is working at, and how much it has answered."""

    process: subprocess.Popen[bytes]
    settings: set[int] = field(default_factory=set)
    keys: list[Key] = field(default_factory=list)
    answered: int = 0


class Team:
    """A number of workers for the searches of one planning run, started once a search is long. To
    be closed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._settings: list[bytes] = []
        self._urgent: dict[Key, _Place] = {}
        self._expected: dict[Key, _Place] = {}
        self._then: tuple[int, Then] | None = None
        self._taken: set[Key] = set()
        self._answers: dict[Key, tuple[bool, Answer]] = {}
        self._families: dict[object, int] = {}
        self._owner: dict[int, _Who] = {}
        self._here = _Who()
        self._closed = False
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []

    def close(self) -> None:
        """End all workers, whatever they do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.process.kill()
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.process.wait()
            for pipe in (worker.process.stdin, worker.process.stdout):
                with suppress(BrokenPipeError):  # a question that was on its way
                    _pipe(pipe).close()

    def helpers(self, setting: Setting, grids: int) -> TeamHelpers | None:
        """The workers as helpers of a search over so many grids; None where that is not worth it,
        or would not be the same: workers know no rules but autopar's own, and not what cannot be
        copied."""
        if grids < _WORTH or is_extended():
            return None
        try:
            copied = pickle.dumps(replace(setting, team=None), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception:
            return None
        self.start()
        with self._changed:
            self._settings.append(copied)
            return TeamHelpers(team=self, number=len(self._settings) - 1)

    def start(self) -> None:
        """Start the workers, where they are not."""
        for _ in range(self._size if not self._workers else 0):
            try:
                worker = _Worker(process=_started())
            except OSError:  # no room for more processes: those that there are do
                return
            self._workers.append(worker)
            self._threads.append(threading.Thread(target=self._serve, args=(worker,), daemon=True))
            self._threads[-1].start()

    def expect(self, number: int, questions: Iterable[Question], then: Then) -> None:
        """Questions that a search is likely to ask next, and then those that follow from their
        answers, in place of those expected before."""
        with self._changed:
            self._then, self._expected = (number, then), {}
            for question in questions:
                self._await((number, question))
            self._share_out(self._expected.values())
            self._changed.notify_all()

    def _await(self, key: Key | None) -> None:
        """Expect a question, or what follows from its answer where that is known."""
        while key in self._answers:
            key = self._following(key)
        if key is not None and not self._known(key):
            self._expected[key] = self._place(key)

    def _following(self, key: Key) -> Key | None:
        """What the search that expects questions is likely to ask after one that is answered."""
        number, then = self._then or (None, None)
        answered, answer = self._answers[key]
        if then is None or number != key[0] or not answered:
            return None
        question = then(key[1], answer)
        return None if question is None else (key[0], question)

    def get(self, number: int, question: Question, answer: Callable[[Question], Answer]) -> Answer:
        """The answer to a question, worked out by `answer` here unless a worker has it or knows
        more of what it takes: then others that are expected are, until it is there. Raises
        Unanswered where the answer is an error."""
        key = number, question
        self._forget_others(number)
        while (mine := self._next_here(key)) is not None:
            try:
                found = True, answer(mine[1])
            except Exception:  # met again where it belongs
                found = False, None
            with self._changed:
                self._taken.discard(mine)
                self._answers[mine] = found
                self._await(mine)
                self._changed.notify_all()
        answered, result = self._answers[key]
        if not answered:
            raise Unanswered
        return result

    def _forget_others(self, number: int) -> None:
        """Expect no more what another search asked last: what is expected may be answered here."""
        with self._changed:
            if self._then is not None and self._then[0] != number:
                self._then, self._expected = None, {}

    def _next_here(self, key: Key) -> Key | None:
        """What to answer here next while `key` is asked for, None once it is answered."""
        with self._changed:
            self._expected.pop(key, None)
            patient_until = time.monotonic() + _PATIENCE_S
            while key not in self._answers:
                if not any(worker.answered and worker.helps for worker in self._workers):
                    return key
                if key not in self._taken and key not in self._urgent:
                    self._urgent[key] = self._place(key)
                    self._changed.notify_all()
                if chosen := self._chosen_here(key):
                    self._take(self._here, chosen)
                    return chosen[0]
                left_s = patient_until - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                else:
                    self._stall(key)
            self._urgent.pop(key, None)
        return None

    def _chosen_here(self, key: Key) -> list[Key]:
        asked = {} if key in self._taken else {key: self._place(key)}
        found = self._own(self._here, asked, 1) or self._own(self._here, self._expected, 1)
        return found or self._others(1)

    def _stall(self, key: Key) -> None:
        """Wait no more for who has a question, until it answers any."""
        owner = self._owner_of(self._place(key))
        for worker in self._workers:
            if key in worker.keys or owner is worker:
                worker.stalled = True
                self._taken.difference_update(worker.keys)

    def _take(self, who: _Who, keys: Sequence[Key]) -> None:
        """Note who answers questions, of one family."""
        for key in keys:
            self._urgent.pop(key, None)
            self._expected.pop(key, None)
            self._taken.add(key)
        place = self._place(keys[0])
        if self._owner_of(place) is not who:
            self._owner[place[0]] = who

    def _place(self, key: Key) -> _Place:
        number, question = key
        families = self._families
        family = families.setdefault((number, question.family), len(families))
        return family, families.setdefault((number, question.kin), len(families))

    @property
    def idle(self) -> bool:
        """Whether few expected questions are left."""
        return len(self._expected) < _SOON * len(self._workers)

    def _known(self, key: Key) -> bool:
        return key in self._answers or key in self._taken or key in self._urgent

    def _serve(self, worker: _Worker) -> None:
        """Give a worker questions and take its answers, until it or the team is gone."""
        try:
            while self._give(worker):
                _send(worker, self._message(worker, worker.keys))
                while worker.keys:
                    answer = pickle.load(_pipe(worker.process.stdout))
                    with self._changed:
                        key = worker.keys.pop(0)
                        self._taken.discard(key)
                        self._answers.setdefault(key, answer)
                        self._await(key)
                        worker.answered, worker.stalled = worker.answered + 1, False
                        self._changed.notify_all()
        except Exception:  # gone: the search does without
            worker.process.kill()
        finally:
            with self._changed:
                worker.alive = False
                self._taken.difference_update(worker.keys)
                self._changed.notify_all()

    def _message(self, worker: _Worker, keys: Sequence[Key]) -> object:
        """Questions of one setting, with the setting if the worker has it not yet."""
        number = keys[0][0]
        setting = None if number in worker.settings else self._settings[number]
        worker.settings.add(number)
        return number, setting, [question for _, question in keys]

    def _give(self, worker: _Worker) -> bool:
        """Wait for questions that a worker answers next; false once the team is closed."""
        with self._changed:
            while not self._closed:
                chosen = self._own(worker, self._urgent, _TOGETHER)
                chosen = chosen or self._own(worker, self._expected, _TOGETHER)
                if chosen := chosen or self._others(_TOGETHER):
                    self._take(worker, chosen)
                    worker.keys = chosen
                    return True
                self._changed.wait()
        return False

    def _owner_of(self, place: _Place) -> _Who | None:
        """Who knows most of what a question takes, None where nobody does who still answers."""
        family, kin = place
        owner = self._owner.get(family) or self._owner.get(kin)
        return owner if owner is not None and owner.helps else None

    def _share_out(self, places: Iterable[_Place]) -> None:
        """Give each the same number of questions, those of one kin to one."""
        counts = Counter(place[1] for place in places if self._owner_of(place) is None)
        load = {who: 0 for who in (self._here, *self._workers) if who.helps}
        for kin, count in counts.most_common():
            who = min(load, key=lambda each: load[each])
            self._owner[kin] = who
            load[who] += count

    def _own(self, who: _Who, asked: dict[Key, _Place], most: int) -> list[Key]:
        """The first few questions of one family that nobody else has."""
        others = set[_Place]()
        for place in asked.values():
            if place not in others and self._owner_of(place) in (who, None):
                return _of_family(place[0], asked, most)
            others.add(place)
        return []

    def _others(self, most: int) -> list[Key]:
        """The same of what is expected last, whoever has it, where there is much left to do."""
        if len(self._expected) < _FEW:
            return []
        return _of_family(next(reversed(self._expected.values()))[0], self._expected, most)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamHelpers:
    """A team as the helpers of one search."""

    team: Team
    number: int

    def expect(self, questions: Iterable[Question], then: Then) -> None:
        """Questions that are likely to be asked next, and then those that follow from answers."""
        self.team.expect(self.number, questions, then)

    def get(self, question: Question, answer: Callable[[Question], Answer]) -> Answer:
        """The answer, which `answer` may be asked for. Raises Unanswered."""
        return self.team.get(self.number, question, answer)

    @property
    def idle(self) -> bool:
        """Whether they have little left to do."""
        return self.team.idle


@contextmanager
def working(processes: int, devices: int = 0) -> Iterator[Team | None]:
    """Workers, as many as make up so many processes with this one, for as long as they are needed;
    None where it is alone. For large clusters they get ready at once."""
    if processes < 2:
        yield None
        return
    with taking_turns(), closing(Team(processes - 1)) as team:
        if devices >= _LARGE:
            team.start()
        yield team


def _of_family(family: int, asked: dict[Key, _Place], most: int) -> list[Key]:
    """The first few questions of a family."""
    return list(islice((key for key, place in asked.items() if place[0] == family), most))


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _send(worker: _Worker, message: object) -> None:
    pipe = _pipe(worker.process.stdin)
    pipe.write(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
    pipe.flush()
