"""What a process of a `WorkerPool` runs: wait for a function, call it, report."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionName:
    """Where a worker finds a function: by module name, or in the file it was defined in.

    A file is what a test module or a user's script has; its module cannot be imported by name in
    another process.
    """

    module: str
    qualname: str
    path: str

    @staticmethod
    def of(fn: Callable[..., Any]) -> FunctionName:
        """The name of a module-level function. Raises ValueError for a lambda or inner function."""
        if "<" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} is not a module-level function; workers need one")
        path = os.path.abspath(fn.__code__.co_filename)
        return FunctionName(module=fn.__module__, qualname=fn.__qualname__, path=path)

    def load(self) -> Callable[..., Any]:
        """The function, in this process."""
        module = sys.modules.get(self.module) if self.module != "__main__" else None
        if module is None or getattr(module, "__file__", None) != self.path:
            name = "__autopar_main__" if self.module == "__main__" else self.module
            spec = importlib.util.spec_from_file_location(name, self.path)
            if spec is None or spec.loader is None:
                raise ImportError(f"cannot load {self.qualname} from {self.path}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        found: Any = module
        for part in self.qualname.split("."):
            found = getattr(found, part)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The outcome of one call on one rank. `at_s` is the clock all processes of a machine share."""

    rank: int
    at_s: float
    value: Any = None
    error: str = ""


def serve(rank: int, size: int, port: int, timeout_s: float, pipe: Connection) -> None:
    """Join the process group, then answer calls until the pipe closes or a call fails.

    After a failed call the group may be in any state, so the process ends: that closes its
    connections, and the other ranks stop waiting for it.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from autopar.runtime.allocator import keep_freed_memory
    from autopar.runtime.groups import end_all_groups

    torch.set_num_threads(1)
    keep_freed_memory()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            break
        end_all_groups()  # all ranks are done with those of the last call: each reported
        try:
            value = name.load()(*args)
            pipe.send(Report(rank=rank, at_s=time.monotonic(), value=value))
        except Exception:
            pipe.send(Report(rank=rank, at_s=time.monotonic(), error=traceback.format_exc()))
            os._exit(1)
        value = None
    dist.destroy_process_group()
    os._exit(0)  # quicker than taking the interpreter down
