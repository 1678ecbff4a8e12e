"""Every transition against plain autograd on the whole tensor, and the collectives it runs."""

import pytest
import torch
import torch.distributed as dist

from autopar.ir.collective import TRANSITIONS, CollectiveOp
from autopar.runtime import comm, shards
from autopar.runtime.axes import create_world

pytestmark = pytest.mark.distributed

SIZE = 4
CASES = {
    "even": ((8, 3), 0, ()),
    "uneven": ((2, 10, 3), 1, ()),
    "empty": ((5, 2), 0, ()),
    "pieces": ((3, 14), 1, (8, 4, 2)),
    "uneven_pieces": ((12, 2), 0, (7, 5)),
}
FUNCTIONS = {
    move.function: pair for pair, move in TRANSITIONS.items() if move.function != "exchange"
}


def _place(whole, kind, axis, dim, pieces, summands):
    """The local part of a whole value; `summands` are random weights that sum to one."""
    if kind == "S":
        return shards.take(whole, dim, pieces, axis.size, axis.rank).clone()
    if kind == "P":
        return whole * summands[axis.rank]
    return whole.clone()


def _matches(local, whole, kind, axis, dim, pieces):
    if kind in {"P*"}:
        local = local.clone()
        dist.all_reduce(local)
    elif kind == "S":
        whole = shards.take(whole, dim, pieces, axis.size, axis.rank)
    torch.testing.assert_close(local, whole)


GRADIENT = {"S": "S", "R": "R", "R*": "P*", "P": "R"}
VALUE = {"S": "S", "R": "R", "R*": "R", "P": "P*"}
NAMES = {
    "all_reduce": CollectiveOp.ALL_REDUCE,
    "all_gather_single": CollectiveOp.ALL_GATHER,
    "reduce_scatter_single": CollectiveOp.REDUCE_SCATTER,
    "all_to_all_single": CollectiveOp.ALL_TO_ALL,
}


class Intercept:
    """Counts real calls of torch.distributed's collectives."""

    def __enter__(self):
        self.calls, self.kept = [], {}
        for name in dir(dist):
            function = getattr(dist, name)
            known = ("all_", "reduce", "broadcast", "gather", "scatter", "send", "recv", "isend")
            if callable(function) and name.startswith(known) and not isinstance(function, type):
                self.kept[name] = function
                setattr(dist, name, self._counting(name, function))
        return self

    def _counting(self, name, function):
        def call(*args, **kwargs):
            self.calls.append(NAMES.get(name, name))
            return function(*args, **kwargs)

        return call

    def __exit__(self, *_):
        for name, function in self.kept.items():
            setattr(dist, name, function)


def _arguments(function, shape, dim, pieces):
    if "gather" in function and function != "sum_gradient" and not function.startswith("sum"):
        return (dim, shape[dim], pieces)
    return (dim, pieces) if "shard" in function or "scatter" in function else ()


def check(function, case, dtype):
    shape, dim, pieces = CASES[case]
    axis = create_world([("tensor", SIZE)], [range(SIZE)]).meshes[0].axes["tensor"]
    axis.recorder.start()
    src, dst = FUNCTIONS[function]
    torch.manual_seed(0)
    whole = torch.randn(shape, dtype=dtype)
    weight = torch.randn(shape, dtype=dtype)
    summands = torch.tensor([0.5, -1.0, 0.25, 1.25], dtype=dtype)
    x = _place(whole, src, axis, dim, pieces, summands).requires_grad_()
    with Intercept() as seen:
        y = getattr(comm, function)(x, axis, *_arguments(function, shape, dim, pieces))
        # The gradient of the result, in the placement its kind asks for.
        kind = {"S": "S", "R": "R", "R*": "P", "P": "R"}[dst]
        y.backward(_place(weight, kind, axis, dim, pieces, summands))
    events = axis.recorder.stop()
    if dst == "P":
        total = y.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, whole)
    else:
        _matches(y.detach(), whole, VALUE[dst], axis, dim, pieces)
    _matches(x.grad, weight, GRADIENT[src], axis, dim, pieces)
    move = TRANSITIONS[src, dst]
    expected = [op for op in (move.forward, move.backward) if op is not None]
    assert seen.calls == expected
    assert [event.op for event in events] == expected
    assert all(event.nbytes == whole.nbytes and event.axes == ("tensor",) for event in events)
    phases = [p for p, op in (("forward", move.forward), ("backward", move.backward)) if op]
    assert [event.phase for event in events] == phases


@pytest.mark.parametrize("case", CASES)
def test_transition_equals_autograd_on_the_whole(pool4, case):
    pool4.run(check_all, case)


def check_all(case):
    for function in FUNCTIONS:
        check(function, case, torch.float64)
    check("gather", case, torch.complex64)
    check("sum_partial", case, torch.complex64)


EXCHANGES = [
    ((8, 12), (0, ()), (1, ())),
    ((6, 2, 10), (2, ()), (0, ())),
    ((5, 14), (1, (8, 6)), (0, ())),
    ((14, 3), (0, ()), (0, (8, 6))),
    ((13, 2), (0, (9, 4)), (0, ())),
]


def check_exchange(shape, src, dst, dtype=torch.float64):
    axis = create_world([("tensor", SIZE)], [range(SIZE)]).meshes[0].axes["tensor"]
    torch.manual_seed(0)
    whole = torch.randn(shape, dtype=dtype)
    weight = torch.randn(shape, dtype=dtype)
    x = shards.take(whole, *src, SIZE, axis.rank).clone().requires_grad_()
    axis.recorder.start()
    with Intercept() as seen:
        y = comm.exchange(x, axis, src[0], dst[0], shape[src[0]], src[1], dst[1])
        y.backward(shards.take(weight, *dst, SIZE, axis.rank).clone())
    events = axis.recorder.stop()
    torch.testing.assert_close(y.detach(), shards.take(whole, *dst, SIZE, axis.rank))
    torch.testing.assert_close(x.grad, shards.take(weight, *src, SIZE, axis.rank))
    assert seen.calls == [CollectiveOp.ALL_TO_ALL] * 2
    assert [event.op for event in events] == seen.calls


@pytest.mark.parametrize(("shape", "src", "dst"), EXCHANGES)
def test_exchange(pool4, shape, src, dst):
    pool4.run(check_exchange, shape, src, dst)
    pool4.run(check_exchange, shape, src, dst, torch.complex64)


def check_integers():
    axis = create_world([("tensor", SIZE)], [range(SIZE)]).meshes[0].axes["tensor"]
    whole = torch.arange(10)
    mine = comm.take_shard(whole, axis, 0)
    assert comm.gather(mine, axis, 0, 10).equal(whole)
    assert comm.sum_partial(torch.ones(2, dtype=torch.int64), axis).tolist() == [4, 4]
    flags = torch.arange(8) % 3 == 0
    assert comm.gather(comm.take_shard(flags, axis, 0), axis, 0, 8).equal(flags)
    half = comm.gather(comm.take_shard(torch.ones(8, dtype=torch.bfloat16), axis, 0), axis, 0, 8)
    assert half.dtype == torch.bfloat16
    nothing = comm.sum_partial(torch.zeros(0, 3), axis)
    assert nothing.shape == (0, 3)


def test_integers_and_empty_tensors(pool4):
    pool4.run(check_integers)


def check_nested():
    """Two axes cut one dim: undone from the inner axis outwards."""
    mesh = create_world([("data", 2), ("tensor", 2)], [range(4)]).meshes[0]
    data, tensor = mesh.axes["data"], mesh.axes["tensor"]
    whole = torch.arange(10.0)
    outer = comm.take_shard(whole, data, 0)
    inner = comm.take_shard(outer, tensor, 0)
    assert comm.gather(inner, tensor, 0, 5).equal(outer)
    assert comm.gather(outer, data, 0, 10).equal(whole)


def test_two_axes(pool4):
    pool4.run(check_nested)


def close_a_world():
    """Groups of a pipeline over two stages, given up; how many are known before, between, after."""
    known = dist.distributed_c10d._world.pg_map
    counts = [len(known)]
    world = create_world([("tensor", 2)], [[0, 1], [2, 3]], ties=[(0, 1)])
    counts.append(len(known))
    world.close()
    dist.barrier()
    return [*counts, len(known)]


def test_a_world_gives_up_its_groups(pool4):
    for before, between, after in pool4.run(close_a_world):
        assert before == after < between
