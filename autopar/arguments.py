"""The arguments of the command line, by subject; `cli` says which command takes which."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

_MODEL_HELP = (
    "a zoo model (see 'autopar zoo'), or package.module:function or path/file.py:function that "
    "returns (model, batch) or (model, batch, loss_fn)"
)
_CLUSTER_HELP = (
    "local:4 (four CPU processes), auto, 8x8:h100-sxm (8 nodes of 8), groups joined by +, or a "
    "YAML or JSON file"
)


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


def model(parser: argparse.ArgumentParser) -> None:
    """A model."""
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)


def optional_model(parser: argparse.ArgumentParser) -> None:
    """A model, by default that of the plan."""
    text = f"{_MODEL_HELP}; default: the model the plan names"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)


def checked_model(parser: argparse.ArgumentParser) -> None:
    """A model to hold the plan to."""
    text = f"compare the plan with this model: {_MODEL_HELP}"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)


def plan(parser: argparse.ArgumentParser) -> None:
    """A plan file."""
    parser.add_argument("plan", metavar="PLAN", help="a plan file that 'autopar plan -o' wrote")


def two_plans(parser: argparse.ArgumentParser) -> None:
    """Two plan files."""
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="a plan file")


def cluster(parser: argparse.ArgumentParser) -> None:
    """A cluster."""
    parser.add_argument("--cluster", metavar="SPEC", required=True, help=_CLUSTER_HELP)
    _no_measure(parser)


def _no_measure(parser: argparse.ArgumentParser) -> None:
    text = "price local processes with the table of devices, not as measured on this machine"
    parser.add_argument("--no-measure", action="store_true", help=text)


def clusters(parser: argparse.ArgumentParser) -> None:
    """Clusters of several sizes."""
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
    _no_measure(parser)


def size(parser: argparse.ArgumentParser) -> None:
    """What the answer is the most or the fewest of."""
    text = (
        "devices: the fewest, in nodes like the cluster's; micro-batch, sequence (tokens), layers: "
        "the most that fit the cluster, the last two for zoo models"
    )
    sizes = ("devices", "micro-batch", "sequence", "layers")
    parser.add_argument("size", choices=sizes, help=text)


def changes(parser: argparse.ArgumentParser) -> None:
    """What is changed of a plan's setup."""
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


def keep(parser: argparse.ArgumentParser) -> None:
    """A plan whose decisions stay."""
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


def given_plan(parser: argparse.ArgumentParser) -> None:
    """A plan instead of a search."""
    text = "run this plan instead of making one; it must fit the model and the cluster"
    parser.add_argument("--plan", metavar="FILE", help=text)


def steps(parser: argparse.ArgumentParser) -> None:
    """A number of training steps."""
    text = "training steps to run (default: %(default)s)"
    parser.add_argument("--steps", metavar="N", type=_whole, default=10, help=text)


def output_file(parser: argparse.ArgumentParser) -> None:
    """Where a plan goes."""
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan to this file")


def trace_file(parser: argparse.ArgumentParser) -> None:
    """Where a timeline goes."""
    text = "file to write; open it at ui.perfetto.dev or chrome://tracing"
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help=text)


def output_folder(parser: argparse.ArgumentParser) -> None:
    """Where a program goes."""
    text = "folder to write the program to; made if it is not there"
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help=text)


def database(parser: argparse.ArgumentParser) -> None:
    """Where measurements go."""
    text = (
        "database to measure into; what it holds is not measured again (default: "
        "profile.sqlite in autopar's cache folder)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help=text)


def limits(parser: argparse.ArgumentParser) -> None:
    """What is left out of a measurement."""
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


def profiles(parser: argparse.ArgumentParser) -> None:
    """Files of measurements."""
    text = "a database that 'autopar profile' wrote, or JSON that this command wrote"
    parser.add_argument("profiles", metavar="FILE", nargs="+", help=text)
    text = "write all together to this file: JSON where it ends in .json, else a database"
    parser.add_argument("-o", "--output", metavar="FILE", help=text)


def profile(parser: argparse.ArgumentParser) -> None:
    """Measured times to plan with."""
    text = "take measured times from this file of 'autopar profile' or 'autopar profiles'"
    parser.add_argument("--profile", metavar="FILE", help=text)


def objective(parser: argparse.ArgumentParser) -> None:
    """What the best plan has the least of."""
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


def top(parser: argparse.ArgumentParser) -> None:
    """How many others are named."""
    text = (
        "name this many other techniques that came next, each solved (default: up to 5 of those "
        "that the search met)"
    )
    parser.add_argument("--top", metavar="K", type=_whole, help=text)


def op(parser: argparse.ArgumentParser) -> None:
    """One op or parameter."""
    parser.add_argument("--op", metavar="NAME", help="explain this op or parameter")


def planning(parser: argparse.ArgumentParser) -> None:
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
        "--gap",
        metavar="G",
        type=_share,
        help="end the search once the plan is proven to be within this share of the best (0.02)",
    )
    add("--backend", metavar="NAME", help="ILP solver: highs (default) or cbc")


def searching(parser: argparse.ArgumentParser) -> None:
    """How a search is done, which changes no plan that it has the time to find."""
    add = parser.add_argument_group("searching").add_argument
    add("--time-limit", metavar="S", type=_positive, help="seconds of search (default: 120)")
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
