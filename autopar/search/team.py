"""Processes that answer the questions of searches, each for as long as its search asks.

They are plain interpreters that talk over pipes, so that nothing is asked of the program that
starts them: no guard around its main module, no fork of its threads. They die with it.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import IO

from autopar.rules import is_extended
from autopar.search.ahead import Answer, Question, Unanswered
from autopar.search.setting import Setting

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from autopar.search.worker import main; main()"
)

_TOGETHER = 6
"""Questions that a worker is given at once, which hides what giving them takes."""

_FEW = 24
"""Expected questions, for each worker, below which more are worth telling."""

_WORTH = 256
"""Grids of a search from which it is worth the second that a worker takes to be ready for it."""

Key = tuple[int, Question]


@dataclass
class _Worker:
    """A process, the settings it has, and whether it has answered and still does."""

    process: subprocess.Popen[bytes]
    settings: set[int] = field(default_factory=set)
    ready: bool = False
    alive: bool = True


class Team:
    """A number of workers for the searches of one planning run, started once a search is long. To
    be closed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._settings: list[Setting] = []
        self._urgent: dict[Key, None] = {}
        self._expected: dict[Key, None] = {}
        self._taken: set[Key] = set()
        self._answers: dict[Key, tuple[bool, Answer]] = {}
        self._owner: dict[object, _Worker] = {}
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
        or would not be the same: workers know no rules but autopar's own."""
        if grids < _WORTH or is_extended():
            return None
        if not self._workers:
            self._start()
        with self._changed:
            self._settings.append(replace(setting, worked_out={}, team=None))
            return TeamHelpers(team=self, number=len(self._settings) - 1)

    def _start(self) -> None:
        for _ in range(self._size):
            try:
                worker = _Worker(_started())
            except OSError:  # no room for more processes: those that there are do
                return
            self._workers.append(worker)
            self._threads.append(threading.Thread(target=self._serve, args=(worker,), daemon=True))
            self._threads[-1].start()

    def expect(self, number: int, questions: Iterable[Question]) -> None:
        """Questions that a search is likely to ask next, in place of those expected before."""
        with self._changed:
            keys = ((number, question) for question in questions)
            self._expected = {key: None for key in keys if not self._known(key)}
            self._changed.notify_all()

    def get(self, number: int, question: Question) -> Answer:
        """The answer to a question. Raises Unanswered, also as long as no worker is ready."""
        key = number, question
        with self._changed:
            self._expected.pop(key, None)
            while key not in self._answers:
                if not any(worker.ready and worker.alive for worker in self._workers):
                    self._urgent.pop(key, None)
                    raise Unanswered
                if key not in self._taken and key not in self._urgent:
                    self._urgent[key] = None
                    self._changed.notify_all()
                self._changed.wait()
            answered, answer = self._answers[key]
        if not answered:
            raise Unanswered
        return answer

    @property
    def idle(self) -> bool:
        """Whether few expected questions are left."""
        return len(self._expected) < _FEW * len(self._workers)

    def _known(self, key: Key) -> bool:
        return key in self._answers or key in self._taken or key in self._urgent

    def _serve(self, worker: _Worker) -> None:
        """Give a worker questions and take its answers, until it or the team is gone."""
        keys: list[Key] = []
        try:
            while keys := self._next(worker):
                _send(worker, self._message(worker, keys))
                while keys:
                    answer = pickle.load(_pipe(worker.process.stdout))
                    with self._changed:
                        key = keys.pop(0)
                        self._taken.discard(key)
                        self._answers[key] = answer
                        worker.ready = True
                        self._changed.notify_all()
        except Exception:  # gone, or a setting that cannot be copied: the search does without
            worker.process.kill()
        finally:
            with self._changed:
                worker.alive = False
                self._taken.difference_update(keys)
                self._changed.notify_all()

    def _message(self, worker: _Worker, keys: Sequence[Key]) -> object:
        """Questions of one setting, with the setting if the worker has it not yet."""
        number = keys[0][0]
        setting = None if number in worker.settings else self._settings[number]
        worker.settings.add(number)
        return number, setting, [question for _, question in keys]

    def _next(self, worker: _Worker) -> list[Key]:
        """The questions that a worker answers next, waited for; none once the team is closed."""
        with self._changed:
            while not self._closed:
                for keys, near in product((self._urgent, self._expected), (True, False)):
                    chosen = self._chosen(worker, keys, near)
                    if chosen:
                        break
                for key in chosen:
                    self._urgent.pop(key, None)
                    self._expected.pop(key, None)
                    self._taken.add(key)
                if chosen:
                    self._owner[_family(chosen[0])] = worker
                    return chosen
                self._changed.wait()
        return []

    def _chosen(self, worker: _Worker, keys: Iterable[Key], near: bool) -> list[Key]:
        """The first few questions of one family that no other worker has; where it has to be
        `near`, one of which this worker knows something."""
        chosen: list[Key] = []
        for key in keys:
            if chosen and _family(key) != _family(chosen[0]):
                continue
            owner = self._owner.get(_family(key))
            if owner is None and near:
                owner = self._owner.get(_kin(key))
            if owner is None or owner is worker or not owner.alive:
                chosen.append(key)
                if len(chosen) == _TOGETHER:
                    break
        return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamHelpers:
    """A team as the helpers of one search."""

    team: Team
    number: int

    def expect(self, questions: Iterable[Question]) -> None:
        """Questions that are likely to be asked next, in place of those expected before."""
        self.team.expect(self.number, questions)

    def get(self, question: Question) -> Answer:
        """The answer, waited for. Raises Unanswered."""
        return self.team.get(self.number, question)

    @property
    def idle(self) -> bool:
        """Whether they have little left to do."""
        return self.team.idle


@contextmanager
def working(workers: int) -> Iterator[Team | None]:
    """So many workers, for as long as they are needed; None for one, which is who asks."""
    if workers < 2:
        yield None
        return
    with closing(Team(workers)) as team:
        yield team


def _family(key: Key) -> object:
    return key[0], key[1].family


def _kin(key: Key) -> object:
    return key[0], key[1].kin


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
