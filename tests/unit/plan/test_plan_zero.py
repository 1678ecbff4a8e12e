"""Which dim a weight's state is split by, and what a plan may say of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.placement import R_STAR, R, Shard
from autopar.plan.diff import diff_plans
from autopar.plan.plan import ParameterPlan
from autopar.plan.serialize import from_json, to_json
from autopar.plan.zero import ZeroShard, shard_layout, stored_layout, zero_problems, zero_shard

S0, S1 = Shard(0), Shard(1)

SPLITS = {
    "largest dim": ((8, 16), (R_STAR, R), (4, 1), (0,), (S1, R)),
    "first of equals": ((16, 16), (R_STAR, R), (4, 1), (0,), (S0, R)),
    "not the dim that tensor splits": ((64, 16), (R_STAR, S0), (4, 2), (0,), (S1, S0)),
    "uneven over one axis": ((10,), (R_STAR,), (4,), (0,), (S0,)),
    "no dim left": ((64,), (R_STAR, S0), (4, 2), (0,), ()),
    "a scalar": ((), (R_STAR,), (4,), (0,), ()),
    "one rank": ((8,), (R_STAR, R), (1, 4), (0,), ()),
    "gradient whole on every rank": ((8,), (R, R_STAR), (4, 2), (0,), ()),
    "both batch axes": ((8, 12), (R_STAR, R_STAR, R), (2, 4, 2), (0, 1), (S0, S0, R)),
    "inner axis alone": ((8, 12), (R_STAR, R_STAR, R), (2, 4, 2), (1,), (R_STAR, S1, R)),
    "uneven over both": ((9, 6), (R_STAR, R_STAR), (2, 4), (0, 1), (R_STAR, S0)),
}


@pytest.mark.parametrize("case", SPLITS)
def test_dim_that_is_split(case):
    shape, layout, sizes, over, expected = SPLITS[case]
    assert shard_layout(shape, layout, sizes, over) == expected


def _weight(**changes):
    weight = ParameterPlan(
        fqn="w", shape=(8, 16), dtype="float32", layout=(R_STAR, R_STAR, S0), trainable=True
    )
    return replace(weight, **changes)


NAMES = ("data", "shard", "tensor")


def test_axes_and_dim():
    assert zero_shard(_weight(), NAMES) is None
    assert stored_layout(_weight()) == (R_STAR, R_STAR, S0)
    both, inner = (S1, S1, S0), (R_STAR, S1, S0)
    assert zero_shard(_weight(zero=1, stored=both), NAMES) == ZeroShard(
        axes=("data", "shard"), dim=1
    )
    assert zero_shard(_weight(zero=3, stored=inner), NAMES) == ZeroShard(axes=("shard",), dim=1)


SOUND = {
    "off": {},
    "optimizer state": {"zero": 1, "stored": (S1, S1, S0)},
    "hybrid": {"zero": 2, "stored": (R_STAR, S1, S0)},
    "frozen weight in shards": {
        "zero": 3, "trainable": False, "layout": (R, R, S0), "stored": (R, S1, S0)
    },
}  # fmt: skip

UNSOUND = {
    "level 4": {"zero": 4, "stored": (S1, S1, S0)},
    "level without a layout": {"zero": 1},
    "layout without a level": {"stored": (S1, S1, S0)},
    "frozen weight has no optimizer state": {
        "zero": 1, "trainable": False, "layout": (R, R, S0), "stored": (R, S1, S0)
    },
    "buffer": {"zero": 3, "buffer": True, "stored": (S1, S1, S0)},
    "other axis": {"zero": 1, "stored": (R_STAR, R_STAR, S1)},
    "two dims": {"zero": 1, "layout": (R_STAR,) * 3, "stored": (S0, S1, R_STAR)},
    "dim that is split": {"zero": 1, "stored": (S0, S0, S0)},
    "no such dim": {"zero": 1, "stored": (Shard(2), Shard(2), S0)},
    "pieces": {"zero": 1, "stored": (R_STAR, Shard(1, (8, 8)), S0)},
    "nothing split": {"zero": 1, "stored": (R_STAR, R_STAR, S0)},
    "axes missing": {"zero": 1, "stored": (S1,)},
}  # fmt: skip


@pytest.mark.parametrize("case", SOUND)
def test_sound(case):
    assert not list(zero_problems(_weight(**SOUND[case]), NAMES))


@pytest.mark.parametrize("case", UNSOUND)
def test_contradiction_is_found(case):
    assert list(zero_problems(_weight(**UNSOUND[case]), NAMES))


def _sharded(plan, level=1):
    """The plan with the state of stage 0's second parameter split."""
    stage = plan.stages[0]
    first, second, *rest = stage.parameters
    changed = replace(second, zero=level, stored=(S0, R))
    stage = replace(stage, parameters=(first, changed, *rest))
    return replace(plan, stages=(stage, *plan.stages[1:]))


def test_reads_and_writes_and_shows_as_a_difference(sample_plan):
    plan = _sharded(sample_plan)
    assert from_json(to_json(plan)).stages[0].parameters == plan.stages[0].parameters
    text = diff_plans(sample_plan, plan)
    assert "ZeRO-1 over data dim 0" in text
