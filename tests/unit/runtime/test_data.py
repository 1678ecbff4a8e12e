import pytest
import torch

from autopar.errors import InputError
from autopar.ir.size import Size
from autopar.runtime.data import InputSpec, as_mapping, check_batch, micro_batch_spans, slice_batch

B = Size(0, 1)
SPECS = (
    InputSpec(key="ids", shape=(B, Size(64)), dtype="int64"),
    InputSpec(key="flat", shape=(Size(0, 64),), dtype="float32"),
    InputSpec(key="mask", shape=(Size(64), Size(64)), dtype="bool"),
)


def batch(samples=4):
    return {
        "ids": torch.arange(samples * 64).view(samples, 64),
        "flat": torch.arange(samples * 64.0),
        "mask": torch.ones(64, 64, dtype=torch.bool),
    }


def test_forms_of_a_batch():
    x, y = torch.zeros(1), torch.ones(1)
    assert as_mapping((x, None, y)) == {"0": x, "2": y}
    assert as_mapping(x) == {"0": x}
    assert as_mapping({"a": x, "b": None}) == {"a": x}
    with pytest.raises(InputError, match="got int"):
        as_mapping(3)


@pytest.mark.parametrize("samples", [0, 1, 4, 9])
def test_any_number_of_samples(samples):
    tensors, found = check_batch(batch(samples), SPECS)
    assert found == samples
    assert list(tensors) == ["ids", "flat", "mask"]


def changed(**changes):
    return {k: v for k, v in {**batch(), "scale": 1.0, **changes}.items() if v is not ...}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (changed(ids=torch.zeros(4, 65, dtype=torch.int64)), "captured with 64 in dim 1 .*got 65"),
        (changed(ids=torch.zeros(4, 64)), "'ids' was captured with dtype int64, got float32"),
        (changed(ids=torch.zeros(4, dtype=torch.int64)), "captured with 2 dims, got 1"),
        (changed(ids=...), "'ids' is missing"),
        (changed(ids=[1, 2]), "captured as a tensor, got list"),
        (changed(flat=torch.zeros(100)), "100 is not 64.batch for any batch"),
        (changed(flat=torch.zeros(128)), "differ in their number of samples: .*4.*2"),
        (changed(extra=torch.zeros(1)), "'extra' was captured without it, got a tensor"),
        (changed(scale=2.0), "'scale' was captured with 1.0, got 2.0"),
        (changed(scale=...), "'scale' was captured with 1.0, and is missing"),
    ],
)
def test_refusals(given, message):
    with pytest.raises(InputError, match=message):
        check_batch(given, SPECS, {"scale": 1.0})


def test_constants_are_given_again():
    check_batch(changed(), SPECS, {"scale": 1.0})


@pytest.mark.parametrize(
    ("samples", "micro_batches", "counts"),
    [(8, 3, [3, 3, 2]), (7, 4, [2, 2, 2, 1]), (6, 4, [2, 2, 2, 0]), (1, 1, [1])],
)
def test_micro_batches_are_chunks(samples, micro_batches, counts):
    spans = micro_batch_spans(samples, micro_batches, (1,), (0,))
    assert [span.of for span in spans] == counts
    assert [(span.start, span.count) for span in spans] == [
        (sum(counts[:i]), count) for i, count in enumerate(counts)
    ]


@pytest.mark.parametrize("samples", [1, 5, 7, 8])
@pytest.mark.parametrize("data", [2, 3])
def test_every_sample_is_on_one_rank(samples, data):
    ranks = [micro_batch_spans(samples, 2, (data,), (rank,)) for rank in range(data)]
    held = [n for spans in ranks for s in spans for n in range(s.start, s.start + s.count)]
    assert sorted(held) == list(range(samples))


def test_slices():
    whole, (_, second) = batch(7), micro_batch_spans(7, 2, (2,), (1,))
    assert (second.start, second.count, second.of) == (6, 1, 3)
    part = slice_batch(whole, SPECS, second, torch.device("cpu"))
    assert part["ids"].equal(whole["ids"][6:7])
    assert part["flat"].equal(whole["flat"][6 * 64 : 7 * 64])
    assert part["mask"].equal(whole["mask"])
