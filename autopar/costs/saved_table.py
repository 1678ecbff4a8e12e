"""What each op's backward formula reads: the table behind `saved`.

Input numbers count the tensors an op reads. `(0, 1)` says that input 0 is kept if input 1 needs a
gradient; `ANY` stands for any of them. From torch's `derivatives.yaml`, checked op by op against
`torch.autograd.graph.saved_tensors_hooks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.costs.local_op import op_name

ANY = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Inputs, each with the input whose gradient needs it, and outputs that an op keeps."""

    inputs: tuple[tuple[int, int], ...] = ()
    outputs: tuple[int, ...] = ()

    def kept_inputs(self, needs: Sequence[bool]) -> tuple[int, ...]:
        """Positions of the inputs kept, given which inputs need a gradient."""
        count = len(needs)
        kept = {
            saved: None
            for saved, needed in self.inputs
            if saved < count and (needed == ANY or (needed < count and needs[needed]))
        }
        return tuple(kept)

    def kept_outputs(self, count: int) -> tuple[int, ...]:
        """Positions of the outputs kept, of `count`."""
        return tuple(i for i in self.outputs if i < count)


NOTHING = Keep()
ITSELF = Keep(inputs=((0, ANY),))
RESULT = Keep(outputs=(0,))
BOTH = Keep(inputs=((0, ANY), (1, ANY)))
ITSELF_AND_RESULT = Keep(inputs=((0, ANY),), outputs=(0,))
FACTORS = Keep(inputs=((0, 1), (1, 0)))
LATER_FACTORS = Keep(inputs=((1, 2), (2, 1)))
SECOND = Keep(inputs=((1, ANY),))
KEEPS_ALL = Keep(inputs=tuple((i, ANY) for i in range(64)), outputs=tuple(range(8)))
"""For an op that is not in the table: everything, so that memory is never underestimated."""


def _rows(names: str, keep: Keep) -> Iterable[tuple[str, Keep]]:
    return ((name, keep) for name in names.split())


KEEP: dict[str, Keep] = dict(
    [
        *_rows("add sub rsub neg sum mean cat stack to _to_copy clone copy", NOTHING),
        *_rows("contiguous reshape flatten dropout pad constant_pad_nd repeat tile roll", NOTHING),
        *_rows("flip tril triu cumsum lerp sign floor ceil round trunc repeat_interleave", NOTHING),
        *_rows("upsample_nearest2d upsample_bilinear2d pixel_shuffle", NOTHING),
        *_rows(
            "new_zeros new_ones new_empty new_full zeros_like ones_like empty_like full_like",
            NOTHING,
        ),
        *_rows("gelu silu pow square abs log log2 log10 log1p sin cos erf var nan_to_num", ITSELF),
        *_rows("clamp clamp_min clamp_max hardtanh hardswish hardsigmoid mish softplus", ITSELF),
        *_rows("leaky_relu elu selu celu relu6 log_sigmoid glu", ITSELF),
        *_rows("avg_pool2d adaptive_avg_pool2d max_pool2d", ITSELF),
        *_rows("softmax _softmax log_softmax _log_softmax exp expm1 sqrt rsqrt sigmoid", RESULT),
        *_rows("tan tanh relu reciprocal cumprod", RESULT),
        *_rows(
            "amax amin std norm linalg_vector_norm logsumexp prod max min pow.Scalar",
            ITSELF_AND_RESULT,
        ),
        *_rows("max.dim min.dim topk sort cummax cummin", Keep(outputs=(1,))),
        *_rows("maximum minimum fmax fmin atan2 mse_loss l1_loss smooth_l1_loss", BOTH),
        *_rows("huber_loss kl_div binary_cross_entropy gather", BOTH),
        *_rows("binary_cross_entropy_with_logits nll_loss nll_loss_nd group_norm", BOTH),
        *_rows("batch_norm prelu conv1d conv2d conv3d convolution _convolution", BOTH),
        *_rows("conv_transpose1d conv_transpose2d conv_transpose3d", BOTH),
        *_rows("mul linear mm bmm matmul mv dot", FACTORS),
        *_rows("addmm baddbmm addmv addcmul", LATER_FACTORS),
        *_rows("embedding index_select scatter_add masked_fill masked_select", SECOND),
        *_rows("index_add scatter index_fill cross_entropy_loss cross_entropy_sum", SECOND),
        *_rows(
            "_grouped_mm grouped_mm grouped_mm_fallback expert_mm",
            Keep(inputs=((0, 1), (1, 0), (2, ANY))),
        ),
        *_rows("to_experts from_experts expert_rows", SECOND),
        ("div", Keep(inputs=((1, 0), (0, 1), (1, 1)))),
        # The weight, and of the layer norm the bias: parameters, which lie there anyway.
        ("layer_norm", Keep(inputs=((0, ANY), (1, ANY), (2, ANY)))),
        ("rms_norm", Keep(inputs=((0, ANY), (1, 0)))),
        ("addcdiv", Keep(inputs=((1, 2), (2, ANY)))),
        ("where", ITSELF),
        ("pow.Tensor_Tensor", Keep(inputs=((0, ANY), (1, ANY)), outputs=(0,))),
        ("index", Keep(inputs=tuple((i, ANY) for i in range(1, 9)))),
        ("index_put", Keep(inputs=tuple((i, ANY) for i in range(1, 9)))),
        ("einsum", Keep(inputs=tuple((i, j) for i in range(8) for j in range(8) if i != j))),
    ]
)
"""Op name, or `name.overload` where overloads differ, to what its backward reads. Ops with kernels
of their own (attention, norms, losses, dropout, pooling) keep more: `saved.EXTRAS`."""


def keep_rule(target: str) -> Keep | None:
    """The row for an op, that of its overload first; None where the table has none."""
    name = op_name(target)
    return KEEP.get(f"{name}.{target.rsplit('.', 1)[-1]}") or KEEP.get(name)
