"""A parallelized model and the eager one side by side, on every rank of a pool."""

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist

import autopar
from autopar.runtime.reference import reference_random
from autopar.runtime.verify import call_model

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def close(value, expected):
    torch.testing.assert_close(value, expected, check_dtype=False, **TIGHT)


class Beside:
    """The same weights twice: parallel over all ranks of the process group, and eager here.

    `model` is in double precision. Every method is called on all ranks.
    """

    def __init__(self, model, pins, optimizer=(torch.optim.SGD, {"lr": 0.1}), **options):
        self.reference = copy.deepcopy(model).double()
        world = dist.get_world_size()
        self.parallel = autopar.parallelize(
            model.double(), f"local:{world}", pins=pins, optimizer=optimizer, **options
        )
        cls, kwargs = optimizer if isinstance(optimizer, tuple) else (None, None)
        self.theirs = cls(self.reference.parameters(), **kwargs) if cls else None
        self.loss_fn = options.get("loss_fn")
        self.passes = 0

    @property
    def store(self):
        return self.parallel.program.store

    def layout(self, fqn):
        """Placement of a parameter on the tensor axis."""
        plan = self.parallel.plan
        names = [axis.name for axis in plan.axes]
        found = [p for s in plan.stages for p in s.parameters if p.fqn == fqn]
        assert found, fqn
        return str(found[0].layout[names.index("tensor")])

    def input_placement(self, node, position=0):
        """Placement on the tensor axis in which an op of the graph takes an input."""
        plan = self.parallel.plan
        choices = {c.node: c for variant in plan.variants for c in variant.choices}
        names = [axis.name for axis in plan.axes]
        return str(choices[node].inputs[position][names.index("tensor")])

    def eager(self, batch, *, training=True):
        """The reference's output in this pass, gradients added to its `.grad`."""
        self.reference.train(training)
        random = reference_random(0, self.passes) if training else nullcontext()
        with random, torch.set_grad_enabled(training):
            loss = call_model(self.reference, batch, self.loss_fn)
        if training:
            loss.backward()
            self.passes += 1
        return loss.detach()

    def backward(self, batch):
        """Forward and backward of both; the losses agree."""
        loss = self.parallel.backward_step(batch)
        close(loss, self.eager(batch))
        return loss

    def same_gradients(self):
        known = dict(self.reference.named_parameters())
        for fqn, entry in self.store.entries.items():
            if entry.spec.trainable:
                close(self.store.gather_gradient(fqn), known[fqn].grad)

    def same_weights(self):
        """On every rank, then in the state dict of rank 0, which has the model's own keys."""
        state = self.reference.state_dict()
        for fqn, entry in self.store.entries.items():
            for name in entry.spec.names:
                if name in state:
                    close(self.store.gather_full(fqn), state[name])
        have = self.parallel.full_state_dict()
        if dist.get_rank() == 0:
            assert sorted(have) == sorted(state)
            for name, value in state.items():
                close(have[name], value)

    def step(self):
        """One optimizer step of both."""
        self.parallel.optimizer.step()
        self.theirs.step()
        self.parallel.optimizer.zero_grad()
        self.theirs.zero_grad()

    def same_evaluation(self, batch):
        """Loss and output in eval mode, in the structure that the model returns them in."""
        loss, output = self.parallel.eval_step(batch)
        self.reference.eval()
        with torch.no_grad():
            close(loss, call_model(self.reference, batch, self.loss_fn))
            expected = self.reference(**batch)
        same_structure(output, expected)

    def train(self, batch, steps=2):
        """Steps of both; loss, all gradients, norm, and all weights agree."""
        for _ in range(steps):
            self.backward(batch)
            self.same_gradients()
            grads = [p.grad for p in self.reference.parameters() if p.grad is not None]
            close(self.parallel.grad_norm(), torch.nn.utils.get_total_norm(grads))
            self.step()
        self.same_weights()


def same_structure(value, expected):
    """The same containers, None and numbers; equal tensors."""
    if isinstance(expected, torch.Tensor):
        close(value, expected)
    elif isinstance(expected, dict):
        assert type(value) is dict and list(value) == list(expected)
        for key in expected:
            same_structure(value[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert type(value) is type(expected) and len(value) == len(expected)
        for mine, theirs in zip(value, expected, strict=True):
            same_structure(mine, theirs)
    else:
        assert value == expected and type(value) is type(expected)


def train_beside(model, batch, pins, *, steps=2):
    """Train a new model beside its eager copy, then evaluate both; for further checks the two."""
    torch.manual_seed(0)
    both = Beside(model(), pins)
    both.train(batch, steps)
    both.same_evaluation(batch)
    return both


def check_training(model, batch, pins, expect=None):
    """What a pool runs: `expect` are placements on the tensor axis by parameter name."""
    both = train_beside(model, batch, pins)
    for fqn, placement in (expect or {}).items():
        assert both.layout(fqn) == placement, (fqn, both.layout(fqn))
