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


def test_needs_no_torch():
    code = "import autopar.plan.buckets, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
