import subprocess
import sys

from autopar.plan.buckets import Bucket, GradientEntry, buckets


def entry(name, nbytes, dtype="float32", axes=("data",)):
    return GradientEntry(name=name, nbytes=nbytes, dtype=dtype, axes=axes)


def test_buckets_fill_in_order_and_by_kind():
    found = buckets(
        [
            entry("a", 40),
            entry("b", 10, axes=("data", "tensor")),
            entry("c", 60),
            entry("d", 1),
            entry("e", 300),
            entry("f", 5, dtype="bfloat16"),
            entry("g", 7, axes=()),
            entry("h", 50),
        ],
        cap_bytes=100,
    )
    assert found == (
        Bucket(names=("a", "c"), nbytes=100, dtype="float32", axes=("data",)),
        Bucket(names=("d",), nbytes=1, dtype="float32", axes=("data",)),
        Bucket(names=("e",), nbytes=300, dtype="float32", axes=("data",)),
        Bucket(names=("h",), nbytes=50, dtype="float32", axes=("data",)),
        Bucket(names=("b",), nbytes=10, dtype="float32", axes=("data", "tensor")),
        Bucket(names=("f",), nbytes=5, dtype="bfloat16", axes=("data",)),
    )
    assert buckets([]) == ()


def test_scattered_and_early_gradients_have_buckets_of_their_own():
    scattered = [
        GradientEntry(
            name=name,
            nbytes=40,
            dtype="float32",
            axes=("data", "shard"),
            scatter=("shard",),
            shard_nbytes=10,
            early=early,
        )
        for name, early in (("a", False), ("b", True), ("c", False))
    ]
    late, plain, early = buckets(
        [scattered[0], entry("x", 4, axes=("data", "shard")), *scattered[1:]]
    )
    assert (late.names, late.nbytes, late.shard_nbytes) == (("a", "c"), 80, 20)
    assert (late.scatter, late.rest) == (("shard",), ("data",))
    assert (plain.names, plain.rest) == (("x",), ("data", "shard"))
    assert (early.names, early.early) == (("b",), True)


def test_needs_no_torch():
    code = "import autopar.plan.buckets, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
