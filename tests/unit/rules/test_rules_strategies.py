"""The exact strategies of the ops that plans are made of."""

from rule_graphs import Builder, spec, strategies

from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import Ref
from autopar.rules import axis_strategies

REPLICATED = {1: ["R -> R", "R* -> R*"], 2: ["R, R -> R", "R*, R* -> R*"]}


def test_linear_has_batch_column_and_row_parallel_forms():
    found = strategies(
        "aten.linear.default", [spec("batch", 16, 64), spec(128, 64), spec(128)], ("batch", 16, 128)
    )
    assert found == [
        "R, R, R -> R",
        "R*, R*, R* -> R*",
        "S(0), R*, R* -> S(0)",
        "S(1), R*, R* -> S(1)",
        "S(2), S(1), P(sum) -> P(sum)",  # the bias is added once, not once per rank
        "R*, S(0), S(0) -> S(2)",
    ]


def test_addmm_adds_its_bias_once():
    found = strategies(
        "aten.addmm.default", [spec(128), spec("16*batch", 64), spec(64, 128)], ("16*batch", 128)
    )
    assert "P(sum), S(1), S(0) -> P(sum)" in found
    assert "S(0), R*, S(1) -> S(1)" in found
    assert "R*, S(0), R* -> S(0)" in found


def test_a_dim_smaller_than_the_axis_is_not_split():
    found = strategies("aten.mm.default", [spec(6, 8), spec(8, 3)], (6, 3), size=4)
    assert "R*, S(1) -> S(1)" not in found
    assert "S(0), R* -> S(0)" in found  # 6 over 4 is 2, 2, 2, 0


def test_batch_sizes_count_at_the_given_batch():
    shape = ("batch", 3)
    assert "S(0) -> S(0)" in strategies("aten.relu.default", [spec(*shape)], shape, batch=4)
    assert "S(0) -> S(0)" not in strategies("aten.relu.default", [spec(*shape)], shape, batch=3)


def test_heads_must_divide():
    def split(heads, size):
        flat, apart = ("batch", 16, heads * 8), ("batch", 16, heads, 8)
        return "S(2) -> S(2)" in strategies("aten.view.default", [spec(*flat)], apart, size=size)

    assert split(28, 4) and split(28, 7)
    assert not split(28, 8)
    assert not split(10, 4)


def test_grouped_queries_divide_by_key_value_heads():
    shapes = [spec("batch", 8, 16, 8), spec("batch", 2, 16, 8), spec("batch", 2, 16, 8)]

    def split(size):
        found = strategies(
            "aten.scaled_dot_product_attention.default", shapes, ("batch", 8, 16, 8),
            None, 0.0, True, 0.5, True, size=size,
        )  # fmt: skip
        return "S(1), S(1), S(1) -> S(1)" in found

    assert split(2)
    assert not split(4)


def test_attention_reads_keys_whole_and_splits_queries_unless_causal():
    shape = ("batch", 8, 16, 8)
    args = [spec(*shape)] * 3
    target = "aten.scaled_dot_product_attention.default"
    free = strategies(target, args, shape)
    causal = strategies(target, args, shape, None, 0.0, True)
    assert "S(2), R*, R* -> S(2)" in free
    assert set(free) - set(causal) == {"S(2), R*, R* -> S(2)"}
    masked = strategies(target, [*args, spec("batch", 1, 16, 16, dtype="bool")], shape)
    assert "S(2), R*, R*, S(2) -> S(2)" in masked
    assert "S(1), S(1), S(1), R -> S(1)" in masked


def test_attention_dropout_has_its_kernel_everywhere():
    shape = ("batch", 8, 16, 8)
    found = strategies(
        "aten.scaled_dot_product_attention.default", [spec(*shape)] * 3, shape, None, 0.1
    )
    assert all(text.endswith("[attention_dropout]") for text in found)


def test_embedding_splits_vocabulary_hidden_and_ids():
    found = strategies(
        "aten.embedding.default",
        [spec(50257, 64), spec("batch", 16, dtype="int64")],
        ("batch", 16, 64),
    )
    assert found == [
        "R, R -> R",
        "R*, R -> R*",
        "S(0), R -> P(sum) [vocab_embedding]",
        "S(1), R -> S(2)",
        "R*, S(0) -> S(0)",
        "R*, S(1) -> S(1)",
    ]


def test_cross_entropy_over_a_split_vocabulary_reduces_two_numbers_per_token():
    builder = Builder()
    logits = builder.input("logits", "16*batch", 10, dtype="bfloat16")
    target = builder.input("target", "16*batch", dtype="int64")
    builder.op("loss", "autopar.cross_entropy_sum.default", logits, target, out=())
    graph = builder.build()
    found = axis_strategies(graph.nodes[0], graph.specs(), size=4, batch=2)
    assert [str(s) for s in found][2:] == [
        "S(0), S(0) -> P(sum)",
        "S(1), R -> P(sum) [vocab_cross_entropy]",
    ]
    messages = [(c.op, c.phase, c.like_input, c.dtype) for c in found[3].collectives]
    assert messages == [(CollectiveOp.ALL_REDUCE, "forward", 1, "float32")] * 2


def test_vocabulary_that_leaves_a_rank_empty():
    found = strategies("aten.embedding.default", [spec(5, 4), spec(7, dtype="int64")], (7, 4))
    assert "S(0), R -> P(sum) [vocab_embedding]" in found


def test_layer_norm_keeps_the_normalised_dim_whole():
    found = strategies("aten.layer_norm.default", [spec("batch", 16, 64)], ("batch", 16, 64), (64,))
    assert found == [*REPLICATED[1], "S(0) -> S(0)", "S(1) -> S(1)"]


def test_partial_sums_pass_through_what_is_linear_only():
    shape = ("batch", 64)
    one, two = [spec(*shape)], [spec(*shape)] * 2
    linear = {
        "aten.neg.default": (one, (), "P(sum) -> P(sum)"),
        "aten.add.Tensor": (two, (), "P(sum), P(sum) -> P(sum)"),
        "aten.mul.Tensor": (two, (), "P(sum), R* -> P(sum)"),
        "aten.div.Tensor": (two, (), "P(sum), R* -> P(sum)"),
        "aten.sum.dim_IntList": (one, ((1,), True), "P(sum) -> P(sum)"),
        "aten.to.dtype": (one, ("dtype:float32",), "P(sum) -> P(sum)"),
    }
    for target, (inputs, args, expected) in linear.items():
        assert expected in strategies(target, inputs, shape, *args), target
    for target in ("aten.gelu.default", "aten.softmax.int", "aten.cumprod.default"):
        assert not any("P(sum)" in text for text in strategies(target, one, shape, 1)), target
    # a number added on every rank would count once per rank
    assert not any("P(sum)" in text for text in strategies("aten.add.Tensor", one, shape, 1.0))
    assert "P(sum) -> P(sum)" in strategies("aten.mul.Tensor", one, shape, 2.0)
    assert not any("R*, P" in text for text in strategies("aten.div.Tensor", two, shape))


def test_truth_values_are_never_partial():
    bools = spec(8, dtype="bool")
    out = spec(8, dtype="bool")
    assert not any("P(" in t for t in strategies("aten.clone.default", [bools], out))


def test_dropout_has_its_kernel_and_no_partial_sums():
    active = strategies("aten.dropout.default", [spec("batch", 64)], ("batch", 64), 0.1, True)
    assert active == [
        "R -> R [dropout]",
        "R* -> R* [dropout]",
        "S(0) -> S(0) [dropout]",
        "S(1) -> S(1) [dropout]",
    ]
    inactive = strategies("aten.dropout.default", [spec("batch", 64)], ("batch", 64), 0.1, False)
    assert "P(sum) -> P(sum)" in inactive


def test_means():
    shape = spec("batch", 16, 64)
    hidden = strategies("aten.mean.dim", [shape], ("batch", 16, 1), (-1,), True)
    assert "S(0) -> S(0)" in hidden
    assert "S(2) -> P(sum) [partial_mean]" in hidden
    full = strategies("aten.mean.default", [shape], ())
    assert "S(0) -> P(sum) [partial_mean]" in full


def test_argmax_splits_the_dims_it_keeps():
    found = strategies("aten.argmax.default", [spec(8, 12)], spec(12, dtype="int64"), 0)
    assert found == ["R -> R", "R* -> R", "S(1) -> S(0)"]


def test_convolution_splits_samples_and_channels_but_not_the_image():
    shapes = [spec("batch", 8, 32, 32), spec(16, 8, 3, 3)]
    found = strategies("aten.conv2d.default", shapes, ("batch", 16, 30, 30))
    assert found == [
        *REPLICATED[2],
        "S(0), R* -> S(0)",
        "S(1), S(1) -> P(sum)",
        "R*, S(0) -> S(1)",
    ]


def test_grouped_convolution_splits_whole_groups():
    shapes = [spec("batch", 8, 32), spec(16, 2, 3)]
    args = (None, (1,), (0,), (1,), 4)
    target = "aten.conv1d.default"
    assert "S(1), S(0) -> S(1)" in strategies(target, shapes, ("batch", 16, 30), *args, size=4)
    assert "S(1), S(0) -> S(1)" not in strategies(target, shapes, ("batch", 16, 30), *args, size=8)


def test_batch_norm_in_training_mixes_samples():
    shapes = [spec("batch", 8, 4), spec(8), spec(8), spec(8), spec(8)]
    target = "aten.batch_norm.default"
    training = strategies(target, shapes, ("batch", 8, 4), True)
    assert training[2:] == ["S(1), S(0), S(0), S(0), S(0) -> S(1)"]
    assert "S(0), R*, R*, R*, R* -> S(0)" in strategies(target, shapes, ("batch", 8, 4), False)


def test_batch_norm_with_state_sums_over_any_dim_but_the_channels():
    shapes = [spec("batch", 8, 12), spec(8), spec(8), spec(8), spec(8), spec(dtype="int64")]
    target = "autopar.batch_norm.default"
    found = strategies(target, shapes, ("batch", 8, 12), 0.1, 1e-5)
    assert found[2:] == [
        "S(0), R*, R*, R*, R*, R -> S(0) [batch_norm]",
        "S(1), S(0), S(0), S(0), S(0), R -> S(1)",
        "S(2), R*, R*, R*, R*, R -> S(2) [batch_norm]",
    ]


def test_an_op_without_rule_is_replicated_only():
    assert strategies("mylib.unknown.default", [spec(8, 12)], (8, 12)) == REPLICATED[1]


def test_strategies_are_distinct_and_deterministic():
    args = ("aten.mul.Tensor", [spec("batch", 8, 8)] * 2, ("batch", 8, 8))
    first = strategies(*args)
    assert first == strategies(*args)
    assert len(set(first)) == len(first)


def test_a_tensor_read_twice_has_two_placements():
    builder = Builder()
    x = builder.input("x", 8, 8)
    builder.op("square", "aten.mm.default", x, x, out=(8, 8))
    graph = builder.build()
    found = axis_strategies(graph.nodes[0], {Ref("x"): spec(8, 8)}, size=2, batch=1)
    assert "S(1), S(0) -> P(sum)" in [str(s) for s in found]


def test_attention_heads_split_into_equal_parts_only():
    target = "aten.scaled_dot_product_attention.default"
    shape = ("batch", 5, 16, 8)
    found = strategies(target, [spec(*shape)] * 3, shape, None, 0.0, True, size=2)
    assert found[2:] == ["S(0), S(0), S(0) -> S(0)", "S(2), R*, R* -> S(2) [causal_rows]"]
