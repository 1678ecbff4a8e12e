"""What torch.export drops, freezes or cannot trace: kept, or refused by name and line."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture, first_difference, verify_capture
from autopar.errors import CaptureError
from autopar.ir.graph import Ref
from autopar.ir.size import Size


class Model(nn.Module):
    """A linear layer, norm and buffer, and a forward given by the test."""

    def __init__(self, forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("counter", torch.zeros(4))
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


X = torch.arange(16, dtype=torch.float32).reshape(4, 4).sin()


class TimesTen(torch.autograd.Function):
    """Identity whose gradient is ten times too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 10 * gradient


def refusal(forward, prepare=lambda model: None) -> str:
    model = Model(forward)
    prepare(model)
    with pytest.raises(CaptureError) as caught:
        capture(model, (X,))
    return str(caught.value)


def captured_ops(forward) -> list[str]:
    """The ops of a capture that was verified, at its own and at another number of samples."""
    model = Model(forward)
    captured = capture(model, (X,))
    verify_capture(model, (X,), captured)
    verify_capture(model, (X[:3],), captured)
    return [node.op.removeprefix("aten.") for node in captured.graph.nodes]


def test_a_custom_function_is_refused_by_name_and_line():
    message = refusal(lambda self, x: TimesTen.apply(self.linear(x)).sum())
    assert "autograd.Function TimesTen would lose its backward" in message
    assert re.match(r"test_capture_traps\.py:\d+: ", message)
    assert "torch.library.custom_op" in message


def test_torch_is_as_before_after_a_refusal():
    apply, register_hook = torch.autograd.Function.apply, torch.Tensor.register_hook
    refusal(lambda self, x: TimesTen.apply(self.linear(x)).sum())
    assert torch.autograd.Function.apply == apply
    assert torch.Tensor.register_hook is register_hook
    x = torch.ones(1, requires_grad=True)
    TimesTen.apply(x).backward()
    assert x.grad == 10


def test_a_custom_op_with_a_registered_gradient_is_kept():
    @torch.library.custom_op("autopar_test::tenfold", mutates_args=())
    def tenfold(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    tenfold.register_fake(torch.empty_like)
    tenfold.register_autograd(lambda ctx, gradient: 10 * gradient)
    model = Model(lambda self, x: tenfold(self.linear(x)).sum())
    captured = capture(model, (X,))
    assert captured.graph.nodes[1].target == "autopar_test.tenfold.default"
    verify_capture(model, (X,), captured)


def test_gradient_hooks_are_refused():
    def hooked(self, x):
        h = self.linear(x)
        h.register_hook(lambda gradient: 2 * gradient)
        return h.sum()

    assert "gradient hook" in refusal(hooked)
    message = refusal(
        lambda self, x: self.linear(x).sum(),
        lambda model: model.linear.register_full_backward_hook(lambda *_: None),
    )
    assert "module linear has a backward hook" in message


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_inside_the_model_is_noted_and_changes_nothing(use_reentrant):
    def forward(self, x):
        h = self.linear(x)
        return checkpoint(self.linear, h, use_reentrant=use_reentrant).sum()

    model = Model(forward)
    captured = capture(model, (X,))
    assert any("checkpointing" in note for note in captured.graph.notes)
    verify_capture(model, (X,), captured)


def test_control_flow_on_data_is_refused_with_its_line(capfd):
    def forward(self, x):
        h = self.linear(x)
        if h.sum() > 0:
            h = 2 * h
        return h.sum()

    message = refusal(forward)
    line = forward.__code__.co_firstlineno + 2
    assert message.startswith(f"test_capture_traps.py:{line}: ")
    assert "torch.where" in message
    assert capfd.readouterr() == ("", "")  # torch's own dump of the graph is held back


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.linear(x)[x[:, 0] > 0].sum(),
        lambda self, x: self.linear(x)[: (x > 0).sum().item()].sum(),
        lambda self, x: self.linear(x).index_select(0, x[:, 0].nonzero().squeeze(1)).sum(),
    ],
)
def test_sizes_that_depend_on_data_are_refused(forward):
    message = refusal(forward)
    assert message.startswith("test_capture_traps.py:")
    assert "depends on the values of a tensor" in message


def test_a_failing_model_is_reported_with_its_line_and_nothing_else(capfd):
    message = refusal(lambda self, x: self.linear(x) @ torch.zeros(7, 7))
    assert re.match(
        r"test_capture_traps\.py:\d+: the model cannot be traced: RuntimeError", message
    )
    assert "\n" not in message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: self.linear(x).view(2, -1).sum(), "not proportional to the batch"),
        (lambda self, x: self.linear(x).sum() * (2 if x.shape[0] > 3 else 1), "branches"),
        (lambda self, x: self.linear(x).sum() / x.shape[0] ** 0.5, "calculates a number"),
        (lambda self, x: (self.linear(x) + torch.ones(4, 1)).sum(), "fixes its batch size"),
    ],
)
def test_a_graph_that_holds_for_one_batch_size_says_so(forward, reason):
    model = Model(forward)
    captured = capture(model, (X,))
    (note,) = captured.graph.notes
    assert note.startswith("batch size is fixed to 4: ")
    assert reason in note
    assert not any(s.is_batch for n in captured.graph.nodes for s in n.outputs[0].shape)
    verify_capture(model, (X,), captured)


def test_a_batch_that_equals_another_size_of_the_model_is_not_taken_for_it():
    def forward(self, x):
        # a guard on batch == 4 holds for the example and for it alone
        return self.linear(x).sum() * (2 if x.shape[0] == x.shape[1] else 1)

    captured = capture(Model(forward), (X,))
    assert captured.graph.notes == ()
    assert captured.graph.nodes[0].outputs[0].shape == (Size(0, 1), Size(4))


def test_arithmetic_with_the_batch_size_stays_symbolic():
    model = Model(lambda self, x: self.linear(x).sum() / x.shape[0])
    captured = capture(model, (X,))
    assert captured.graph.nodes[-1].args[1] == Size(0, 1)
    assert captured.graph.notes == ()
    verify_capture(model, (X[:3],), captured)


def test_in_place_ops_become_new_values():
    def forward(self, x):
        h = self.linear(x)
        h += 1
        h = F.relu(h, inplace=True)
        return h.mul(2).add_(x).sum()

    assert captured_ops(forward) == ["linear", "add", "relu", "mul", "add", "sum"]


def test_writes_through_views_are_put_back_into_their_base():
    def forward(self, x):
        wide = x.new_zeros(x.shape[0], 6)
        wide[:, 1:5] = self.linear(x)
        wide[:, 0] = 3.0
        return (wide**2).sum()

    ops = captured_ops(forward)
    assert "slice_scatter" in ops
    assert "select_scatter" in ops


def test_in_place_random_ops_are_kept():
    def forward(self, x):
        mask = x.new_empty(x.shape).bernoulli_(0.5).div_(0.5)
        return (self.linear(x) * mask).sum()

    assert captured_ops(forward) == ["new_empty", "bernoulli", "div", "linear", "mul", "sum"]


def stale_view(self, x):
    h = self.linear(x)
    flat = h.view(-1)
    h.add_(1)
    return h.sum() + flat.pow(2).sum()


def write_to_input(self, x):
    x.add_(1)
    return self.linear(x).sum()


def write_to_buffer(self, x):
    self.counter.add_(x.sum())
    return (self.linear(x) + self.counter).sum()


def count_without_norm(self, x):
    self.norm.num_batches_tracked.add_(1)
    return self.linear(x).sum()


def count_by_two(self, x):
    self.norm.num_batches_tracked.add_(2)
    return self.norm(self.linear(x)).sum()


def count_and_read(self, x):
    self.norm.num_batches_tracked.add_(1)
    return (self.norm(self.linear(x)) * self.norm.num_batches_tracked).sum()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (stale_view, "aten.add_.Tensor writes to a tensor that view also views"),
        (write_to_input, "aten.add_.Tensor writes to input 0"),
        (write_to_buffer, "aten.add_.Tensor writes to buffer counter"),
        (count_without_norm, "aten.add_.Tensor writes to a buffer"),
        (count_by_two, "aten.add_.Tensor writes to buffer norm.num_batches_tracked"),
        (count_and_read, "aten.add_.Tensor writes to buffer norm.num_batches_tracked"),
    ],
)
def test_writes_that_others_would_see_are_refused(forward, message):
    found = refusal(forward)
    assert found.startswith("test_capture_traps.py:")
    assert re.search(message, found)


def test_a_batch_norm_in_training_takes_its_state_along():
    """One op with the counter, though two norms of one module run; the same graph in eval mode."""

    def forward(self, x):
        return (self.norm(self.linear(x)) * self.norm(x)).pow(2).sum()

    model = Model(forward)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    captured = capture(model, (X,))
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    norms = [node for node in captured.graph.nodes if node.op == "autopar.batch_norm"]
    assert [len(node.inputs()) for node in norms] == [6, 6]
    assert norms[0].args[3:] == (
        *(Ref(f"b_norm_{name}") for name in ("running_mean", "running_var", "num_batches_tracked")),
        *(0.1, 1e-5),
    )
    verify_capture(model, (X,), captured)
    assert first_difference(captured.graph, capture(model.eval(), (X,)).graph) is None


def test_a_cumulative_average_is_refused():
    def prepare(model):
        model.norm.momentum = None

    message = refusal(lambda self, x: self.norm(self.linear(x)).sum(), prepare)
    assert message.startswith("module norm: BatchNorm1d has momentum None")
    model = Model(lambda self, x: self.norm(self.linear(x)).sum())
    prepare(model)
    assert capture(model.eval(), (X,)).graph.loss is not None


def test_batch_norm_statistics_that_are_no_buffers_are_refused():
    message = refusal(
        lambda self, x: (
            F.batch_norm(x, self.counter, self.counter + 1, training=True).sum()
            + self.linear(x).sum()
        )
    )
    assert "updates its running statistics" in message


def test_a_norm_in_eval_mode_is_kept():
    model = Model(lambda self, x: self.norm(self.linear(x)).pow(2).sum()).eval()
    captured = capture(model, (X,))
    verify_capture(model, (X,), captured)


def test_autocast_is_refused_where_it_changes_dtypes():
    def inside(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.linear(x)
        return h.float().sum()

    message = refusal(inside)
    assert message.startswith("test_capture_traps.py:")
    assert "torch.autocast('cpu', torch.bfloat16) inside the model" in message
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "capture runs under torch.autocast" in refusal(lambda self, x: self.linear(x).sum())


def test_autocast_switched_off_is_inlined():
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            h = self.linear(x) * 2
        return h.sum()

    assert captured_ops(forward) == ["linear", "mul", "sum"]


def test_literal_tensors_are_constants_with_values():
    model = Model(lambda self, x: (self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum())
    captured = capture(model, (X,))
    (value,) = captured.constants.values()
    assert value.tolist() == [1, 2, 3, 4]
    verify_capture(model, (X,), captured)
