"""Repeated modules are traced once where that is provably the same, and else each by itself."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture, verify_capture

HIDDEN, LAYERS = 4, 8
X = torch.arange(24.0).reshape(2, 3, HIDDEN) / 10
EVERY = LAYERS
"""Traces where nothing is shared."""


class Layer(nn.Module):
    """A feed-forward with a residual: one `up` for each call that is traced."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.up, self.down = nn.Linear(HIDDEN, 8), nn.Linear(8, HIDDEN, bias=False)
        self.drop = nn.Dropout(0.0)

    def forward(self, x, *args, **kwargs):
        return x + self.down(self.drop(F.gelu(self.up(self.before(x, *args, **kwargs)))))

    def before(self, x, *args, **kwargs):
        return x


class Stack(nn.Module):
    """Layers called by `call(self, i, layer, x)`; the loss is the sum of squares."""

    def __init__(self, make, call=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(i) for i in range(LAYERS))
        self.call = call
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        x = x + self.shift
        for i, layer in enumerate(self.layers):
            x = layer(x) if self.call is None else self.call(self, i, layer, x)
        return x.square().sum()


@pytest.fixture
def traces(monkeypatch):
    """Counts the forwards of linear layers that run, by their number of outputs."""
    counts: Counter[int] = Counter()
    forward = nn.Linear.forward

    def counted(self, x):
        counts[self.out_features] += 1
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    return counts


def both(build, traces, *batch):
    """The graph, how many layers were traced for it, and that all of them give the same."""
    torch.manual_seed(0)
    model = build()
    captured = capture(model, batch or (X,))
    count = traces[8]
    torch.manual_seed(0)
    whole = capture(build(), batch or (X,), every_call=True)
    assert captured.graph == whole.graph
    assert list(captured.constants) == list(whole.constants)
    return captured.graph, count


def test_equal_layers_are_traced_once(traces):
    graph, count = both(lambda: Stack(Layer), traces)
    assert count == 1
    ups = [node for node in graph.nodes if node.module_path.endswith(".up")]
    assert [node.module_path for node in ups] == [f"layers.{i}.up" for i in range(LAYERS)]
    assert [node.args[1].name for node in ups] == [f"p_layers_{i}_up_weight" for i in range(LAYERS)]
    assert len({node.name for node in graph.nodes}) == len(graph.nodes)


def test_what_is_shared_computes_what_the_model_does():
    model = Stack(Layer)
    verify_capture(model, (X,), capture(model, (X,)))


class Reads(Layer):
    def before(self, x):
        return x * self.index


class ReadsSometimes(Layer):
    def before(self, x, cache=None):
        return x if cache is None else x * self.index


class ReadsAll(Layer):
    def before(self, x):
        return x * sum(v for k, v in vars(self).items() if k == "index")


def of_seven(change):
    """Layers of which the eighth is changed."""

    def make(i):
        layer = Layer()
        if i == 7:
            change(layer)
        return layer

    return make


def frozen(layer):
    layer.up.weight.requires_grad_(False)


def hooked(layer):
    layer.up.register_forward_hook(lambda module, args, output: output * 2)


def patched(layer):
    layer.before = lambda x: x * 2


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (ReadsSometimes, 1),
        (Reads, EVERY),
        (ReadsAll, EVERY),
        (of_seven(lambda layer: setattr(layer.drop, "p", 0.5)), 2),
        (of_seven(lambda layer: setattr(layer, "unused", object())), 1),
        (of_seven(lambda layer: setattr(layer, "up", nn.Linear(HIDDEN, 8, bias=False))), 2),
        (of_seven(frozen), 2),
        (of_seven(hooked), 2),
        (of_seven(patched), 2),
        (of_seven(lambda layer: layer.drop.eval()), 2),
    ],
)
def test_an_attribute_counts_if_it_is_read(make, count, traces):
    assert both(lambda: Stack(make), traces)[1] == count


def test_each_layer_draws_its_own_random_numbers(traces):
    def make(i):
        layer = Layer()
        layer.drop.p = 0.25
        return layer

    graph, count = both(lambda: Stack(make), traces)
    assert count == 1
    drops = [node for node in graph.nodes if node.op == "aten.dropout"]
    assert len(drops) == LAYERS
    model = Stack(make)
    verify_capture(model, (X,), capture(model, (X,)))


def tie(model, first, other):
    model.layers[other].up.weight = model.layers[first].up.weight
    return model


def test_tied_layers_read_the_same_weight(traces):
    graph, count = both(lambda: tie(Stack(Layer), 1, 5), traces)
    assert count == 1
    ups = [node.args[1].name for node in graph.nodes if node.module_path.endswith(".up")]
    assert ups[1] == ups[5] == "p_layers_1_up_weight"


class Square(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        if tied:
            self.down.weight = self.up.weight

    def forward(self, x):
        return self.down(torch.tanh(self.up(x * 2))) + x


def test_a_tie_within_a_layer_makes_it_another(traces):
    x = torch.ones(2, 8)
    graph, count = both(lambda: Stack(lambda i: Square(i == 7)), traces, x)
    assert count == 2 * 2  # two of them, with two linear layers each
    last = [node.args[1].name for node in graph.nodes if node.op == "aten.linear"][-2:]
    assert last[0] == last[1]


def test_a_layer_called_again_is_traced_again_once(traces):
    def again(stack, i, layer, x):
        return stack.layers[0](x)

    graph, count = both(lambda: Stack(Layer, again), traces)
    assert count <= 2
    assert len({node.args[1] for node in graph.nodes if node.module_path.endswith(".up")}) == 1


def test_a_layer_under_two_names_keeps_both_paths(traces):
    def build():
        model = Stack(Layer)
        model.layers[3] = model.layers[1]
        return model

    graph, count = both(build, traces)
    assert count <= 2
    paths = [node.module_path for node in graph.nodes if node.module_path.endswith(".up")]
    assert len(paths) == LAYERS


def skipped(stack, i, layer, x):
    stack.kept = x if i == 0 else stack.kept
    return layer(x + stack.kept if i == 5 else x)


def toggled(stack, i, layer, x):
    layer.drop.p = 0.5 if i % 2 else 0.0
    return layer(x)


def without_gradient(stack, i, layer, x):
    if i != 2:
        return layer(x)
    with torch.no_grad():
        return layer(x)


def in_place(stack, i, layer, x):
    return layer(x).add_(1)


def given_a_list(stack, i, layer, x):
    return layer(x, [1, {"a": (2, None)}])


def given_its_index(stack, i, layer, x):
    return layer(x, i)


def given_the_same_twice(stack, i, layer, x):
    return layer(x, x if i == 4 else x * 1)


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (skipped, 1),
        (toggled, 2),
        (without_gradient, 3),  # what follows no longer has a gradient
        (in_place, 2),
        (given_a_list, 1),
        (given_the_same_twice, 2),
    ],
)
def test_calls_are_told_apart_by_what_they_are_given(call, count, traces):
    assert both(lambda: Stack(Layer, call), traces)[1] <= count


def test_other_arguments_are_other_calls(traces):
    assert both(lambda: Stack(Layer, given_its_index), traces)[1] == EVERY


COUNTS, TOTAL = [0], 0
SETTINGS = SimpleNamespace(scale=1)
DRAW = random.Random(0)
NUMBERS = itertools.count()


class CountsItself(Layer):
    def before(self, x):
        self.index += 1
        return x * self.index


class KeepsResult(Layer):
    def before(self, x):
        self.last = x * 2
        return self.last


class CountsGlobally(Layer):
    def before(self, x):
        COUNTS[0] += 1
        return x * COUNTS[0]


class SetsGlobal(Layer):
    def before(self, x):
        global TOTAL  # noqa: PLW0603
        TOTAL += 1
        return x * TOTAL


class CountsInClass(Layer):
    calls = 0

    def before(self, x):
        type(self).calls += 1
        return x * self.calls


class CountsInDefault(Layer):
    def before(self, x, seen=[]):  # noqa: B006
        seen.append(1)
        return x * len(seen)


class Draws(Layer):
    def before(self, x):
        return x * random.random()


class DrawsOfItsOwn(Layer):
    def before(self, x):
        return x * DRAW.random()


class CountsWithIterator(Layer):
    def before(self, x):
        return x * next(NUMBERS)


class WritesToInput(Layer):
    def before(self, x):
        return x.mul_(2)


class ReturnsView(Layer):
    def forward(self, x):
        return super().forward(x), x[:1]


class Norm(Layer):
    def __init__(self, index=0):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def before(self, x):
        return self.norm(x)


class HasConstant(Layer):
    def before(self, x):
        return x * torch.tensor([2.0])


def closure():
    count = 0

    def function(x):
        nonlocal count
        count += 1
        return x * count

    class Counting(Layer):
        def before(self, x):
            return function(x)

    return Counting


@pytest.mark.parametrize(
    "kind",
    [CountsItself, KeepsResult, CountsGlobally, SetsGlobal, CountsInClass, CountsInDefault],
)
def test_a_call_that_leaves_something_behind_is_not_shared(kind, traces):
    def build():
        global TOTAL  # noqa: PLW0603
        COUNTS[0] = TOTAL = CountsInClass.calls = 0
        CountsInDefault.before.__defaults__[0].clear()
        return Stack(kind)

    assert both(build, traces)[1] == EVERY


@pytest.mark.parametrize("kind", [Draws, DrawsOfItsOwn, CountsWithIterator])
def test_a_call_that_differs_every_time_is_not_shared(kind, traces):
    def build():
        global NUMBERS  # noqa: PLW0603
        NUMBERS = itertools.count()
        random.seed(0)
        DRAW.seed(0)
        return Stack(kind)

    assert both(build, traces)[1] == EVERY


def test_a_counter_in_a_closure_is_seen(traces):
    assert both(lambda: Stack(closure()), traces)[1] == EVERY


def first(stack, i, layer, x):
    return layer(x)[0]


def test_calls_that_write_to_or_return_what_they_are_given_are_not_shared(traces):
    assert both(lambda: Stack(WritesToInput, lambda s, i, m, x: m(x * 1)), traces)[1] == EVERY
    traces.clear()
    assert both(lambda: Stack(ReturnsView, first), traces)[1] == EVERY


@pytest.mark.parametrize("kind", [Norm, HasConstant])
def test_buffers_that_are_updated_and_constants_are_each_layers_own(kind, traces):
    assert both(lambda: Stack(kind), traces)[1] == EVERY


def test_a_cache_that_layers_fill_is_filled(traces):
    class Fills(Layer):
        def before(self, x, cache):
            cache.append(x * 2)
            return cache[-1]

    class Model(Stack):
        def forward(self, x):
            cache = []
            for layer in self.layers:
                x = layer(x, cache)
            return x.square().sum(), *cache

    def build():
        return Stack(Fills, lambda stack, i, layer, x: layer(x, []))

    assert both(build, traces)[1] == EVERY
    outputs = capture(Model(Fills), (X,), loss_fn=lambda output, _: output[0]).graph.outputs
    assert len(set(outputs)) == LAYERS


def test_a_setting_changed_between_calls_is_seen(traces):
    class Reading(Layer):
        def before(self, x):
            return x * SETTINGS.scale

    def rising(stack, i, layer, x):
        SETTINGS.scale = i // 4
        return layer(x)

    assert both(lambda: Stack(Reading, rising), traces)[1] == 2


def test_what_a_call_leaves_is_seen_though_it_is_put_back(traces):
    def resetting(stack, i, layer, x):
        COUNTS[0] = 0
        return layer(x) * COUNTS[0]

    graph, count = both(lambda: Stack(CountsGlobally, resetting), traces)
    assert count == EVERY
    factors = {n.args[1] for n in graph.nodes if n.op == "aten.mul" and isinstance(n.args[1], int)}
    assert factors == {1}


def test_the_same_tensor_is_told_from_a_view_of_it(traces):
    class Compares(Layer):
        def before(self, x, y):
            return x * (2 if y is x else 3)

    def call(stack, i, layer, x):
        return layer(x, x if i in (4, 5) else x.view_as(x))

    assert both(lambda: Stack(Compares, call), traces)[1] == 2


class Returns(Layer):
    """A dict with a tensor that the layer makes, one it was given, one none, one unused."""

    def forward(self, x, mask):
        y = super().forward(x)
        return {"mask": mask, "y": y, "none": None, "z": (y * mask).exp()}


def test_structured_results_are_rebuilt(traces):
    def call(stack, i, layer, x):
        out = layer(x, x[0] > 0 if i == 0 else stack.mask)
        stack.mask = out["mask"]
        return out["z"] if i == LAYERS - 1 else out["y"]

    _, count = both(lambda: Stack(Returns, call), traces)
    assert count <= 2


def test_repetition_within_repetition(traces):
    class Tower(nn.Module):
        def __init__(self, _):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x + 1

    graph, count = both(lambda: Stack(Tower), traces)
    assert count == 1
    paths = [node.module_path for node in graph.nodes if node.module_path.endswith(".up")]
    assert paths == [f"layers.{i}.layers.{j}.up" for i in range(LAYERS) for j in range(3)]


def test_the_line_of_the_call_is_kept(traces):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.TransformerEncoderLayer(HIDDEN, 2, 8, 0.0) for _ in range(2))

        def forward(self, x):
            x = self.a(x)
            x = self.b(x)
            return x.sum()

    graph, _ = both(Twice, traces)
    lines = {node.source for node in graph.nodes if node.op == "aten.layer_norm"}
    assert len(lines) == 2


def test_torch_is_as_before(traces):
    call, get = nn.Module._call_impl, nn.Module.__getattribute__
    capture(Stack(Layer), (X,))
    assert nn.Module._call_impl is call and nn.Module.__getattribute__ is get
