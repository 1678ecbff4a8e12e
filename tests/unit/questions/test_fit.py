"""What fits: the size that is found has a plan, the next one has none."""

import json

import pytest

from autopar import compiler
from autopar.cli import main
from autopar.compiler import PlanOptions, load_source, plan_source
from autopar.costs.clusters import parse_cluster
from autopar.errors import InfeasiblePlan, InputError
from autopar.questions.fit import _by_eighths, fit

STATE = 8 * 256 * 257 * 16
"""Weights, gradients and optimizer state of the stack, in bytes."""


def ask(size, source, cluster, quiet, **options):
    return fit(size, source, parse_cluster(cluster), PlanOptions(**options), quiet)


@pytest.mark.parametrize(("share", "expected"), [(1.2, 1), (0.6, 2), (0.3, 4)])
def test_the_fewest_devices_have_a_plan_and_fewer_have_none(source, quiet, share, expected):
    options = {"memory_limit_bytes": int(share * STATE)}
    found = ask("devices", source, "local:4", quiet, **options)
    assert found.best.size == expected
    assert plan_source(source, f"local:{expected}", PlanOptions(**options)).plan
    if expected == 1:
        assert found.next is None and "there is no smaller size" in found.text
        return
    assert found.next.size == expected // 2 and found.next.proven
    assert found.next.excess_bytes > 0
    with pytest.raises(InfeasiblePlan):
        plan_source(source, f"local:{expected // 2}", PlanOptions(**options))


def test_sizes_that_state_alone_rules_out_are_not_tried(source, quiet):
    """A sixteenth of the state on a device."""
    found = ask("devices", source, "local:2", quiet, memory_limit_bytes=STATE // 16)
    sizes = [tried.size for tried in found.tried]
    assert found.best.size >= 16 and min(sizes) >= 14


def test_a_size_without_a_grid_is_passed_over(source, quiet):
    found = ask("devices", source, "local:4", quiet, pins=(("tensor", "2"),), global_batch=8)
    assert found.best.size == 2
    assert "tensor=2 does not divide 1 devices" in found.next.text


def test_the_largest_micro_batch(source, quiet):
    """The next size has no plan; batches are split over no more ranks than have samples."""
    options = {"memory_limit_bytes": STATE, "pins": (("recompute", "none"),)}
    found = ask("micro-batch", source, "local:2", quiet, **options)
    assert 64 < found.best.size < found.next.size <= found.best.size * 9 / 8
    for tried, fits in ((found.best, True), (found.next, False)):
        pins = (*options["pins"], ("micro_batch", str(tried.size)))
        asked = PlanOptions(
            global_batch=2 * tried.size, memory_limit_bytes=STATE, pins=pins, price_pins=False
        )
        if fits:
            assert plan_source(source, "local:2", asked).plan
        else:
            with pytest.raises(InfeasiblePlan):
                plan_source(source, "local:2", asked)
    bounded = ask("micro-batch", source, "local:2", quiet, global_batch=16, **options)
    assert bounded.best.size == 16 and bounded.next is None


def test_the_most_layers(quiet):
    limit = 300_000
    found = ask("layers", load_source("mlp"), "local:1", quiet, memory_limit_bytes=limit)
    layer = 64 * 65 * 16
    assert found.best.size == found.next.size - 1
    assert limit - 2 * layer < found.best.size * layer <= limit
    assert 0 < found.next.excess_bytes < layer


@pytest.mark.slow
def test_the_longest_sequence_that_memory_allows(quiet):
    source = load_source("llama_tiny")
    found = ask("sequence", source, "local:1", quiet, memory_limit_bytes=8 * 2**20)
    assert found.best.size < found.next.size <= found.best.size * 9 / 8
    assert [t.fits for t in found.tried] == [t.size <= found.best.size for t in found.tried]


def test_no_sequence_is_longer_than_the_model_has_positions_for(quiet):
    most = ask("sequence", load_source("gpt_tiny"), "local:1", quiet)
    assert (most.best.size, most.next) == (64, None)
    with pytest.raises(InputError, match="gpt_tiny has positions for 64 tokens"):
        load_source("gpt_tiny", seq_len=65)


def test_sizes_that_are_not_autopars_to_choose(source, quiet):
    with pytest.raises(InputError, match=r"sizes of stack.py:made: .* expected a zoo model"):
        ask("layers", source, "local:1", quiet)
    with pytest.raises(InputError, match="sequence of mlp: the model has no tokens"):
        ask("sequence", load_source("mlp"), "local:1", quiet)


def test_the_ladder_has_eight_sizes_a_doubling():
    steps = [_by_eighths(i) for i in range(26)]
    assert steps[:8] == list(range(1, 9))
    assert steps[7:] == [8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 30, 32, 36, 40]


def test_the_command_answers_no_where_nothing_fits(capsys, monkeypatch, source):
    monkeypatch.setattr(compiler, "load_source", lambda spec, seq_len: source)
    common = ("stack.py:made", "--cluster", "local:2", "--no-measure", "--json")
    assert main(["fit", "devices", *common]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["size"] == 1
    assert main(["fit", "micro-batch", *common, "--memory-limit", "0.001"]) == 1
    assert json.loads(capsys.readouterr().out)["best"] is None
