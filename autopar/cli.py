"""The command line: what may be asked. What is then done stands in `commands`.

Nothing heavy is imported before a command runs, so that `autopar --help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module, metadata
from typing import NoReturn

from autopar.errors import AutoparError, InputError

_INTERRUPTED, _BROKEN_PIPE = 130, 141
"""128 + the signal, as shells report it."""
_FAULT = 70
"""EX_SOFTWARE of sysexits.h. A fault is neither a yes nor a no."""

_MODEL_HELP = (
    "a zoo model (see 'autopar zoo'), or package.module:function or path/file.py:function that "
    "returns (model, batch) or (model, batch, loss_fn)"
)
_CLUSTER_HELP = (
    "local:4 (four CPU processes), auto, 8x8:h100-sxm (8 nodes of 8), groups joined by +, or a "
    "YAML or JSON file"
)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status. Writes results to stdout, all else to stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    as_json = "--json" in arguments
    try:
        options = build_parser().parse_args(arguments)
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
        kind = type(error).__name__
        return _fail(str(error), error.exit_status, kind, as_json=as_json)
    except Exception as error:
        hint = "this is a fault of autopar"
        if debug:
            traceback.print_exc()
        else:
            hint += "; run the command again with --debug for the traceback"
        kind = type(error).__name__
        return _fail(f"{kind}: {error} ({hint})", _FAULT, kind, as_json=as_json)


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


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_whole(part.strip()) for part in text.split(","))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"expected a share between 0 and 1, found {text!r}")
    return value


def _price(text: str) -> tuple[str, float]:
    kind, equals, value = (part.strip() for part in text.partition("="))
    if not (kind and equals and value):
        raise argparse.ArgumentTypeError(f"expected KIND=PRICE, found {text!r}")
    return kind, _positive(value)


def _pin(text: str) -> tuple[str, str]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, found {text!r}")
    return key, value


Adder = Callable[[argparse.ArgumentParser], object]


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)


def _optional_model(parser: argparse.ArgumentParser) -> None:
    text = f"{_MODEL_HELP}; default: the model the plan names"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)


def _checked_model(parser: argparse.ArgumentParser) -> None:
    text = f"compare the plan with this model: {_MODEL_HELP}"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan file that 'autopar plan -o' wrote")


def _two_plans(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="a plan file")


def _cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", metavar="SPEC", required=True, help=_CLUSTER_HELP)
    text = "price local processes with the table of devices, not as measured on this machine"
    parser.add_argument("--no-measure", action="store_true", help=text)


def _clusters(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = f"the sizes, joined by commas; or one, with --nodes. {_CLUSTER_HELP}"
    add("--cluster", metavar="SPEC[,SPEC]", required=True, help=text)
    add(
        "--nodes",
        metavar="N[,N]",
        type=_counts,
        help="sizes of the cluster in nodes like its own, such as 1,2,4,8",
    )
    text = "let the global batch grow with the devices from the first size on"
    add("--weak", action="store_true", help=text)
    text = "price local processes with the table of devices, not as measured on this machine"
    add("--no-measure", action="store_true", help=text)


def _size(parser: argparse.ArgumentParser) -> None:
    text = (
        "devices: the fewest, in nodes like the cluster's; micro-batch, sequence (tokens), layers: "
        "the most that fit the cluster, the last two for zoo models"
    )
    sizes = ("devices", "micro-batch", "sequence", "layers")
    parser.add_argument("size", choices=sizes, help=text)


def _changes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "changes",
        metavar="KEY=VALUE",
        nargs="+",
        type=_pin,
        help="memory (GiB a device), nodes, cluster, links (x2: twice as fast), a link by its name "
        "(x2, or GB/s), global-batch, seq-len, precision, optimizer, objective, pin.KEY (a value, "
        "or free)",
    )
    add("--model", metavar="MODEL", help=f"{_MODEL_HELP}; default: the model the plan names")
    add("--time-limit", metavar="S", type=_positive, help="seconds of search (default: 120)")


def _keep(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--keep", metavar="PLAN", help="fix the decisions of this plan, but those of --free")
    add(
        "--free",
        metavar="KIND[,KIND]",
        type=lambda text: tuple(part.strip() for part in text.split(",")),
        default=(),
        help="decisions of --keep to search again: pipeline, data, context, tensor, weights, "
        "micro-batch, recompute, zero",
    )


def _given_plan(parser: argparse.ArgumentParser) -> None:
    text = "run this plan instead of making one; it must fit the model and the cluster"
    parser.add_argument("--plan", metavar="FILE", help=text)


def _steps(parser: argparse.ArgumentParser) -> None:
    text = "training steps to run (default: %(default)s)"
    parser.add_argument("--steps", metavar="N", type=_whole, default=10, help=text)


def _output_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan to this file")


def _trace_file(parser: argparse.ArgumentParser) -> None:
    text = "file to write; open it at ui.perfetto.dev or chrome://tracing"
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help=text)


def _output_folder(parser: argparse.ArgumentParser) -> None:
    text = "folder to write the program to; made if it is not there"
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help=text)


def _database(parser: argparse.ArgumentParser) -> None:
    text = (
        "database to measure into; what it holds is not measured again (default: "
        "profile.sqlite in autopar's cache folder)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help=text)


def _limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits").add_argument
    add("--budget", metavar="S", type=_positive, help="seconds to measure for; the rest is left")
    add(
        "--op-limit",
        metavar="S",
        type=_positive,
        default=10.0,
        help="leave out ops that are expected to take longer (default: %(default)s)",
    )
    add(
        "--size-limit",
        metavar="GIB",
        type=_positive,
        help="leave out ops whose tensors and gradients need more (default: half of the memory)",
    )
    add("--no-links", action="store_true", help="measure ops alone, no collectives")


def _profiles(parser: argparse.ArgumentParser) -> None:
    text = "a database that 'autopar profile' wrote, or JSON that this command wrote"
    parser.add_argument("profiles", metavar="FILE", nargs="+", help=text)
    text = "write all together to this file: JSON where it ends in .json, else a database"
    parser.add_argument("-o", "--output", metavar="FILE", help=text)


def _profile(parser: argparse.ArgumentParser) -> None:
    text = "take measured times from this file of 'autopar profile' or 'autopar profiles'"
    parser.add_argument("--profile", metavar="FILE", help=text)


def _objective(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--objective",
        choices=("time", "memory", "cost"),
        help="what the plan has the least of: time of a step (default), memory of the fullest "
        "device, or cost of a sample on any part of the cluster",
    )
    add(
        "--price",
        metavar="KIND=PRICE",
        type=_price,
        action="append",
        default=[],
        help="what a device of a kind costs an hour; may be repeated",
    )


def _top(parser: argparse.ArgumentParser) -> None:
    text = (
        "name this many other techniques that came next, each solved (default: up to 5 of those "
        "that the search met)"
    )
    parser.add_argument("--top", metavar="K", type=_whole, help=text)


def _op(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", metavar="NAME", help="explain this op or parameter")


def _planning(parser: argparse.ArgumentParser) -> None:
    """Options of planning; those not given are left to the defaults of `PlanOptions`."""
    add = parser.add_argument_group("planning").add_argument
    add("--global-batch", metavar="N", type=_whole, help="samples per training step")
    add("--seq-len", metavar="N", type=_whole, help="tokens per sample, for models that have them")
    add(
        "--precision",
        choices=("fp32", "bf16", "fp16", "fp64", "fp8"),
        help="dtype of compute (default: fp32); fp8 is planned for, not run",
    )
    add("--optimizer", metavar="NAME", help="optimizer whose state is planned for (default: adamw)")
    add(
        "--pin",
        metavar="KEY=VALUE",
        type=_pin,
        action="append",
        default=[],
        help="fix a decision; may be repeated. KEY: pipeline, data, shard, context, tensor, "
        "expert, chunks, micro_batches, micro_batch, schedule, sequence (on, off), attention "
        "(gather, ring, heads), recompute (none, selective, all), zero (0 to 3), weight:NAME (a "
        "placement such as S(0)), boundary (a module that starts a stage), stageK.tensor, "
        "stageK.data, stageK.devices (of rank K of the pipeline alone, from 0), meshes (own: "
        "stages have other meshes each; alike)",
    )
    add("--memory-limit", metavar="GIB", type=_positive, help="memory of each device to plan for")
    add(
        "--all-devices",
        action="store_const",
        const=True,
        help="use every device of the cluster, its groups in the order given",
    )
    add(
        "--time-limit",
        metavar="S",
        type=_positive,
        help="seconds of search (default: 120)",
    )
    add(
        "--gap",
        metavar="G",
        type=_share,
        help="end the search once the plan is proven to be within this share of the best (0.02)",
    )
    add(
        "--workers",
        metavar="N",
        type=_whole,
        help="processes that share a long search, which does not change the plan (default: one for "
        "each core at hand)",
    )
    text = "folder that keeps what searches find (default: plans in autopar's cache folder)"
    add("--cache-dir", metavar="DIR", help=text)
    add("--no-cache", action="store_true", help="search everything anew, and keep nothing")
    add("--backend", metavar="NAME", help="ILP solver: highs (default) or cbc")


COMMANDS: dict[str, tuple[str, tuple[Adder, ...]]] = {
    "plan": (
        "find the best way to train a model on a cluster",
        (_model, _cluster, _planning, _objective, _keep, _top, _profile, _output_file),
    ),
    "sweep": (
        "plan a model on clusters of several sizes, and say how it scales",
        (_model, _clusters, _planning, _objective),
    ),
    "fit": (
        "find the fewest devices that train a model, or the most of it that a cluster trains",
        (_size, _model, _cluster, _planning),
    ),
    "what-if": (
        "make a plan again with a change, and say what the change is worth",
        (_plan, _changes, _output_file),
    ),
    "profile": (
        "measure the ops and collectives that plans of a model can need, on this machine",
        (_model, _cluster, _planning, _limits, _database),
    ),
    "profiles": (
        "show what profiles hold; merge them, export them to other machines",
        (_profiles,),
    ),
    "show": ("print a plan as a table", (_plan,)),
    "trace": (
        "write the simulated step of a plan as a timeline for Perfetto",
        (_plan, _trace_file),
    ),
    "explain": ("say why a plan is as it is, and what else was close", (_plan, _op)),
    "diff": ("say what changed between two plans, and what it costs", (_two_plans,)),
    "check": ("check that a plan is sound, and fits a model", (_plan, _checked_model)),
    "codegen": ("write the program of a plan", (_plan, _optional_model, _output_folder)),
    "verify": (
        "run a step in parallel and on one device, and compare all results",
        (_model, _cluster, _given_plan, _planning),
    ),
    "train": ("train a model in parallel", (_model, _cluster, _given_plan, _planning, _steps)),
    "zoo": ("list the models that come with autopar", ()),
    "hardware": ("list the devices and links that autopar knows", ()),
}
"""Each command: what it does, and its arguments. Its handler has its name in `commands`, or in the
module that `HANDLERS` has for it."""

HANDLERS = dict.fromkeys(("sweep", "fit", "what-if"), "autopar.questions.commands")


if __name__ == "__main__":
    sys.exit(main())
