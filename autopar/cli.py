"""The command line: what may be asked. What is then done stands in `commands`.

Nothing heavy is imported before a command runs, so that `autopar --help` answers at once.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module, metadata
from typing import NoReturn

from autopar.arguments import (
    Adder,
    changes,
    checked_model,
    cluster,
    clusters,
    database,
    given_plan,
    keep,
    limits,
    model,
    objective,
    op,
    optional_model,
    output_file,
    output_folder,
    plan,
    planning,
    profile,
    profiles,
    searching,
    size,
    steps,
    top,
    trace_file,
    two_plans,
)
from autopar.collecting import seldom_collecting
from autopar.errors import AutoparError, InputError
from autopar.threads import ONE_THREAD

_INTERRUPTED, _BROKEN_PIPE = 130, 141
"""128 + the signal, as shells report it."""
_FAULT = 70
"""EX_SOFTWARE of sysexits.h. A fault is neither a yes nor a no."""

_EPILOG = (
    "Exit status: 0 done; 1 the answer is no (does not fit, does not match); 2 bad usage or input; "
    "70 a fault of autopar."
)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are errors like all others."""

    def __init__(self, **options: object) -> None:
        formatter = partial(argparse.HelpFormatter, width=100, max_help_position=30)
        super().__init__(allow_abbrev=False, formatter_class=formatter, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see '{self.prog} --help'")


@seldom_collecting()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status. Writes results to stdout, all else to stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    as_json = "--json" in arguments
    try:
        options = build_parser().parse_args(arguments)
        os.environ.setdefault(*ONE_THREAD)
        # a handler is named, not imported, until it is needed
        module = HANDLERS.get(options.command, "autopar.commands")
        handler = getattr(import_module(module), options.command.replace("-", "_"))
        status: int = handler(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as interrupt:
        message = str(interrupt) or "interrupted"
        return _fail(message, _INTERRUPTED, "KeyboardInterrupt", as_json=as_json)
    except BrokenPipeError:
        # the reader of stdout has gone; nothing is left to say, nor for the interpreter to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except AutoparError as error:
        if debug:
            traceback.print_exc()
        return _fail(str(error), error.exit_status, type(error).__name__, as_json=as_json)
    except Exception as error:
        hint = "this is a fault of autopar"
        if debug:
            traceback.print_exc()
        else:
            hint += "; run the command again with --debug for the traceback"
        kind = type(error).__name__
        return _fail(f"{kind}: {error} ({hint})", _FAULT, kind, as_json=as_json)


def run() -> NoReturn:
    """The command line as a program. It ends without taking the interpreter down, which after a
    large plan takes seconds for nothing but to free what it took."""
    status = main()
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _fail(message: str, status: int, kind: str, *, as_json: bool) -> int:
    """One message on stderr; with --json also the one object on stdout."""
    print(f"autopar: {message}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": kind, "message": message}))
    return status


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command. `options.command` names the function in `commands`."""
    parser = _Parser(
        prog="autopar",
        description="Plan how to train a PyTorch model on a cluster, and make the program that "
        "does it.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"autopar {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (summary, arguments) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=_EPILOG
        )
        for add in arguments:
            add(command)
        command.add_argument(
            "--json", action="store_true", help="print one JSON object and nothing else on stdout"
        )
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(command=name)
    return parser


def _version() -> str:
    try:
        return metadata.version("autopar")
    except metadata.PackageNotFoundError:
        return "(not installed)"


COMMANDS: dict[str, tuple[str, tuple[Adder, ...]]] = {
    "plan": (
        "find the best way to train a model on a cluster",
        (model, cluster, planning, searching, objective, keep, top, profile, output_file),
    ),
    "sweep": (
        "plan a model on clusters of several sizes, and say how it scales",
        (model, clusters, planning, searching, objective),
    ),
    "fit": (
        "find the fewest devices that train a model, or the most of it that a cluster trains",
        (size, model, cluster, planning, searching),
    ),
    "what-if": (
        "make a plan again with a change, and say what the change is worth",
        (plan, changes, searching, output_file),
    ),
    "profile": (
        "measure the ops and collectives that plans of a model can need, on this machine",
        (model, cluster, planning, searching, limits, database),
    ),
    "profiles": (
        "show what profiles hold; merge them, export them to other machines",
        (profiles,),
    ),
    "show": ("print a plan as a table", (plan,)),
    "trace": (
        "write the simulated step of a plan as a timeline for Perfetto",
        (plan, trace_file),
    ),
    "explain": ("say why a plan is as it is, and what else was close", (plan, op)),
    "diff": ("say what changed between two plans, and what it costs", (two_plans,)),
    "check": ("check that a plan is sound, and fits a model", (plan, checked_model)),
    "codegen": ("write the program of a plan", (plan, optional_model, output_folder)),
    "verify": (
        "run a step in parallel and on one device, and compare all results",
        (model, cluster, given_plan, planning, searching),
    ),
    "train": (
        "train a model in parallel",
        (model, cluster, given_plan, planning, searching, steps),
    ),
    "zoo": ("list the models that come with autopar", ()),
    "hardware": ("list the devices and links that autopar knows", ()),
}
"""Each command: what it does, and its arguments. Its handler has its name in `commands`, or in the
module that `HANDLERS` has for it."""

HANDLERS = dict.fromkeys(("sweep", "fit", "what-if"), "autopar.questions.commands")


if __name__ == "__main__":
    sys.exit(main())
