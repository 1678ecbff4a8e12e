"""Products in a narrower dtype: who is cast, what it moves, what it saves."""

from __future__ import annotations

import pytest

from autopar.compiler import PlanOptions, load_source, plan_source
from autopar.costs.compute import op_time
from autopar.costs.hardware import DEVICES
from autopar.costs.local_op import LocalOp
from autopar.costs.narrow import cast_traffic, is_linear
from autopar.errors import InputError

H100 = DEVICES["h100-sxm"].device
FP8 = "float8_e4m3fn"


def product(name, *shapes, out, grads=(True, True)):
    return LocalOp(
        target=f"aten.{name}.default",
        input_shapes=shapes,
        input_dtypes=("bfloat16",) * len(shapes),
        output_shapes=(out,),
        output_dtypes=("bfloat16",),
        requires_grad=any(grads),
        grad_inputs=grads,
    )


LINEAR = product("linear", (4096, 8192), (8192, 8192), out=(4096, 8192))


@pytest.mark.parametrize(
    ("op", "linear"),
    [
        (LINEAR, True),
        (product("addmm", (64,), (32, 16), (16, 64), out=(32, 64)), True),
        (product("matmul", (2, 32, 16), (16, 64), out=(2, 32, 64)), True),
        (product("matmul", (2, 32, 16), (2, 16, 64), out=(2, 32, 64)), False),
        (product("bmm", (2, 32, 16), (2, 16, 64), out=(2, 32, 64)), False),
        (product("_grouped_mm", (32, 16), (4, 16, 64), out=(32, 64)), True),
        (product("add", (32, 16), (32, 16), out=(32, 16)), False),
    ],
)
def test_products_with_weights_are_cast(op, linear):
    assert is_linear(op) is linear


def test_a_cast_reads_two_bytes_and_writes_one_twice():
    op = product("addmm", (64,), (32, 16), (16, 64), out=(32, 64))
    moved = cast_traffic(op)
    assert moved.forward_bytes == 4 * (32 * 16 + 16 * 64)
    assert moved.backward_bytes == 4 * 32 * 64
    frozen = cast_traffic(product("linear", (32, 16), (64, 16), out=(32, 64), grads=(False, False)))
    assert (frozen.backward_bytes, frozen.backward_kernels) == (0, 0)


def test_a_large_product_takes_half_and_a_small_one_its_casts():
    wide, narrow = op_time(LINEAR, H100), op_time(LINEAR, H100, product_dtype=FP8)
    casts = cast_traffic(LINEAR)
    assert narrow.forward_s > wide.forward_s / 2
    assert narrow.forward_s < 0.75 * wide.forward_s
    assert casts.forward_bytes == 4 * (4096 * 8192 + 8192 * 8192)
    small = product("linear", (64, 64), (64, 64), out=(64, 64))
    slower = op_time(small, H100, product_dtype=FP8).forward_s - op_time(small, H100).forward_s
    assert slower == pytest.approx(2 * H100.kernel_launch_s, rel=0.1)
    added = product("add", (64, 64), (64, 64), out=(64, 64))
    assert op_time(added, H100, product_dtype=FP8) == op_time(added, H100)


def plan(cluster, precision):
    options = PlanOptions(
        global_batch=8, precision=precision, pins=(("pipeline", "1"), ("tensor", "1"))
    )
    return plan_source(load_source("gpt2", seq_len=1024), cluster, options).plan


def test_a_plan_in_fp8_holds_what_bf16_holds_and_its_casts_can_cost_more_than_they_save():
    narrow, wide = plan("1x8:h100-sxm", "fp8"), plan("1x8:h100-sxm", "bf16")
    assert narrow.training.precision == "fp8"
    assert narrow.stages[0].memory_bytes == wide.stages[0].memory_bytes
    assert narrow.prediction.step_s > wide.prediction.step_s  # products of 768 columns


def test_a_device_without_the_rate_is_refused():
    with pytest.raises(InputError, match=r"a100-80gb has no rate for products of float8_e4m3fn"):
        plan("1x8:a100-80gb", "fp8")
