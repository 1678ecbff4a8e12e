"""What a profile answers: measured times, times between them, and nothing far from them."""

from __future__ import annotations

import pytest

from autopar.costs.collectives import ClusterCollectives, axis_collective_time_s, axis_route
from autopar.costs.families import extents, family, work
from autopar.costs.interpolation import Sample, interpolate
from autopar.costs.local_op import SLOT, LocalOp
from autopar.costs.profiles import (
    LinkKey,
    LinkRecord,
    Machine,
    OpRecord,
    Profile,
    TimeSource,
    Timing,
    wait_key,
)
from autopar.errors import InputError
from autopar.ir.cluster import Axis, Cluster, DeviceGroup, DeviceSpec, LinkLevel
from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import Ref

MACHINE = Machine(device="A CPU", row="cpu", kind="cpu", driver="", torch="2.13", cores=4)


def linear(m, n, k, *, dtype="float32", grads=(True, True), **fields):
    return LocalOp(
        target="aten.linear.default",
        input_shapes=((m, k), (n, k)),
        input_dtypes=(dtype, dtype),
        output_shapes=((m, n),),
        output_dtypes=(dtype,),
        args=(Ref(SLOT, 0), Ref(SLOT, 1)),
        requires_grad=any(grads),
        grad_inputs=grads,
        **fields,
    )


def took(seconds, count=5):
    return Timing(median_s=seconds, spread_s=0.0, count=count)


def profile_of(*measured, links=(), **fields):
    """From (op, forward_s, backward_s) and (link key, seconds)."""
    records = [OpRecord.of(op, took(f), took(b)) for op, f, b in measured]
    return Profile(
        machine=MACHINE,
        ops={record.key: record for record in records},
        links={key: LinkRecord(key=key, time=took(s)) for key, s in links},
        **fields,
    )


def test_a_measured_op_has_its_own_times():
    profile = profile_of((linear(8, 8, 8), 1.0, 2.0), (linear(8, 8, 16), 5.0, 7.0))
    assert profile.lookup(linear(8, 8, 8)) == (1.0, 2.0, TimeSource.MEASURED)


def test_between_two_sizes_times_are_linear_in_logarithms():
    profile = profile_of((linear(16, 64, 64), 1.0, 3.0), (linear(64, 64, 64), 4.0, 27.0))
    forward_s, backward_s, source = profile.lookup(linear(32, 64, 64))
    assert source is TimeSource.INTERPOLATED
    assert (forward_s, backward_s) == pytest.approx((2.0, 9.0))


def test_the_nearest_shapes_count_not_only_the_nearest_work():
    near = (linear(64, 64, 16), 1.0, 1.0), (linear(64, 64, 64), 4.0, 4.0)
    # hardly less work than what is asked for, in another shape
    other = linear(8, 8, 1980), 99.0, 99.0
    forward_s, _, _ = profile_of(*near, other).lookup(linear(64, 64, 31))
    assert forward_s < 4.0


@pytest.mark.parametrize(
    "other",
    [
        linear(32, 64, 64, dtype="bfloat16"),
        linear(32, 64, 64, grads=(True, False)),
        linear(32, 64, 64, copies=True),
        linear(32, 64, 64, fused_output=True),
        linear(16, 64, 64, fused_inputs=(0,)),
    ],
)
def test_other_dtypes_gradients_and_layouts_are_other_ops(other):
    profile = profile_of((linear(16, 64, 64), 1.0, 3.0), (linear(64, 64, 64), 4.0, 27.0))
    assert profile.lookup(other) is None


def test_nothing_is_said_more_than_four_times_beyond_what_was_measured():
    profile = profile_of((linear(16, 64, 64), 1.0, 3.0))
    assert profile.lookup(linear(64, 64, 64))[:2] == pytest.approx((4.0, 12.0))
    assert profile.lookup(linear(4, 64, 64))[:2] == pytest.approx((0.25, 0.75))
    assert profile.lookup(linear(65, 64, 64)) is None
    assert profile.lookup(linear(3, 64, 64)) is None


def test_an_op_that_failed_is_interpolated_from_those_that_did_not():
    failed = linear(32, 64, 64)
    profile = profile_of((linear(16, 64, 64), 1.0, 3.0), (linear(64, 64, 64), 4.0, 27.0))
    profile = Profile(
        machine=MACHINE, ops={**profile.ops, failed.key: OpRecord.of(failed, reason="OOM")}
    )
    assert profile.lookup(failed)[2] is TimeSource.INTERPOLATED
    assert profile.reason(failed) == "OOM"


def test_more_processes_than_cores_slow_ops_down():
    profile = profile_of((linear(8, 8, 8), 1.0, 2.0), slowdown=2.5)
    assert profile.lookup(linear(8, 8, 8))[:2] == (2.5, 5.0)


def test_interpolation_with_equal_work_and_with_zeros():
    a = Sample(extents=(2, 8), work=16.0, times_s=(1.0, 0.0))
    b = Sample(extents=(8, 2), work=16.0, times_s=(4.0, 1.0))
    assert interpolate((a, b), (4, 4), 16.0) == (1.0, 0.0)  # of equals the first
    c = Sample(extents=(8, 8), work=64.0, times_s=(4.0, 1.0))
    assert interpolate((a, c), (4, 8), 32.0) == pytest.approx((2.0, 0.5))
    assert interpolate((), (1,), 1.0) is None


def test_families_leave_out_sizes_alone():
    def ones(size):
        return LocalOp(
            target="aten.full.default",
            input_shapes=(),
            input_dtypes=(),
            output_shapes=(size,),
            output_dtypes=("float32",),
            args=(size, 1.0),
        )

    assert family(ones((2, 3))) == family(ones((4, 5)))
    assert family(ones((2, 3))) != family(ones((2,)))
    assert family(linear(1, 2, 3)) == family(linear(4, 5, 6))
    assert extents(linear(1, 2, 3)) == (1, 3, 2, 3, 1, 2)
    assert work(linear(1, 2, 3)) == 12
    assert work(ones((2, 3))) == 24


def test_merging_keeps_the_better_record():
    op, only = linear(8, 8, 8), linear(8, 8, 9)
    failed = Profile(machine=MACHINE, ops={op.key: OpRecord.of(op, reason="no")})
    timed = profile_of((op, 1.0, 2.0), (only, 3.0, 4.0))
    assert failed.merged(timed).ops == timed.ops
    assert timed.merged(failed).ops == timed.ops
    often = Profile(machine=MACHINE, ops={op.key: OpRecord.of(op, took(5.0, 9), took(6.0, 9))})
    assert often.merged(timed).lookup(op)[0] == timed.merged(often).lookup(op)[0] == 5.0


@pytest.mark.parametrize("name", ["device", "driver", "torch"])
def test_profiles_of_different_machines_do_not_merge(name):
    fields = {key: getattr(MACHINE, key) for key in MACHINE.__slots__} | {name: "else"}
    with pytest.raises(InputError, match=rf"{name}.*'else'"):
        profile_of().merged(Profile(machine=Machine(**fields)))


DEVICE = DeviceSpec(
    name="x",
    kind="cuda",
    memory_bytes=1,
    memory_bandwidth_bytes_s=1.0,
    peak_flops=(("float32", 1.0),),
    matmul_efficiency=1.0,
    kernel_launch_s=0.0,
    source="",
)
NODES = Cluster(
    groups=(DeviceGroup(device=DEVICE, nodes=2, devices_per_node=4),),
    links=(
        LinkLevel(name="node", span=4, bandwidth_bytes_s=1e9, latency_s=1e-6),
        LinkLevel(name="network", span=8, bandwidth_bytes_s=1e8, latency_s=1e-5),
    ),
)
AR, SEND = CollectiveOp.ALL_REDUCE, CollectiveOp.SEND_RECV


def link(op, ranks, level, nbytes, packed=1):
    return LinkKey(op=op, ranks=ranks, level=level, packed=packed, nbytes=nbytes)


LINKS = profile_of(
    links=(
        (link(AR, 2, "node", 1024), 1.0),
        (link(AR, 2, "node", 4096), 16.0),
        (link(AR, 2, "network", 1024), 100.0),
        (link(AR, 4, "network", 1024, packed=2), 200.0),
        (link(SEND, 2, "network", 1024), 300.0),
        (wait_key(2, "network", 1), 7.0),
    )
)


def seconds(op, nbytes, size, stride):
    axis = Axis(name="a", size=size, stride=stride)
    model = axis_collective_time_s(op, nbytes, axis, NODES)
    found = axis_collective_time_s(op, nbytes, axis, NODES, measured=LINKS)
    return found if found != model else "model"


def test_collectives_are_interpolated_over_the_size_of_message():
    assert seconds(AR, 1024, 2, 1) == 1.0
    assert seconds(AR, 2048, 2, 1) == pytest.approx(4.0)
    assert seconds(AR, 10, 2, 1) == 1.0
    assert seconds(AR, 4 * 4096, 2, 1) == pytest.approx(64.0)
    assert seconds(AR, 5 * 4096, 2, 1) == "model"


def test_collectives_are_those_of_the_group_and_its_level():
    assert axis_route(Axis(name="a", size=4, stride=2), NODES).packed == 2
    assert seconds(AR, 1024, 2, 4) == 100.0
    assert seconds(AR, 1024, 4, 2) == 200.0
    assert seconds(AR, 1024, 4, 1) == "model"
    assert seconds(SEND, 1024, 2, 4) == 300.0
    assert seconds(SEND, 1024, 2, 1) == "model"
    assert seconds(CollectiveOp.ALL_GATHER, 1024, 2, 1) == "model"


def test_what_ranks_wait_for_each_other_is_measured_or_nothing():
    axes = {
        name: Axis(name=name, size=2, stride=stride) for name, stride in (("far", 4), ("near", 1))
    }
    links = ClusterCollectives(NODES, tuple(axes.values()), measured=LINKS)
    assert (links.wait_s("far"), links.wait_s("near")) == (7.0, 0.0)
    assert ClusterCollectives(NODES, tuple(axes.values())).wait_s("far") == 0.0
    assert seconds(AR, 10, 2, 4) == 100.0  # no smallest message
