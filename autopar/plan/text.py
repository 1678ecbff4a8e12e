"""Plain text for people: aligned columns, and figures with units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"), (1.0, ""))
_ROUNDING = 1e-7
"""Percentages below this are what rounding leaves of sums that are equal."""

Unit = tuple[float, str]
"""How much of the base unit it is, and its name."""


def time_unit(seconds: Iterable[float]) -> Unit:
    """The unit in which the largest of some times is at least one: s, ms or us."""
    return _unit(_TIMES, seconds)


def size_unit(sizes: Iterable[float]) -> Unit:
    """The unit in which the largest of some sizes in bytes is at least one: TiB to B."""
    return _unit(_SIZES, sizes)


def duration(seconds: float) -> str:
    """A time in its own unit, to four digits: `123.4 ms`."""
    return _measure(_TIMES, seconds)


def amount(nbytes: float) -> str:
    """A size in its own unit, to four digits: `79.65 GiB`."""
    if nbytes < 0:
        return f"-{amount(-nbytes)}"
    return _measure(_SIZES, nbytes)


def number(count: float) -> str:
    """A count to four digits: `405.9B`, `16.64K`, `640`."""
    scale, name = _unit(_COUNTS, (count,))
    return f"{digits(count / scale)}{name}"


def percent(share: float) -> str:
    """A fraction as a percentage: `8.6%`; small ones to two digits, so that they do not vanish."""
    value = 100 * share
    if abs(value) < _ROUNDING:
        return "0.0%"
    return f"{value:.1f}%" if abs(value) >= 1 else f"{value:.2g}%"


def digits(value: float) -> str:
    """A figure to four significant digits, without an exponent or a trailing point."""
    text = f"{value:.{decimals(value)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def decimals(largest: float) -> int:
    """How many decimals give a figure four significant digits; 3 below one, none from 1000."""
    return max(0, 4 - len(str(int(abs(largest)))))


def plural(count: int, noun: str) -> str:
    """`1 stage`, `2 stages`, `8 micro-batches`."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def spans(numbers: Iterable[int]) -> str:
    """Numbers in the order given, runs of them shortened: `0-3, 8`; `0, 4, .. 28` by a step."""
    values, parts, start = list(numbers), [], 0
    while start < len(values):
        stop = start + 1
        step = values[stop] - values[start] if stop < len(values) else 1
        while stop < len(values) and values[stop] - values[stop - 1] == step:
            stop += 1
        if stop - start < 3 and step != 1:
            stop = start + 1
        first, last = values[start], values[stop - 1]
        if stop - start == 1:
            parts.append(str(first))
        elif step == 1:
            parts.append(f"{first}-{last}")
        else:
            parts.append(f"{first}, {first + step}, .. {last}")
        start = stop
    return ", ".join(parts)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Rows under a header; the first `left` columns to the left, the others, figures, to the right.

    Columns without any text are left out.
    """
    table = [header, *rows]
    used = [i for i in range(len(header)) if any(row[i] for row in rows)]
    widths = {i: max(len(row[i]) for row in table) for i in used}
    return "\n".join(
        "  ".join(
            row[i].ljust(widths[i]) if i < left else row[i].rjust(widths[i]) for i in used
        ).rstrip()
        for row in table
    )


def left_last(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """`columns`, and a last one of texts that is not aligned."""
    table = columns(header[:-1], [row[:-1] for row in rows], left=left).split("\n")
    texts = [header[-1], *(row[-1] for row in rows)]
    return "\n".join(line + text for line, text in zip(table, texts, strict=True))


def section(title: str, body: str) -> str:
    """A titled, indented part of a text; nothing where the body is empty."""
    if not body:
        return ""
    return "\n".join([title, *(f"  {line}" if line else "" for line in body.split("\n"))])


def page(parts: Iterable[str]) -> str:
    """Parts with blank lines between them, and control characters, which could drive a terminal,
    made visible."""
    text = "\n\n".join(part for part in parts if part)
    return "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def _unit(units: Sequence[Unit], values: Iterable[float]) -> Unit:
    largest = max((abs(value) for value in values), default=0.0)
    # rounding to four digits must not give 1000 of a unit that has a next
    return next((unit for unit in units if largest >= unit[0] * 0.99995), units[-1])


def _measure(units: Sequence[Unit], value: float) -> str:
    scale, name = _unit(units, (value,))
    return f"{digits(value / scale)} {name}"
