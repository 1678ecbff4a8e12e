"""What a batch may be, where the loss comes from, and what the graph keeps of the output."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture, verify_capture
from autopar.errors import CaptureError
from autopar.ir.graph import OpGraph, Ref, SourceKind
from autopar.ir.size import Size


class Forward(nn.Module):
    """A linear layer, an embedding, and a forward given by the test."""

    def __init__(self, forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.run = forward

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def samples(n: int = 4) -> torch.Tensor:
    return torch.arange(n * 4, dtype=torch.float32).reshape(n, 4).sin()


def sources(graph: OpGraph, kind: SourceKind) -> list:
    return [source for source in graph.sources if source.kind is kind]


def test_keyword_batch_names_its_inputs_and_sizes_them_by_the_sample():
    model = Forward(lambda self, x, y: F.mse_loss(self.linear(x), y))
    captured = capture(model, {"x": samples(), "y": samples()})
    inputs = sources(captured.graph, SourceKind.INPUT)
    assert [(source.name, source.fqn) for source in inputs] == [("x", "x"), ("y", "y")]
    assert all(source.spec.shape == (Size(0, 1), Size(4)) for source in inputs)
    assert captured.graph.example_batch == 4


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_a_graph_holds_for_other_numbers_of_samples(count):
    model = Forward(lambda self, x: self.linear(x).view(-1, 2).softmax(-1).pow(2).mean())
    captured = capture(model, (samples(),))
    verify_capture(model, (samples(count),), captured)
    assert captured.graph.notes == ()


def test_one_sample_is_enough_to_capture():
    model = Forward(lambda self, x: self.linear(x).sum())
    captured = capture(model, (samples(1),))
    assert captured.graph.example_batch == 1
    assert captured.graph.nodes[0].outputs[0].shape == (Size(0, 1), Size(4))
    verify_capture(model, (samples(5),), captured)


def test_the_same_tensor_given_twice_stays_two_inputs():
    model = Forward(lambda self, x, y: F.mse_loss(self.linear(x), y))
    x = samples()
    captured = capture(model, (x, x))
    read = {ref.name for node in captured.graph.nodes for ref in node.inputs()}
    assert {"input_0", "input_1"} <= read
    verify_capture(model, (samples(), samples() + 1), captured)


def test_values_that_are_not_tensors_are_fixed_and_noted():
    def forward(self, x, mask=None, scale=1.0):
        return {"loss": (self.linear(x) * scale).sum(), "mask": mask}

    captured = capture(Forward(forward), {"x": samples(), "mask": None, "scale": 2.0})
    assert "batch entry scale is fixed to 2.0" in captured.graph.notes
    assert 2.0 in captured.graph.nodes[1].args


def test_a_model_on_the_meta_device_is_captured_alike():
    model = Forward(lambda self, x: self.linear(x).sum())
    real = capture(model, (samples(),)).graph
    assert capture(model.to("meta"), (samples(),)).graph == real


def test_verify_needs_weights():
    model = Forward(lambda self, x: self.linear(x).sum()).to("meta")
    with pytest.raises(CaptureError, match="no weights"):
        verify_capture(model, (samples(),), capture(model, (samples(),)))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (samples(), "the batch is a Tensor"),
        ((samples()[:0],), "no samples"),
        ({"x": [samples()]}, "entry x is a list that holds tensors"),
    ],
)
def test_a_batch_that_cannot_be_used_is_refused(batch, message):
    with pytest.raises(CaptureError, match=message):
        capture(Forward(lambda self, x: self.linear(x).sum()), batch)


def test_output_structure_is_kept():
    def forward(self, x):
        h = self.linear(x)
        return {"loss": h.sum(), "h": h, "again": h, "pair": (h.relu(), [1, None]), "n": 2.5}

    graph = capture(Forward(forward), (samples(),)).graph
    assert json.loads(graph.output_tree) == {
        "loss": {"$loss": True},
        "h": {"$output": 0},
        "again": {"$output": 0},
        "pair": {"$tuple": [{"$output": 1}, [1, None]]},
        "n": 2.5,
    }
    assert graph.outputs == (Ref("linear"), Ref("relu"))


def test_an_output_that_is_no_data_is_dropped_with_a_note():
    def forward(self, x):
        return {"loss": self.linear(x).sum(), "cache": object()}

    graph = capture(Forward(forward), (samples(),)).graph
    assert json.loads(graph.output_tree)["cache"] == {"$dropped": "object"}
    assert "output.cache (object) is not returned" in graph.notes


def test_a_scalar_output_is_the_loss():
    graph = capture(Forward(lambda self, x: self.linear(x).sum()), (samples(),)).graph
    assert (graph.output_tree, graph.outputs) == ('{"$loss": true}', ())


def test_a_loss_function_is_given_output_and_batch():
    model = Forward(lambda self, x: self.linear(x))

    def loss_fn(output, batch):
        return F.mse_loss(output, batch["x"])

    captured = capture(model, {"x": samples()}, loss_fn=loss_fn)
    assert captured.graph.outputs == (Ref("linear"),)
    verify_capture(model, {"x": samples(3)}, captured, loss_fn)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda h: {"logits": h}, "dict with keys logits without a loss.*loss_fn"),
        (lambda h: h, "tensor of shape .* without a loss"),
        (lambda h: {"loss": h}, "expected a floating scalar"),
        (lambda h: {"loss": h.detach().sum()}, "does not depend on any trainable parameter"),
    ],
)
def test_a_missing_or_unusable_loss_is_refused(output, message):
    with pytest.raises(CaptureError, match=message):
        capture(Forward(lambda self, x: output(self.linear(x))), (samples(),))


def test_tied_parameters_are_one_source():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.embedding(ids)).pow(2).mean()

    ids = torch.tensor([[1, 2], [3, 4]])
    captured = capture(Tied(), {"ids": ids})
    (weight,) = sources(captured.graph, SourceKind.PARAMETER)
    assert (weight.fqn, weight.tied) == ("embedding.weight", ("head.weight",))
    readers = [n.op for n in captured.graph.nodes if Ref(weight.name) in n.inputs()]
    assert readers == ["aten.embedding", "aten.linear"]
    verify_capture(Tied(), {"ids": ids}, captured)


def test_unused_parameters_and_buffers_stay_sources():
    model = Forward(lambda self, x: self.linear(x).sum())
    model.spare = nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(3))
    graph = capture(model, (samples(),)).graph
    names = [s.fqn for s in graph.sources if s.kind is not SourceKind.INPUT]
    assert names == ["linear.weight", "linear.bias", "spare.weight", "spare.bias", "table"]


def test_requires_grad_follows_trainable_parameters():
    def forward(self, x):
        with torch.no_grad():
            gate = self.linear(x).sigmoid()
        return (self.linear(x) * gate + self.linear(x).detach()).sum()

    captured = capture(Forward(forward), (samples(),))
    flags = {node.name: node.requires_grad for node in captured.graph.nodes}
    no_gradient = {name for name, flag in flags.items() if not flag}
    assert no_gradient == {"linear", "sigmoid", "detach"}
    verify_capture(Forward(forward), (samples(),), captured)


def test_frozen_parameters_take_no_gradient():
    model = Forward(lambda self, x: self.linear(self.linear(x)).sum())
    model.linear.weight.requires_grad_(False)
    captured = capture(model, (samples(),))
    trainable = {s.fqn: s.trainable for s in sources(captured.graph, SourceKind.PARAMETER)}
    assert trainable == {"linear.weight": False, "linear.bias": True}
    verify_capture(model, (samples(),), captured)
