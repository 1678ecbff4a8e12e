"""Rules written as text, and one-line rules for ops of the user's own."""

import pytest
from rule_graphs import spec, strategies

from autopar.rules import RULES, has_rule, register, register_elementwise, register_rule


@pytest.fixture(autouse=True)
def _restore():
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def test_elementwise_in_one_line():
    assert not has_rule("testlib.square.default")
    register_elementwise("testlib::square")
    assert has_rule("testlib.square.default")
    found = strategies("testlib.square.default", [spec("batch", 5)], ("batch", 5))
    assert found == ["R -> R", "R* -> R*", "S(0) -> S(0)", "S(1) -> S(1)"]


def test_text_rule_with_factors_walked_dims_and_ellipsis():
    register_rule("testlib::mix", "... (h d), h [w] -> ... h [w] d")
    found = strategies(
        "testlib.mix.default", [spec("batch", 6, 32), spec(8, 5)], ("batch", 6, 8, 5, 4), size=2
    )
    assert found[2:] == ["S(0), R* -> S(0)", "S(1), R* -> S(1)", "S(2), S(0) -> S(2)"]


def test_a_word_that_no_output_has_is_summed():
    register_rule("testlib::dot", "i, i ->")
    assert strategies("testlib.dot.default", [spec(8), spec(8)], ())[2:] == ["S(0), S(0) -> P(sum)"]


def test_an_overload_may_differ_from_its_op():
    register_elementwise("testlib::f")
    register("testlib.f.whole")(lambda op: None)
    assert len(strategies("testlib.f.default", [spec(8)], (8,))) == 3
    assert len(strategies("testlib.f.whole", [spec(8)], (8,))) == 2


@pytest.mark.parametrize("text", ["a b", "a -> b -> c", "a (b -> a", "a ? -> a"])
def test_malformed_text(text):
    with pytest.raises(ValueError, match="rule"):
        register_rule("testlib::bad", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b -> a b", "expected 2 dims"),
        ("a, b -> a", "expected 2 tensor inputs"),
        ("(a b) -> a", "cannot be told apart|does not fit"),
    ],
)
def test_text_that_does_not_fit_the_op(text, message):
    register_rule("testlib::bad", text)
    with pytest.raises(ValueError, match=message):
        strategies("testlib.bad.default", [spec(8)], (3,))
