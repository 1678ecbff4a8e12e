"""Ring attention on gloo ranks against attention of the whole sequence."""

from collections import Counter
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from autopar.ir.placement import Shard, local_slices, zigzag
from autopar.runtime import kernels
from autopar.runtime.axes import create_world

pytestmark = pytest.mark.distributed

SEQUENCE = 16
CASES = [
    {"dealt": dealt, "is_causal": causal, "heads": heads}
    for dealt, causal, heads in product((False, True), (False, True), (2, 4))
]


def compare(case):
    """Largest errors of this rank's output and gradients, and the messages of each pass."""
    count = torch.distributed.get_world_size()
    world = create_world([("context", count)], [range(count)])
    axis, options = world.meshes[0].axes["context"], {"is_causal": case["is_causal"]}
    options["enable_gqa"] = case["heads"] != 4
    torch.manual_seed(0)
    shapes = [(2, heads, SEQUENCE, 8) for heads in (4, case["heads"], case["heads"])]
    whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    wanted = F.scaled_dot_product_attention(*whole, **options)
    above = torch.randn_like(wanted)
    slopes = torch.autograd.grad((wanted * above).sum(), whole)
    pieces = zigzag(SEQUENCE, count) if case["dealt"] else ()
    held = local_slices(SEQUENCE, Shard(0, pieces), count, axis.rank)
    rows = torch.cat([torch.arange(start, start + length) for start, length in held])
    local = [x.detach().index_select(2, rows).requires_grad_() for x in whole]
    world.recorder.start()
    got = kernels.ring_attention(*local, axis, SEQUENCE, pieces, **options)
    given = torch.autograd.grad((got * above.index_select(2, rows)).sum(), local)
    pairs = [(got, wanted), *zip(given, slopes, strict=True)]
    sent = [(item.phase, item.nbytes) for item in world.recorder.stop()]
    return [(a - b.index_select(2, rows)).abs().max().item() for a, b in pairs], sorted(
        Counter(sent).items()
    )


@pytest.mark.parametrize("size", [2, 4])
def test_a_ring_gives_what_the_whole_sequence_gives(size, request):
    pool = request.getfixturevalue(f"pool{size}")
    for case in CASES:
        message = 2 * case["heads"] * SEQUENCE // size * 8 * 8
        for errors, sent in pool.run(compare, case):
            assert max(errors) < 1e-13, case
            # keys and values: n - 1 turns each way; their gradients: n turns
            assert sent == [
                (("backward", message), 2 * (2 * size - 1)),
                (("forward", message), 2 * (size - 1)),
            ]
