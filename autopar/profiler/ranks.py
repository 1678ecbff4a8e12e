"""The ranks that torchrun started, as one that leads and others that follow."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist

from autopar.errors import InputError
from autopar.runtime.launch import init_from_env


class Torchrun:
    """Rank 0 calls `run`; the other ranks call `follow`, and do what it runs until it is closed.

    Raises InputError where there are not as many ranks as the cluster has devices.
    """

    def __init__(self, num_devices: int) -> None:
        self.device = init_from_env()
        found = dist.get_world_size()
        if found != num_devices:
            raise InputError(
                f"torchrun started {found} ranks, the cluster has {num_devices} devices; start as "
                "many, or leave collectives out with --no-links"
            )

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.leads and error is None:
            dist.broadcast_object_list([None], 0)
        dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return dist.get_rank() == 0

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(*args)` on every rank; the result here."""
        dist.broadcast_object_list([(fn, args)], 0)
        return [fn(*args)]

    def follow(self) -> None:
        """Do what the leader runs."""
        while True:
            task: list[Any] = [None]
            dist.broadcast_object_list(task, 0)
            if task[0] is None:
                return
            fn, args = task[0]
            fn(*args)
