"""Splitting the samples: one strategy per node, sums over the batch, and what cannot be split."""

from rule_graphs import Builder, spec

from autopar.rules import batch_axis


def _language_model(b, hidden):
    """A head and the loss over valid labels as capture writes it."""
    labels = b.input("labels", "batch", 16, dtype="int64")
    weight = b.parameter("head", 50, 8)
    logits = b.op("logits", "aten.linear.default", hidden, weight, out=("batch", 16, 50))
    flat = b.op("flat", "aten.view.default", logits, out=("16*batch", 50))
    target = b.op("target", "aten.view.default", labels, out=spec("16*batch", dtype="int64"))
    total = b.op("total", "autopar.cross_entropy_sum.default", flat, target, -100, 0.0, out=())
    count = b.op("count", "autopar.count_valid.default", target, -100, out=())
    return b.op("loss", "aten.div.Tensor", total, count, out=())


def _texts(axis):
    return {name: str(strategy) for name, strategy in axis.strategies.items()}


def test_language_model_loss_is_a_sum_and_its_count_is_set_up_first():
    b = Builder()
    ids = b.input("ids", "batch", 16, dtype="int64")
    table = b.parameter("table", 50, 8)
    hidden = b.op("embed", "aten.embedding.default", table, ids, out=("batch", 16, 8))
    axis = batch_axis(b.build(_language_model(b, hidden)))
    assert axis.coupled == ()
    assert axis.setup_sums == ("count",)
    assert _texts(axis) == {
        "embed": "R*, S(0) -> S(0)",
        "logits": "S(0), R* -> S(0)",
        "flat": "S(0) -> S(0)",
        "target": "S(0) -> S(0)",
        "total": "S(0), S(0) -> P(sum)",
        "count": "S(0) -> P(sum)",
        "loss": "P(sum), R* -> P(sum)",
    }


def test_a_mean_over_the_batch_is_partial():
    b = Builder()
    x = b.input("x", "batch", 4)
    loss = b.op("loss", "aten.mean.default", x, out=())
    assert _texts(batch_axis(b.build(loss))) == {"loss": "S(0) -> P(sum) [partial_mean]"}


def test_values_of_parameters_alone_keep_their_gradient_partial():
    b = Builder()
    x = b.input("x", "batch", 4)
    scale, table = b.parameter("scale", 4), b.buffer("table", 4)
    doubled = b.op("doubled", "aten.mul.Tensor", scale, 2.0, out=(4,))
    wave = b.op("wave", "aten.cos.default", table, out=(4,))
    both = b.op("both", "aten.mul.Tensor", doubled, wave, out=(4,))
    y = b.op("y", "aten.mul.Tensor", x, both, out=("batch", 4))
    loss = b.op("loss", "aten.sum.default", y, out=())
    texts = _texts(batch_axis(b.build(loss)))
    assert texts["doubled"] == "R* -> R*"
    assert texts["wave"] == "R -> R"
    assert texts["both"] == "R*, R* -> R*"
    assert texts["y"] == "S(0), R* -> S(0)"


def test_tensors_of_batch_shape_from_nothing_are_split():
    b = Builder()
    x = b.input("x", "batch", 4)
    table = b.buffer("table", 1, 4)
    b.op("zeros", "aten.zeros.default", (), out=("batch", 4))
    like = b.op("like", "aten.new_zeros.default", x, (), out=("batch", 7))
    wide = b.op("wide", "aten.expand.default", table, (), out=("batch", 4))
    kept = b.op("kept", "aten.cat.default", (x, wide), 1, out=("batch", 8))
    both = b.op("both", "aten.cat.default", (kept, like), 1, out=("batch", 15))
    b.op("scalar", "aten.new_ones.default", x, (), out=())
    axis = batch_axis(b.build(b.op("loss", "aten.sum.default", both, out=())))
    assert axis.coupled == ()
    texts = _texts(axis)
    assert texts["zeros"] == " -> S(0)"
    assert texts["like"] == "S(0) -> S(0)"
    assert texts["wide"] == "R* -> S(0)"
    assert texts["scalar"] == "S(0) -> R"


def test_a_sum_of_the_batch_used_nonlinearly_is_set_up_if_it_is_data():
    b = Builder()
    x = b.input("x", "batch", 4)
    weights = b.input("weights", "batch")
    total = b.op("total", "aten.sum.default", weights, out=())
    doubled = b.op("doubled", "aten.mul.Tensor", total, 2.0, out=())
    floor = b.op("floor", "aten.clamp_min.default", doubled, 1.0, out=())
    loss = b.op("sum", "aten.sum.default", x, out=())
    axis = batch_axis(b.build(b.op("loss", "aten.div.Tensor", loss, floor, out=())))
    assert axis.coupled == ()
    assert axis.setup_sums == ("doubled",)
    assert _texts(axis)["floor"] == "R -> R"


def test_a_sum_of_the_batch_used_nonlinearly_is_coupled_if_it_has_parameters():
    b = Builder()
    x, w = b.input("x", "batch", 4), b.parameter("w", 4)
    y = b.op("y", "aten.mul.Tensor", x, w, out=("batch", 4))
    total = b.op("total", "aten.sum.default", y, out=())
    b.op("loss", "aten.exp.default", total, out=())
    from autopar.ir.graph import Ref

    axis = batch_axis(b.build(Ref("loss")))
    assert [name for name, _ in axis.coupled] == ["loss"]
    assert "depends on a parameter" in axis.coupled[0][1]


def test_mixing_samples_is_named_once_where_it_happens():
    b = Builder()
    x, w = b.input("x", "batch", 4), b.parameter("w", 4)
    y = b.op("y", "aten.mul.Tensor", x, w, out=("batch", 4))
    z = b.op("mix", "aten.softmax.int", y, 0, out=("batch", 4))
    z = b.op("after", "aten.exp.default", z, out=("batch", 4))
    axis = batch_axis(b.build(b.op("loss", "aten.sum.default", z, out=())))
    assert [name for name, _ in axis.coupled] == ["mix"]
    assert set(_texts(axis).values()) == {"R -> R", "R, R -> R"}


def test_pairs_of_samples_are_coupled():
    b = Builder()
    x = b.input("x", "batch", 4)
    t = b.op("t", "aten.t.default", x, out=(4, "batch"))
    z = b.op("pairs", "aten.mm.default", x, t, out=("batch", "batch"))
    axis = batch_axis(b.build(b.op("loss", "aten.sum.default", z, out=())))
    assert [name for name, _ in axis.coupled] == ["pairs"]


def test_a_loss_that_ignores_the_samples():
    b = Builder()
    b.input("x", "batch", 4)
    w = b.parameter("w", 4)
    axis = batch_axis(b.build(b.op("loss", "aten.sum.default", w, out=())))
    assert axis.coupled == (("loss", "the loss is not a sum or mean over the samples"),)
    assert _texts(axis) == {"loss": "R -> R"}


def _rows(b, shape):
    from autopar.ir.size import Size

    rows = b.op("rows", "aten.arange.default", Size(0, 1), out=spec("batch", dtype="int64"))
    return b.op("column", "aten.view.default", rows, (), out=spec(*shape, dtype="int64"))


def test_row_numbers_may_pick_each_samples_own_row():
    b = Builder()
    x = b.input("x", "batch", 16)
    column = _rows(b, ("batch", 1))
    places = b.op("places", "aten.arange.default", 16, out=spec(16, dtype="int64"))
    picked = b.op("picked", "aten.index.Tensor", x, (column, places), out=("batch", 16))
    axis = batch_axis(b.build(b.op("loss", "aten.sum.default", picked, out=())))
    assert axis.coupled == ()
    assert _texts(axis)["picked"] == "S(0), S(0), R -> S(0)"


def test_row_numbers_as_data_are_coupled():
    b = Builder()
    x = b.input("x", "batch", 16)
    column = _rows(b, ("batch", 1))
    shifted = b.op("shifted", "aten.add.Tensor", x, column, out=("batch", 16))
    axis = batch_axis(b.build(b.op("loss", "aten.sum.default", shifted, out=())))
    assert [name for name, _ in axis.coupled] == ["shifted"]


def test_row_numbers_into_a_table_are_coupled():
    b = Builder()
    b.input("x", "batch", 16)
    table = b.buffer("table", 100, 16)
    column = _rows(b, ("batch",))
    picked = b.op("picked", "aten.index.Tensor", table, (column,), out=("batch", 16))
    axis = batch_axis(b.build(b.op("loss", "aten.sum.default", picked, out=())))
    assert [name for name, _ in axis.coupled] == ["picked"]


def test_row_numbers_of_samples_into_more_rows_are_coupled():
    b = Builder()
    x = b.input("x", "2*batch", 16)
    column = _rows(b, ("batch",))
    picked = b.op("picked", "aten.index.Tensor", x, (column,), out=("batch", 16))
    axis = batch_axis(b.build(b.op("loss", "aten.sum.default", picked, out=())))
    assert [name for name, _ in axis.coupled] == ["picked"]


def _interleaved(b, source):
    """(seq, batch, 8) flattened with samples inside positions, as nn.MultiheadAttention does."""
    x = b.input("x", "batch", 6, 8)
    first = b.op("first", "aten.transpose.int", x, 0, 1, out=(6, "batch", 8))
    return b.op(source, "aten.view.default", first, (), out=("6*batch", 8))


def test_samples_inside_another_factor_pass_through():
    b = Builder()
    flat, w = _interleaved(b, "flat"), b.parameter("w", 8, 8)
    y = b.op("y", "aten.linear.default", flat, w, out=("6*batch", 8))
    back = b.op("back", "aten.view.default", y, (), out=(6, "batch", 8))
    axis = batch_axis(b.build(b.op("loss", "aten.sum.default", back, out=())))
    assert axis.coupled == ()
    texts = _texts(axis)
    assert texts["flat"] == "S(1) -> S(0)"
    assert texts["y"] == "S(0), R* -> S(0)"
    assert texts["back"] == "S(0) -> S(1)"


def test_samples_inside_and_outside_do_not_meet():
    b = Builder()
    inside = _interleaved(b, "inside")
    z = b.input("z", "batch", 6, 8)
    outside = b.op("outside", "aten.view.default", z, (), out=("6*batch", 8))
    both = b.op("both", "aten.add.Tensor", inside, outside, out=("6*batch", 8))
    axis = batch_axis(b.build(b.op("loss", "aten.sum.default", both, out=())))
    assert [name for name, _ in axis.coupled] == ["both"]


def test_interleaved_samples_are_neither_dropped_out_nor_returned():
    b = Builder()
    flat = _interleaved(b, "flat")
    dropped = b.op("drop", "aten.dropout.default", flat, 0.1, True, out=("6*batch", 8))
    loss = b.op("loss", "aten.sum.default", dropped, out=())
    axis = batch_axis(b.build(loss, flat))
    assert [name for name, _ in axis.coupled] == ["drop", "flat"]


def test_a_tensor_with_two_batch_dims_is_coupled():
    """Locally both dims would shrink."""
    b = Builder()
    x = b.input("x", "batch", 1)
    wide = b.op("wide", "aten.expand.default", x, (), out=("batch", "batch"))
    axis = batch_axis(b.build(b.op("loss", "aten.sum.default", wide, out=())))
    assert [name for name, _ in axis.coupled] == ["wide"]


def test_equal_nodes_with_different_numbers_are_told_apart():
    """Strategies are remembered by op and arguments: dim 0 must not pass for dim 1."""
    b = Builder()
    y = b.input("y", "batch", 4)
    b.op("inner", "aten.sum.dim_IntList", y, (1,), out=("batch",))
    b.op("outer", "aten.sum.dim_IntList", y, (0,), out=(4,))
    b.op("kept", "aten.dropout.default", y, 0.5, False, out=("batch", 4))
    b.op("drop", "aten.dropout.default", y, 0.5, True, out=("batch", 4))
    loss = b.op("loss", "aten.sum.default", y, out=())
    texts = _texts(batch_axis(b.build(loss)))
    assert texts["inner"] == "S(0) -> S(0)"
    assert texts["outer"] == "S(0) -> P(sum)"
    assert texts["kept"] == "S(0) -> S(0)"
    assert texts["drop"] == "S(0) -> S(0) [dropout]"
