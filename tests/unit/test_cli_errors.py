"""What the command line says when the answer is no or the input is wrong.

One message with the numbers on stderr, the exit status of its kind, no traceback, nothing written.
"""

from __future__ import annotations

import json
import re

import pytest

from autopar.cli import main
from autopar.costs.profiles import Machine, Profile
from autopar.profiler.files import read_profiles, write_profiles

MODELS = """
import torch
from torch import nn

class Stack(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return ((x - y) ** 2).mean()

class Branch(Stack):
    def forward(self, x, y):
        loss = super().forward(x, y)
        if loss > 1:  # depends on data
            return loss
        return 2 * loss

class Shape(Stack):
    def forward(self, x, y):
        return self.layers[0](x)[x[:, 0] > 0].sum()

class Flat(Stack):
    def forward(self, x, y):
        return x.undefined()

class Attention(Stack):
    def forward(self, x, y):
        q = self.layers[0](x).view(-1, 3, 4, 6).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return ((self.layers[1](mixed.transpose(1, 2).reshape(-1, 3, 24)) - y) ** 2).mean()

def batch(width=24):
    return {"x": torch.randn(8, width), "y": torch.randn(8, width)}

def small(): return Stack(24), batch()
def wide(): return Stack(32), batch(32)
def branch(): return Branch(24), batch()
def shape(): return Shape(24), batch()
def flat(): return Flat(24), batch()
def heads(): return Attention(24), {k: torch.randn(8, 3, 24) for k in "xy"}
def no_batch(): return Stack(24)
def fails(): raise ValueError("no such corpus")
number = 3
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command in an empty folder with `models.py`; its status, message and new files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)

    def command(*arguments, json_output=False):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        status = main([*map(str, arguments), *(["--json"] if json_output else [])])
        captured = capsys.readouterr()
        after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        written = {p.relative_to(tmp_path) for p in after if after[p] != before.get(p)}
        new = {path for path in written if "__pycache__" not in path.parts}
        return status, captured.out, captured.err, new

    return command


def message(err):
    """The error, without the lines of progress before it."""
    steps = ["building", "capturing", "finding", "bounding", "searching", "looking"]
    steps += ["measuring", "proving"]
    lines = [line for line in err.splitlines() if not line.startswith(tuple(_steps(steps)))]
    assert lines and lines[0].startswith("autopar: ")
    assert sum(line.startswith("autopar: ") for line in lines) == 1
    assert "Traceback" not in err and "fault of autopar" not in err
    return "\n".join(lines)


def _steps(words):
    return [f"autopar: {word} " for word in words]


def plan(model="models.py:small", cluster="local:2", *options):
    return ("plan", model, "--cluster", cluster, "-o", "out.json", *options)


NO, BAD = 1, 2

REFUSED = {
    "too small": (
        plan("models.py:small", "local:2", "--memory-limit", "0.00001"),
        NO,
        r"no plan for small fits local:2 \(global batch 8, fp32, adamw\)",
        r"stage 0 needs [\d.]+ KiB of [\d.]+ KiB, \d+ bytes too much: weights [\d.]+ KiB",
        r"cannot hold together: 2 devices, [\d.]+ KiB a device",
        r"one of these would make it fit: [\d.]+ KiB more on every device; \d+ devices",
    ),
    "too small and pinned": (
        plan("models.py:small", "local:2", "--memory-limit", "0.00001", "--pin", "data=2"),
        NO,
        r"no plan for small fits local:2 \(global batch 8, fp32, adamw, data=2\)",
        r"cannot hold together: 2 devices, [\d.]+ KiB a device",  # the pin is not to blame
    ),
    "heads": (
        plan("models.py:heads", "local:3", "--pin", "tensor=3"),
        NO,
        r"tensor=3 is pinned",
        r"its 4 heads cannot be split evenly over 3 ranks",
        r"degrees that fit the heads and the cluster: none",
    ),
    "heads, other degrees": (
        plan("models.py:heads", "local:6", "--pin", "tensor=3"),
        NO,
        r"degrees that fit the heads and the cluster: 2$",
    ),
    "degree and devices": (
        plan("models.py:small", "local:4", "--pin", "tensor=3"),
        BAD,
        r"tensor=3 does not divide 4 devices; degrees that do: 1, 2, 4",
    ),
    "more stages than blocks": (
        plan("models.py:small", "local:16", "--pin", "pipeline=16"),
        BAD,
        r"pipeline=16 is more than the \d+ blocks",
    ),
    "unknown model": (plan("gpt_tinny"), BAD, r"unknown model 'gpt_tinny'; did you mean gpt_tiny"),
    "unknown file": (plan("model.py:small"), BAD, r"model.py:small: no file model.py"),
    "unknown function": (plan("models.py:smal"), BAD, r"no function 'smal' in models.py"),
    "no function": (plan("models.py:number"), BAD, r"no function 'number' in models.py"),
    "unknown module": (plan("no.such:f"), BAD, r"cannot import no.such: ModuleNotFoundError"),
    "no batch": (plan("models.py:no_batch"), BAD, r"must return \(model, batch\).* found Stack"),
    "cluster": (plan("models.py:small", "local:x"), BAD, r"found 'local:x'; examples: "),
    "no devices": (plan("models.py:small", "local:0"), BAD, r"counts of at least 1"),
    "device": (plan("models.py:small", "2x2:h1000"), BAD, r"no device 'h1000'; did you mean h100"),
    "cluster file": (
        plan("models.py:small", "c.yaml"),
        BAD,
        r"cluster file c.yaml: cannot be read",
    ),
    "pin": (plan("models.py:small", "local:2", "--pin", "tensr=2"), BAD, r"did you mean tensor\?"),
    "pinned weight": (
        plan("models.py:small", "local:2", "--pin", "weight:layers.9.weight=R"),
        BAD,
        r"pin weight:layers.9.weight: the model has no such parameter; did you mean layers.",
    ),
    "backend": (
        plan("models.py:small", "local:2", "--backend", "glpk"),
        BAD,
        r"no solver backend 'glpk'; known: highs, cbc",
    ),
    "branch": (
        plan("models.py:branch"),
        BAD,
        r"models.py:\d+: control flow or a size depends on the values of a tensor",
        r"keep sizes fixed: torch.where",
    ),
    "data-dependent shape": (
        plan("models.py:shape"),
        BAD,
        r"models.py:\d+: a tensor's size depends on the values of a tensor",
    ),
    "fails": (plan("models.py:flat"), BAD, r"AttributeError.*undefined"),
    "no folder": (
        ("plan", "models.py:small", "--cluster", "local:2", "-o", "missing/out.json"),
        BAD,
        r"-o missing/out.json: there is no folder missing; make it first",
    ),
    "a folder": (
        ("plan", "models.py:small", "--cluster", "local:2", "-o", "."),
        BAD,
        r"-o \.: is a folder",
    ),
    "accelerators": (
        ("verify", "models.py:small", "--cluster", "8:h100-sxm"),
        BAD,
        r"verify and train start local CPU processes",
    ),
    "precision": (
        ("train", "models.py:small", "--cluster", "local:2", "--precision", "fp8"),
        BAD,
        r"precision fp8 cannot be run: .* choose one of fp64, fp32, bf16, fp16$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_cannot_be_met_is_answered_in_one_message(run, name):
    arguments, expected, *patterns = REFUSED[name]
    status, out, err, new = run(*arguments)
    assert (status, out, new) == (expected, "", set())
    for pattern in patterns:
        assert re.search(pattern, message(err)), message(err)


@pytest.mark.parametrize("name", ["too small", "unknown model", "branch"])
def test_with_json_the_message_is_one_object(run, name):
    arguments, expected, *_ = REFUSED[name]
    status, out, err, new = run(*arguments, json_output=True)
    found = json.loads(out)
    assert (status, new) == (expected, set())
    assert set(found) == {"error", "message"}
    assert message(err) == f"autopar: {found['message']}"


# -- plans -----------------------------------------------------------------------------------------


@pytest.fixture
def planned(run, tmp_path):
    """A folder with a plan for `models.py:small` on two devices."""
    status, _, err, new = run(*plan("models.py:small", "local:2", "--pin", "data=2"))
    assert status == 0, err
    assert [path.name for path in new] == ["out.json"]
    return json.loads((tmp_path / "out.json").read_text())


def truncated(document):
    return json.dumps(document)[:500]


def without_stages(document):
    return json.dumps({key: value for key, value in document.items() if key != "stages"})


def of_a_later_version(document):
    return json.dumps({**document, "version": 99})


def with_a_rank_twice(document):
    stage = {**document["stages"][0], "ranks": [0, 0]}
    return json.dumps({**document, "stages": [stage]})


def with_text_for_a_number(document):
    return json.dumps({**document, "pipeline": "two"})


@pytest.mark.parametrize(
    ("breaks", "pattern"),
    [
        (truncated, r"broken.json: "),
        (without_stages, r"broken.json: stages"),
        (of_a_later_version, r"broken.json: version.*99"),
        (with_a_rank_twice, r"broken.json: the plan contradicts itself.*\n.*rank 0"),
        (with_text_for_a_number, r"broken.json: pipeline"),
    ],
)
@pytest.mark.parametrize("command", ["show", "codegen", "train"])
def test_a_broken_plan_is_named_with_its_field(run, planned, tmp_path, breaks, pattern, command):
    (tmp_path / "broken.json").write_text(breaks(planned))
    arguments = {
        "show": ("show", "broken.json"),
        "codegen": ("codegen", "broken.json", "models.py:small", "-o", "program"),
        "train": ("train", "models.py:small", "--cluster", "local:2", "--plan", "broken.json"),
    }[command]
    status, out, err, new = run(*arguments)
    assert (status, out, new) == (BAD, "", set())
    assert re.search(pattern, message(err), flags=re.DOTALL), message(err)


FOREIGN = {
    "model": (
        ("codegen", "out.json", "models.py:wide", "-o", "program"),
        r"out.json: parameter layers.0.weight: plan has \[24, 24\], model has \[32, 32\]",
    ),
    "cluster": (
        ("verify", "models.py:small", "--cluster", "local:4", "--plan", "out.json"),
        r"number of devices: plan has 2 \(local:2\), cluster has 4 \(local:4\)",
    ),
    "options": (
        (
            "train",
            "models.py:small",
            "--cluster",
            "local:2",
            "--plan",
            "out.json",
            "--pin",
            "data=2",
        ),
        r"--plan out.json with --pin: a plan has these decided",
    ),
    "no folder": (
        ("codegen", "out.json", "models.py:small", "-o", "missing/program"),
        r"-o missing/program: there is no folder missing",
    ),
    "other files": (
        ("codegen", "out.json", "models.py:small", "-o", "."),
        r"-o \.: holds other files than a program",
    ),
    "no plan": (
        ("codegen", "none.json", "models.py:small", "-o", "program"),
        r"cannot read none.json: No such file",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_plan_is_refused_naming_what_differs(run, planned, name):
    arguments, pattern = FOREIGN[name]
    status, out, err, new = run(*arguments)
    assert (status, out, new) == (BAD, "", set())
    assert re.search(pattern, message(err)), message(err)


def test_check_answers_no_to_a_foreign_plan(run, planned):
    status, out, err, new = run("check", "out.json", "models.py:wide")
    assert (status, new) == (NO, set())
    assert out.startswith("out.json: parameter layers.0.weight: plan has [24, 24], model has [32")
    assert "Traceback" not in err
    assert run("check", "out.json", "models.py:small")[0] == 0


def test_a_failed_plan_leaves_the_one_that_was_there(run, planned, tmp_path):
    before = (tmp_path / "out.json").read_text()
    status, _, _, new = run(*plan("models.py:small", "local:2", "--memory-limit", "0.00001"))
    assert (status, new) == (NO, set())
    assert (tmp_path / "out.json").read_text() == before


def test_an_unknown_plan_op_is_answered_with_names(run, planned):
    status, out, err, _ = run("explain", "out.json", "--op", "linaer")
    assert (status, out) == (BAD, "")
    assert "linear" in message(err)


def test_profiling_another_device_than_this_machines_is_refused(capsys, tmp_path):
    path = tmp_path / "p.sqlite"
    words = ["profile", "gpt_tiny", "--cluster", "8:h100-sxm", "--no-measure", "-o", str(path)]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "has h100-sxm, this machine has cpu" in err and not path.exists()


def test_a_profile_of_another_device_is_no_profile_for_a_plan(capsys, tmp_path):
    machine = Machine(device="A GPU", row="a100-80gb", kind="cuda", driver="1", torch="2")
    path = tmp_path / "p.json"
    write_profiles((Profile(machine=machine),), path)
    words = ["plan", "gpt_tiny", "--cluster", "8:h100-sxm", "--profile", str(path)]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"{path}: holds times of a100-80gb (A GPU), the cluster 8:h100-sxm has h100-sxm" in err


def test_profiles_are_shown_merged_and_written(capsys, tmp_path):
    machine = Machine(device="A GPU", row="a100-80gb", kind="cuda", driver="1", torch="2")
    path, out = tmp_path / "p.json", tmp_path / "out.sqlite"
    write_profiles((Profile(machine=machine),), path)
    assert main(["profiles", str(path), str(path), "-o", str(out), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["profiles"]
    assert found["device"] == "A GPU" and found["ops_measured"] == 0
    assert read_profiles(out) == (Profile(machine=machine),)
    assert main(["profiles", str(tmp_path / "none")]) == 2
