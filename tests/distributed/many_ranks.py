"""Many ranks as threads of one process: the same program and runtime, messages by memory.

Everything but the transport is what gloo processes run: process groups are those of torch's own
multi-threaded tests, to which point-to-point messages are added here. Sends are buffered, so an
order of messages that deadlocks on a wire may pass: gloo processes show that, up to eight of them.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from autopar.jobs import Job, build, optimizer_class
from autopar.runtime.load import LoadedProgram, load_program
from autopar.runtime.parallel import ParallelModel
from autopar.runtime.verify import RankReport, compare

BACKEND = "threads"
TIMEOUT_S = 60.0


class _Mail:
    """Messages of one sender to one receiver in a group, the n-th sent for the n-th awaited."""

    def __init__(self) -> None:
        self._sent: dict[int, torch.Tensor] = {}
        self._numbers = count(), count()
        self._arrived = threading.Condition()

    def send(self, x: torch.Tensor) -> None:
        with self._arrived:
            self._sent[next(self._numbers[0])] = x
            self._arrived.notify_all()

    def expect(self) -> Callable[[], torch.Tensor]:
        """A function that waits for the message that is next in turn now."""
        number = next(self._numbers[1])

        def wait() -> torch.Tensor:
            with self._arrived:
                if not self._arrived.wait_for(lambda: number in self._sent, TIMEOUT_S):
                    raise TimeoutError(f"message {number} did not come within {TIMEOUT_S:g} s")
                return self._sent.pop(number)

        return wait


_mail: dict[tuple[str, int, int], _Mail] = {}
"""By group, sender and receiver."""
_opening = threading.Lock()


def _mail_of(group: str, sender: int, receiver: int) -> _Mail:
    with _opening:
        return _mail.setdefault((group, sender, receiver), _Mail())


class _Arrival(dist._Work):
    """A message that `wait` takes from the mail."""

    def __init__(self, message: Callable[[], torch.Tensor], into: torch.Tensor) -> None:
        super().__init__()
        self._message, self._into = message, into

    def wait(self, timeout: Any = None) -> bool:
        self._into.detach().copy_(self._message())
        return True


class _Group(threaded.ProcessLocalGroup):
    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        for x in tensors:
            _mail_of(self.pg_name, self._rank, to).send(x.detach().clone())
        return threaded.ret_work(tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Arrival:
        (into,) = tensors
        return _Arrival(_mail_of(self.pg_name, source, self._rank).expect(), into)


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> _Group:
    group = _Group(rank, size)
    # A group is there for all of its ranks before any of them uses it.
    threaded._store_based_barrier(rank, store, "", size, timeout)
    return group


dist.Backend.register_backend(BACKEND, _make, devices=["cpu"])


@contextmanager
def _threads_as_ranks():
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _mail.clear()
    threaded.ProcessLocalGroup.reset()
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()


def on_ranks(size: int, run: Callable[[], Any]) -> list[Any]:
    """`run()` on each of `size` ranks; the results by rank. Raises what a rank raised first."""
    store, results, errors = HashStore(), [None] * size, []

    def rank_main(rank: int) -> None:
        torch.autograd.set_multithreading_enabled(False)
        try:
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
            results[rank] = run()
        except Exception as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    with _threads_as_ranks():
        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results


def verify_in_threads(size: int, job: Job) -> list[RankReport]:
    """As `jobs.verify_job` on every rank, from one model."""
    model, batch, loss_fn = build(job)
    program: LoadedProgram = load_program(job.folder)
    cls = optimizer_class(job.optimizer)

    def run() -> RankReport:
        mine = copy.deepcopy(model)
        return compare(
            ParallelModel(
                program,
                mine,
                optimizer=(cls, dict(job.optimizer_kwargs)),
                seed=job.seed,
                constants=job.constants,
            ),
            mine,
            batch,
            loss_fn=loss_fn,
            make_optimizer=lambda parameters: cls(parameters, **job.optimizer_kwargs),
            steps=job.steps,
            seed=job.seed,
        )

    return on_ranks(size, run)
