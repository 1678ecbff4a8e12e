"""In which dtypes parameters, their gradients and what an optimizer updates are kept."""

from __future__ import annotations

from dataclasses import dataclass

_NARROW = frozenset({"bfloat16", "float16"})
MASTER_DTYPE = "float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Dtypes of trained parameters and their gradients; `master` adds float32 weights.

    `loss_scale` says that gradients are too small for the dtype unless the loss is scaled.
    `product_dtype` is that of the operands of linear layers, where it is another than that of
    parameters; `runs` tells whether torch can train so.
    """

    name: str
    param_dtype: str
    grad_dtype: str
    master: bool = False
    loss_scale: bool = False
    product_dtype: str = ""
    runs: bool = True


PRECISIONS: dict[str, Precision] = {
    row.name: row
    for row in (
        Precision(name="fp64", param_dtype="float64", grad_dtype="float64"),
        Precision(name="fp32", param_dtype="float32", grad_dtype="float32"),
        Precision(name="bf16", param_dtype="bfloat16", grad_dtype="bfloat16", master=True),
        Precision(
            name="fp16",
            param_dtype="float16",
            grad_dtype="float16",
            master=True,
            loss_scale=True,
        ),
        Precision(
            name="fp8",
            param_dtype="bfloat16",
            grad_dtype="bfloat16",
            master=True,
            product_dtype="float8_e4m3fn",
            runs=False,
        ),
    )
}
"""With Adam: 32, 16 and from bf16 on 2 + 2 + 4 + 8 bytes a parameter. `fp8` is bf16 but for the
operands of linear layers, which are cast before each product (Micikevicius et al. 2022,
arXiv:2209.05433); torch has no gradient through such products."""


def stored_dtype(precision: Precision, dtype: str, *, trainable: bool) -> str:
    """The dtype that a parameter has between steps, where an optimizer updates it.

    A frozen parameter, and one that is wide already, has no master copy.
    """
    return MASTER_DTYPE if precision.master and trainable and dtype in _NARROW else dtype


def grad_dtype(precision: Precision, dtype: str) -> str:
    """The dtype in which a parameter's gradients are added up over micro-batches and ranks."""
    return precision.grad_dtype if dtype == precision.param_dtype else dtype
