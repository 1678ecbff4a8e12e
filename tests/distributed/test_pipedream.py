"""PipeDream against a simulation of the same staleness in one process.

The simulation knows nothing of the runtime: it keeps every version of every stage's weights, runs
each micro-batch forward through the versions that its stages have by then, and gives each stage its
own optimizer. Stage i of p is p - 1 - i micro-batches ahead of its own updates, so that micro-batch
n sees there the weights after max(0, n - (p - 1 - i)) updates (Narayanan et al., 2019, 3.3).
"""

import pytest
import torch
from torch import nn

import autopar
from autopar.codegen.traffic import totals

pytestmark = pytest.mark.distributed

SAMPLES, STEPS = 8, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x, y)


def build():
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 6, dtype=torch.float64)
    return Net().double(), {"x": x, "y": torch.tanh(x)}


def simulated(layers_of_stage, micro_batches):
    """Losses of every step, and the weights once all updates have run."""
    model, batch = build()
    stages = [[model.layers[i] for i in own] for own in layers_of_stage]
    optimizers = [sgd(own) for own in stages]
    versions = [[snapshot(own)] for own in stages]
    ahead = [len(stages) - 1 - s for s in range(len(stages))]
    losses = []
    for step in range(STEPS):
        total = 0.0
        parts = zip(batch["x"].chunk(micro_batches), batch["y"].chunk(micro_batches), strict=True)
        for number, (x, y) in enumerate(parts, step * micro_batches):
            seen = [
                {
                    name: w.clone().requires_grad_()
                    for name, w in kept[max(0, number - lead)].items()
                }
                for kept, lead in zip(versions, ahead, strict=True)
            ]
            h = x
            for weights in seen:
                for k in range(len(weights) // 2):
                    h = nn.functional.linear(h, weights[f"{k}.weight"], weights[f"{k}.bias"])
                    h = torch.tanh(h)
            loss = nn.functional.mse_loss(h, y)
            loss.backward()
            total += float(loss.detach()) * len(x) / SAMPLES
            for own, weights, optimizer in zip(stages, seen, optimizers, strict=True):
                for name, parameter in named(own):
                    parameter.grad = weights[name].grad
                optimizer.step()
            for own, kept in zip(stages, versions, strict=True):
                kept.append(snapshot(own))
        losses.append(total)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def sgd(layers):
    parameters = [p for layer in layers for p in layer.parameters()]
    return torch.optim.SGD(parameters or [torch.empty(0)], lr=0.3, momentum=0.9)


def named(layers):
    return [
        (f"{k}.{name}", p) for k, own in enumerate(layers) for name, p in own.named_parameters()
    ]


def snapshot(layers):
    return {name: p.detach().clone() for name, p in named(layers)}


def trained(pins):
    model, batch = build()
    parallel = autopar.parallelize(
        model,
        f"local:{torch.distributed.get_world_size()}",
        batch=batch,
        optimizer=(torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}),
        pins=pins,
    )
    program = parallel.program
    recorder = program.world.recorder
    losses, counted = [], []
    for _ in range(STEPS):
        recorder.start()
        losses.append(float(parallel.train_step(batch)))
        counted.append(recorder.stop())
    copies = {s: v.count for s, v in program.engine._stale._versions.items()}
    state = program.full_state_dict()
    return losses, state, parallel.plan, counted, copies, program.world.rank


@pytest.mark.parametrize(
    ("devices", "pins", "micro_batches"),
    [
        (4, {"pipeline": 4, "data": 1, "tensor": 1}, 8),
        (4, {"pipeline": 2, "data": 2, "tensor": 1}, 4),
        (2, {"pipeline": 2, "data": 1, "tensor": 1}, 2),
    ],
)
def test_equals_a_simulation_of_the_same_staleness(request, devices, pins, micro_batches):
    pool = request.getfixturevalue(f"pool{devices}")
    pins = {**pins, "schedule": "pipedream", "micro_batches": micro_batches}
    results = pool.run(trained, pins)
    plan = results[0][2]
    layers = [sorted({int(p.fqn.split(".")[1]) for p in stage.parameters}) for stage in plan.stages]
    assert sum(map(len, layers)) == 4
    losses, weights = simulated(layers, micro_batches)
    for found, _, _, _, _, _ in results:
        assert found == pytest.approx(losses, rel=1e-12)
    state = results[0][1]
    for name, expected in weights.items():
        torch.testing.assert_close(state[name], expected, rtol=1e-12, atol=1e-12)
    assert "changes the optimisation" in plan.notes[0]
    # In flight, and so kept in versions: p - i on stage i.
    assert [stage.in_flight for stage in plan.stages] == list(range(plan.pipeline, 0, -1))
    for *_, counted, copies, rank in results:
        (stage,) = [s for s in plan.stages if rank in s.ranks]
        held = dict(stage.memory_bytes)
        expected = 0 if stage.in_flight == 1 else stage.in_flight
        assert held["weight_versions"] == expected * held["weights"]
        assert 0 < copies[stage.index] <= expected or expected == 0
        # From the second step on a step has the planned messages, sums and sums before them.
        assert totals(counted[1]) == totals(counted[2]) == totals(stage.collectives)
