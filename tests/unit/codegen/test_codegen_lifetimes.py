"""`del` lines in generated source: what is dead goes, what is read or returned stays."""

from __future__ import annotations

from autopar.codegen.lifetimes import with_releases

LINES = [
    "# -- first",
    "a = x + 1  # [4] read by b",
    "b = a.mean(dim=0)  # a method called like no local",
    "mean = b * b",
    "# R -> R*: a comment that names a and b reads nothing",
    "c, d = torch.split(mean, [1, 1])",
    "# -- second",
    "e = c + d",
    "# -- third",
    "f = e + mean.mean()",
]


def test_dead_locals_are_let_go_before_the_next_section():
    printed = with_releases(LINES, ["f"])
    assert [line for line in printed if line.startswith("del")] == ["del a, b", "del c, d"]
    assert printed.index("del a, b") + 1 == printed.index("# -- second")
    assert [line for line in printed if not line.startswith("del")] == LINES


def test_results_stay():
    assert "del a, b" not in with_releases(LINES, ["a", "f"])
    assert "del b" in with_releases(LINES, ["a", "f"])


def test_a_released_name_is_read_no_more():
    released: set[str] = set()
    for line in with_releases(LINES, ["f"]):
        code = "" if line.startswith("#") else line.split("  # ")[0]
        if code.startswith("del "):
            released |= set(code.removeprefix("del ").split(", "))
        else:
            assert not released & set(code.replace("(", " ").replace(",", " ").split())
