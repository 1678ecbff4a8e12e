"""Values that enter a stage's graph: their gradients are kept, they themselves are not."""

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.entry import Entry
from autopar.runtime.weight_gradients import compute_deferred


def entered(value):
    entry = Entry(value)
    return entry, entry.enter(value)


def test_a_value_that_no_backward_reads_goes_before_its_gradient_comes():
    value = torch.arange(6.0).reshape(2, 3)
    storage = StorageWeakRef(value.untyped_storage())
    entry, inside = entered(value)
    out = inside + 1
    del value, inside
    assert storage.expired()
    out.backward(torch.full((2, 3), 2.0))
    assert torch.equal(entry.take(), torch.full((2, 3), 2.0))


def test_a_value_that_the_backward_reads_is_the_one_that_came():
    value = torch.arange(3.0)
    entry, inside = entered(value)
    assert inside.data_ptr() == value.data_ptr()
    (inside * inside).sum().backward()
    assert torch.equal(entry.take(), 2 * value)


def test_a_gradient_that_no_backward_gives_is_zero():
    value = torch.ones(2, 3, dtype=torch.bfloat16)
    entry, _ = entered(value)
    gradient = entry.take()
    assert torch.equal(gradient, torch.zeros_like(value)) and gradient.dtype == value.dtype


def test_gradients_of_several_backwards_are_summed():
    entry, inside = entered(torch.ones(3))
    first, second = inside * 2, inside * 3
    first.sum().backward()
    second.sum().backward()
    assert torch.equal(entry.take(), torch.full((3,), 5.0))


def test_the_weight_gradient_of_one_product_is_gone_when_the_next_is_computed():
    weights = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    alive: list[weakref.ref] = []

    def product(weight):
        def gradients():
            assert not any(ref() is not None for ref in alive)
            gradient = torch.ones(2)
            if weight.grad is None:
                weight.grad = torch.zeros(2)
            alive.append(weakref.ref(gradient))
            return [(torch.autograd.graph.get_gradient_edge(weight), gradient)]

        return gradients

    compute_deferred([product(weight) for weight in weights])
    assert len(alive) == 3
    assert all(torch.equal(weight.grad, torch.ones(2)) for weight in weights)
