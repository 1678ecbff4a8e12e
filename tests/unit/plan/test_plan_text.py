"""Figures and columns as people read them."""

from __future__ import annotations

import pytest

from autopar.plan.text import (
    amount,
    columns,
    digits,
    duration,
    number,
    page,
    percent,
    plural,
    section,
    spans,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (3e-7, "0.3 us"),
        (1.2345e-5, "12.35 us"),
        (0.04, "40 ms"),
        (0.9999, "999.9 ms"),
        (0.99999, "1 s"),
        (123.456, "123.5 s"),
        (-0.002, "-2 ms"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (79.65 * 2**30, "79.65 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_amount(nbytes, text):
    assert amount(nbytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(640, "640"), (16_640, "16.64K"), (405_853_388_800, "405.9B"), (0, "0"), (999_999, "1M")],
)
def test_number(count, text):
    assert number(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12346"), (100.0, "100"), (0.1, "0.1"), (1.0, "1"), (0.00001, "0")],
)
def test_digits(value, text):
    assert digits(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0.0%"),
        (0.086, "8.6%"),
        (1e-4, "0.01%"),
        (1e-16, "0.0%"),
        (1, "100.0%"),
        (-0.5, "-50.0%"),
    ],
)
def test_percent(share, text):
    assert percent(share) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1), "0-1"),
        ((0, 1, 2, 3, 8), "0-3, 8"),
        ((0, 8), "0, 8"),
        ((0, 4, 8, 12), "0, 4, .. 12"),
        ((0, 2, 3, 4), "0, 2-4"),
        ((5, 4, 3), "5, 4, .. 3"),
        ((1, 1), "1, 1"),
    ],
)
def test_spans(numbers, text):
    assert spans(numbers) == text


def test_plural():
    assert [plural(n, "micro-batch") for n in (0, 1, 2)] == [
        "0 micro-batches",
        "1 micro-batch",
        "2 micro-batches",
    ]


def test_columns_align_and_drop_what_is_empty():
    text = columns(("name", "size", ""), [("a", "10", ""), ("long name", "9", "")])
    assert text.split("\n") == ["name       size", "a            10", "long name     9"]


def test_section_and_page():
    assert section("Title", "") == ""
    assert page(["one", "", section("Title", "a\n\nb")]) == "one\n\nTitle\n  a\n\n  b"
    assert page(["red \x1b[31m\r"]) == "red \\x1b[31m\\r"
