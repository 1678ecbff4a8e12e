"""Every strategy that a rule offers, run on virtual ranks, equals the unsharded op."""

import pytest
from op_table import CASES
from spmd import check

from autopar.rules import RULES

NOT_RUN = {
    "aten.empty": "its values are undefined",
    "aten.new_empty": "its values are undefined",
    "aten.empty_like": "its values are undefined",
    "aten._assert_tensor_metadata": "it has no output",
    "aten.view.dtype": "it is only replicated",
    "aten.ctc_loss": "it is only replicated",
    "aten._grouped_mm": "it has no double precision kernel; autopar.grouped_mm is its twin",
    "transformers.grouped_mm_fallback": "it needs transformers",
    **dict.fromkeys(
        (
            "autopar.route",
            "autopar.to_experts",
            "autopar.expert_mm",
            "autopar.expert_rows",
            "autopar.from_experts",
        ),
        "split by tokens the positions and counts of a rank are its own, no shares of the whole's; "
        "test_rules_experts runs them together",
    ),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_strategies_equal_the_whole_op(case, size):
    for strategy in case.strategies(size):
        try:
            check(case, strategy, size)
        except Exception as error:
            raise AssertionError(f"{case} over {size} ranks as {strategy}: {error}") from error


def test_every_rule_is_run():
    run = {case.target for case in CASES} | {case.target.rsplit(".", 1)[0] for case in CASES}
    builtin = {name for name in RULES if not name.startswith("test")}
    assert sorted(builtin - run - set(NOT_RUN)) == []
