"""What a worker process of a `team` does: answers questions until nobody is left to ask any."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
from typing import BinaryIO

from autopar.collecting import seldom_collecting
from autopar.search.ahead import Question
from autopar.search.planner import Planner
from autopar.search.setting import Setting
from autopar.threads import taking_turns

_Messages = queue.SimpleQueue[tuple[int, bytes | None, list[Question]]]
"""The number of a setting, a copy of it where it is new, and questions of its search."""


@seldom_collecting()
@taking_turns()
def main() -> None:
    """Serve the process at the other end of standard input and output, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which that process is given too, and handles
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a solver prints is no reply
    messages: _Messages = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(sys.stdin.buffer, messages), daemon=True)
    reader.start()
    serve(messages, replies)


def _read(pipe: BinaryIO, messages: _Messages) -> None:
    """Queue what comes in; end the process, whatever it does, when the other end is closed."""
    try:
        while True:
            messages.put(pickle.load(pipe))
    except BaseException:
        os._exit(0)


def serve(messages: _Messages, replies: BinaryIO) -> None:
    """Answer questions in turn: (True, answer), or (False, None) where working it out fails, so
    that who asked does it and meets the error where it belongs."""
    planners: dict[int, Planner] = {}
    while True:
        number, copied, questions = messages.get()
        if copied is not None:
            setting: Setting = pickle.loads(copied)
            planners[number] = Planner(setting=setting)
        for question in questions:
            try:
                reply = True, planners[number].answer(question)
            except Exception:
                reply = False, None
            pickle.dump(reply, replies, protocol=pickle.HIGHEST_PROTOCOL)
            replies.flush()
