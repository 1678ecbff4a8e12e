"""A hand-made plan: eight blocks over 2 stages x data 2 x tensor 2, sound in every respect."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from autopar.ir.cluster import Cluster, DeviceGroup, DeviceSpec, LinkLevel
from autopar.ir.collective import Collective, CollectiveOp
from autopar.ir.mesh import stage_mesh
from autopar.ir.placement import R_STAR, P, R, Shard
from autopar.ir.size import Size
from autopar.plan.plan import (
    BlockPlan,
    Candidate,
    Certificate,
    MeshAxis,
    ModelFingerprint,
    NodeChoice,
    ParameterPlan,
    PinPrice,
    Plan,
    Prediction,
    RecomputePlan,
    StagePlan,
    TensorEntry,
    Training,
    Variant,
)
from autopar.schedules.held import StageMemory

GIB = 2**30
HIDDEN, FFN, VOCAB, SEQ, LAYERS = 64, 256, 512, 32, 6
NORM = (R_STAR, R)
COLUMN, ROW = (R_STAR, Shard(0)), (R_STAR, Shard(1))
BATCH = Shard(0)


def _parameter(fqn, shape, layout, tied=()):
    return ParameterPlan(
        fqn=fqn, shape=shape, dtype="float32", layout=layout, trainable=True, tied=tied
    )


def _embedding(tied):
    return _parameter("embed.weight", (VOCAB, HIDDEN), COLUMN, tied)


def _layer(index):
    prefix = f"layers.{index}"
    return (
        _parameter(f"{prefix}.norm.weight", (HIDDEN,), NORM),
        _parameter(f"{prefix}.up.weight", (FFN, HIDDEN), COLUMN),
        _parameter(f"{prefix}.down.weight", (HIDDEN, FFN), ROW),
    )


def _cluster():
    device = DeviceSpec(
        name="test-gpu",
        kind="cuda",
        memory_bytes=16 * GIB,
        memory_bandwidth_bytes_s=1e12,
        peak_flops=(("bfloat16", 1e14), ("float32", 2e13)),
        matmul_efficiency=0.75,
        kernel_launch_s=5e-6,
        source="made up",
    )
    return Cluster(
        groups=(DeviceGroup(device=device, nodes=2, devices_per_node=4),),
        links=(
            LinkLevel(name="node", span=4, bandwidth_bytes_s=2e11, latency_s=1e-5),
            LinkLevel(name="network", span=8, bandwidth_bytes_s=2e10, latency_s=4e-5),
        ),
        spec="2x4:test-gpu",
    )


def _variants():
    activation = (BATCH, R)
    return (
        Variant(
            name="embed",
            class_index=0,
            digest="e0",
            choices=(
                NodeChoice(node="embedding", inputs=(COLUMN, (BATCH, R)), outputs=((BATCH, P),)),
            ),
        ),
        Variant(
            name="layer",
            class_index=1,
            digest="11",
            choices=(
                NodeChoice(
                    node="rms_norm", inputs=(activation, (R_STAR, R)), outputs=(activation,)
                ),
                NodeChoice(
                    node="linear",
                    inputs=((BATCH, R_STAR), COLUMN),
                    outputs=((BATCH, Shard(2)),),
                ),
                NodeChoice(node="linear_1", inputs=((BATCH, Shard(2)), ROW), outputs=((BATCH, P),)),
            ),
            recompute=(
                RecomputePlan(name="full", steps=("rms_norm", "rms_norm as S(0) R*", "linear")),
            ),
        ),
        Variant(
            name="head",
            class_index=2,
            digest="22",
            choices=(
                NodeChoice(
                    node="linear_12",
                    inputs=((BATCH, R_STAR), COLUMN),
                    outputs=((BATCH, Shard(2)),),
                ),
            ),
        ),
    )


def _collective(op, nbytes, group, phase, value, count=1):
    return Collective(op=op, nbytes=nbytes, axes=(group,), phase=phase, value=value, count=count)


def _collectives(index, layers=3, micro_batches=8):
    activation = 4 * 2 * SEQ * HIDDEN
    all_reduce, send = CollectiveOp.ALL_REDUCE, CollectiveOp.SEND_RECV
    count = layers * micro_batches
    return (
        _collective(all_reduce, activation, "tensor", "forward", "linear_1", count),
        _collective(all_reduce, activation, "tensor", "backward", "rms_norm", count),
        _collective(send, activation, "pipeline", ("forward", "backward")[index], "add", 8),
        _collective(all_reduce, 4 * HIDDEN * (1 + FFN) * layers, "data", "sync", "9 gradients"),
        _collective(all_reduce, 2 * VOCAB * HIDDEN, "tied", "sync", "embed.weight"),
    )


def _totals(stages):
    """The same without values, over all stages."""
    merged = {}
    for item in (item for stage in stages for item in stage.collectives):
        key = (item.op, item.nbytes, item.axes, item.phase)
        merged[key] = merged.get(key, 0) + item.count
    return tuple(
        Collective(op=op, nbytes=nbytes, axes=axes, phase=phase, count=count)
        for (op, nbytes, axes, phase), count in sorted(merged.items())
    )


def _around(terms, in_flight):
    """What actions hold where everything but activations is there throughout."""
    activations = dict(terms)["activations"]
    static = sum(dict(terms).values()) - activations - dict(terms).get("reserve", 0.0)
    held = StageMemory.alike(static_bytes=static, saved_bytes=activations / in_flight)
    return tuple(asdict(held).items())


def _stage(index, blocks, parameters, memory):
    return StagePlan(
        index=index,
        ranks=tuple(range(4 * index, 4 * index + 4)),
        blocks=blocks,
        parameters=parameters,
        time_s=(
            ("forward", (0.001, 0.0012)[index]),
            ("backward", (0.002, 0.0024)[index]),
            ("send_forward", 0.0001 * (1 - index)),
            ("send_backward", 0.0001 * index),
            ("gradient_sync", 0.003),
            ("optimizer", 0.0005),
        ),
        memory_bytes=memory,
        memory_limit_bytes=15 * GIB,
        in_flight=2 - index,
        collectives=_collectives(index),
        communication_s=(("forward_waits", 0.0002), ("backward_waits", 0.0002)),
        held_bytes=_around(memory, 2 - index),
    )


def _block(index):
    if index in (0, LAYERS + 1):
        name = "head" if index else "embed"
        return BlockPlan(index=index, variant=name, recompute="none", module_path=name)
    return BlockPlan(
        index=index,
        variant="layer",
        recompute="full" if index <= LAYERS // 2 else "none",
        module_path=f"layers.{index - 1}",
    )


def build_sample_plan() -> Plan:
    """A tied embedding on both stages, tensor-parallel layers, recompute on the first stage."""
    layers = [parameter for index in range(LAYERS) for parameter in _layer(index)]
    model = [_embedding(("head.weight",)), *layers]
    half = 3 * LAYERS // 2
    stages = (
        _stage(
            0,
            tuple(_block(i) for i in range(4)),
            (_embedding(("head.weight",)), *layers[:half]),
            (("weights", 2.0 * GIB), ("optimizer state", 4.0 * GIB), ("activations", 6.5 * GIB)),
        ),
        _stage(
            1,
            tuple(_block(i) for i in range(4, 8)),
            (*layers[half:], _embedding(("head.weight",))),
            (("weights", 2.0 * GIB), ("optimizer state", 4.0 * GIB), ("activations", 3.25 * GIB)),
        ),
    )
    return Plan(
        model=ModelFingerprint(
            name="sample",
            parameters=tuple(
                TensorEntry(fqn=p.fqn, shape=tuple(map(Size, p.shape)), dtype=p.dtype)
                for p in model
            ),
            inputs=(TensorEntry(fqn="input_ids", shape=(Size(0, 1), Size(SEQ)), dtype="int64"),),
            num_ops=20,
            ops_digest="ab" * 32,
        ),
        cluster=_cluster(),
        training=Training(
            global_batch=32, precision="bf16", optimizer="adamw", micro_batch=2, micro_batches=8
        ),
        pipeline=2,
        axes=(MeshAxis(name="data", size=2), MeshAxis(name="tensor", size=2)),
        schedule="1f1b",
        variants=_variants(),
        stages=stages,
        collectives=_totals(stages),
        prediction=Prediction(
            step_s=0.04,
            samples_per_s=800.0,
            bubble_fraction=1 / 9,
            peak_bytes=12.5 * GIB,
            peak_stage=0,
            time_s=(
                ("forward", 0.0096),
                ("backward", 0.0192),
                ("bubble", 0.0044),
                ("tensor-parallel collectives", 0.0033),
                ("gradient sync", 0.003),
                ("optimizer", 0.0005),
            ),
            measured_ops=4,
            priced_ops=16,
        ),
        certificate=Certificate(
            status="optimal",
            objective_s=0.04,
            bound_s=0.03996,
            gap=0.001,
            grids=12,
            solved=5,
            pruned=7,
            space="pipeline x data x tensor degrees, gpipe and 1f1b, recompute per stage",
            runners_up=(
                Candidate(
                    pipeline=1,
                    axes=stage_mesh(data=4, tensor=2),
                    micro_batch=2,
                    schedule="1f1b",
                    step_s=0.043,
                    verdict="slower",
                ),
                Candidate(
                    pipeline=1,
                    axes=stage_mesh(data=8),
                    micro_batch=2,
                    schedule="1f1b",
                    step_s=None,
                    verdict="needs 21.3 GiB of 15.0",
                ),
            ),
        ),
        pins=(PinPrice(key="schedule", value="1f1b", cost_s=0.0),),
        notes=("op cumsum has no sharding rule and is replicated",),
    )


@pytest.fixture(scope="session")
def sample_plan() -> Plan:
    """See `build_sample_plan`."""
    return build_sample_plan()
