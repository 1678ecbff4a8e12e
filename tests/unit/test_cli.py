"""The command line: its text, its exit statuses, what goes to stdout and what to stderr.

`python tests/unit/test_cli.py` rewrites the golden help text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import autopar
from autopar import commands, devices
from autopar.cli import COMMANDS, build_parser, main
from autopar.costs.clusters import parse_cluster
from autopar.errors import InfeasiblePlan, PlanMismatch, RuntimeFailure
from autopar.plan.serialize import read_plan, to_json

PIPES = {"capture_output": True, "text": True}
GOLDEN = Path(__file__).parent.parent / "golden" / "cli_help.txt"


def help_text():
    """Help of the program and of every command."""
    parser = build_parser()
    choices = parser._subparsers._group_actions[0].choices
    return "\n".join([parser.format_help(), *(choices[name].format_help() for name in COMMANDS)])


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse lays help out otherwise")
def test_help_is_the_golden_text():
    assert help_text() == GOLDEN.read_text(), "run: python tests/unit/test_cli.py, and review"


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from autopar.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pulp', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, **PIPES)
    assert result.stderr == "" and result.returncode == 0
    assert result.stdout.startswith("usage: autopar")


def test_a_command_multiplies_by_one_thread():
    code = (
        "import os, sys\nfrom autopar.cli import main\nmain(['hardware'])\n"
        "import numpy\na = numpy.ones((2000, 2000))\na @ a\n"
        "print(len(os.listdir('/proc/self/task')), file=sys.stderr)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, check=True, env=environment, **PIPES)
    assert result.stderr.split()[-1] == "1"


def test_the_program_ends_with_its_status_once_all_is_said():
    code = (
        "import atexit, sys\nfrom autopar.cli import run\natexit.register(print, 'last')\n"
        "sys.argv = ['autopar', 'plan', 'nosuch', '--cluster', '8:h100-sxm', '--json']\nrun()"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, **PIPES)
    said, last = result.stdout.splitlines()
    assert (result.returncode, json.loads(said)["error"], last) == (2, "InputError", "last")


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("autopar ")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The fields of `compiler.PlanOptions`."""

    global_batch: int | None = None
    precision: str = "fp32"
    optimizer: str = "adamw"
    pins: tuple[tuple[str, str], ...] = ()
    memory_limit_bytes: int | None = None
    time_limit_s: float = 60.0
    gap: float = 0.0
    top: int | None = None
    backend: str = "highs"
    workers: int = field(default=1, compare=False)
    cache_dir: Path | None = field(default=None, compare=False)


@dataclass
class Compiler:
    """Stands in for `compiler` and `local`: notes its calls, raises `error` where one is set."""

    plan: object
    calls: list = field(default_factory=list)
    measured: list = field(default_factory=list)
    error: BaseException | None = None
    ok: bool = True
    PlanOptions = Options

    def _note(self, *call):
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def measured_cluster(self, spec, *, progress):
        self.measured.append(spec)
        return parse_cluster(spec)

    def load_source(self, spec, *, seq_len):
        self.calls.append(("load", spec, seq_len))
        return SimpleNamespace(name=spec)

    def plan_source(self, source, cluster, options, progress):
        progress("capturing", None)
        progress("solving grids", 0.5)
        progress("solving grids", 1.0)
        self._note("plan", source.name, cluster.spec, options)
        return SimpleNamespace(plan=self.plan)

    def build_meta(self, source, options):
        self.calls.append(("build", source.name, options))
        return "model", {"x": 1}, "loss"

    def adopt_plan(self, plan, model, batch, *, loss_fn, progress):
        assert (model, batch, loss_fn) == ("model", {"x": 1}, "loss")
        progress("capturing", None)
        self._note("adopt", plan.model.name)
        return SimpleNamespace(plan=plan)

    def write_program(self, planned, folder):
        self._note("write", str(folder))
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "plan.json").write_text(to_json(planned.plan))

    def verify_source(self, source, cluster, options, plan, progress):
        self._note("verify", source.name, cluster.spec, options, plan)
        return SimpleNamespace(
            ok=self.ok, text="loss equal", as_dict=lambda: {"ok": self.ok, "loss": "equal"}
        )

    def train_source(self, source, cluster, options, plan, steps, progress):
        self._note("train", source.name, cluster.spec, options, plan, steps)
        return {"steps": steps, "last loss": 1.5}


@pytest.fixture
def compiler(sample_plan, monkeypatch):
    fake = Compiler(plan=sample_plan)
    for name in ("compiler", "local"):
        monkeypatch.setitem(sys.modules, f"autopar.{name}", fake)
        monkeypatch.setattr(autopar, name, fake, raising=False)
    monkeypatch.setattr(devices, "measured_cluster", fake.measured_cluster)
    return fake


@pytest.fixture
def plan_file(sample_plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(to_json(sample_plan))
    return str(path)


@pytest.fixture
def run(capsys):
    """Run a command line; gives status, stdout, stderr."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def fails(result, status, message):
    """One message on stderr and nothing else."""
    assert result[0] == status
    assert result[1] == ""
    assert result[2].startswith(f"autopar: {message}")
    assert "Traceback" not in result[2]
    return True


@pytest.mark.parametrize(
    ("given", "workers", "folder"),
    [
        ((), 5, "plans"),
        (("--workers", "3", "--no-cache"), 3, None),
        (("--workers", "1", "--cache-dir", "own"), 1, "own"),
    ],
)
def test_workers_and_the_cache_are_those_at_hand_or_asked_for(
    run, compiler, monkeypatch, given, workers, folder
):
    monkeypatch.setattr(commands.os, "sched_getaffinity", lambda pid: set(range(5)), raising=False)
    monkeypatch.setattr(devices, "plans_folder", lambda: Path("plans"))
    assert run("plan", "gpt_tiny", "--cluster", "local:4", *given)[0] == 0
    options = compiler.calls[-1][-1]
    assert (options.workers, options.cache_dir) == (workers, folder and Path(folder))


def test_a_folder_and_no_cache_are_not_asked_for_together(run):
    result = run("plan", "mlp", "--cluster", "local:4", "--no-cache", "--cache-dir", "own")
    assert fails(result, 2, "--cache-dir own with --no-cache")


def test_plan_prints_and_writes(run, compiler, sample_plan, tmp_path):
    target = tmp_path / "out.json"
    status, out, err = run("plan", "gpt_tiny", "--cluster", "local:4", "-o", target)
    assert status == 0
    assert "pipeline 2 x data 2 x tensor 2" in out
    assert err.splitlines() == [
        "autopar: capturing",
        "autopar: solving grids",
        f"autopar: wrote {target}",
    ]
    assert target.read_text() == to_json(sample_plan)
    assert compiler.calls == [
        ("load", "gpt_tiny", None),
        ("plan", "gpt_tiny", "local:4", Options()),
    ]


def test_a_plan_is_written_before_its_reader_may_go(
    run, compiler, sample_plan, tmp_path, monkeypatch
):
    def gone(*_):
        raise OSError

    monkeypatch.setattr("autopar.commands.print_result", gone)
    target = tmp_path / "out.json"
    run("plan", "gpt_tiny", "--cluster", "local:4", "-o", target)
    assert target.read_text() == to_json(sample_plan)


def test_options_reach_the_compiler(run, compiler):
    run(
        *("plan", "m.py:f", "--cluster", "8:h100-sxm", "--global-batch", "64", "--seq-len", "128"),
        *("--precision", "bf16", "--optimizer", "sgd", "--memory-limit", "1.5"),
        *("--time-limit", "9", "--backend", "cbc", "--pin", "tensor=2", "--pin", "boundary=a.1"),
        *("--pin", "boundary=a.2", "--pin", "weight:a.w=S(0)", "--gap", "0.02", "--top", "3"),
    )
    assert compiler.calls[0] == ("load", "m.py:f", 128)
    assert compiler.calls[1][3] == Options(
        global_batch=64,
        precision="bf16",
        optimizer="sgd",
        memory_limit_bytes=3 * 2**29,
        time_limit_s=9.0,
        gap=0.02,
        top=3,
        backend="cbc",
        pins=(
            ("tensor", "2"),
            ("boundary", "a.1"),
            ("boundary", "a.2"),
            ("weight:a.w", "S(0)"),
        ),
    )


PLAN = ("plan", "gpt_tiny", "--cluster", "local:4")

BAD_USAGE = [
    ((), "the following arguments are required: COMMAND; see 'autopar --help'"),
    (("fly",), "argument COMMAND: invalid choice: 'fly'"),
    (
        ("plan",),
        "the following arguments are required: MODEL, --cluster; see 'autopar plan --help'",
    ),
    (("plan", "gpt_tiny"), "the following arguments are required: --cluster"),
    (
        (*PLAN, "--global-batch", "0"),
        "argument --global-batch: expected a whole number of at least",
    ),
    ((*PLAN, "--global-batch", "-3"), "argument --global-batch: expected a whole number of at"),
    ((*PLAN, "--seq-len", "1e3"), "argument --seq-len: expected a whole number of at least 1"),
    ((*PLAN, "--memory-limit", "nan"), "argument --memory-limit: expected a number above 0, found"),
    ((*PLAN, "--time-limit", "0"), "argument --time-limit: expected a number above 0, found '0'"),
    ((*PLAN, "--gap", "1"), "argument --gap: expected a share between 0 and 1, found '1'"),
    ((*PLAN, "--top", "0"), "argument --top: expected a whole number of at least 1, found '0'"),
    ((*PLAN, "--precision", "int3"), "argument --precision: invalid choice: 'int3'"),
    ((*PLAN, "--glob", "3"), "unrecognized arguments: --glob 3"),
    ((*PLAN, "--pin", "tensor"), "argument --pin: expected KEY=VALUE, found 'tensor'"),
    ((*PLAN, "--pin", "=2"), "argument --pin: expected KEY=VALUE, found '=2'"),
    ((*PLAN, "--pin", "tensor=two"), "pin tensor=two: expected a whole number"),
    ((*PLAN, "--pin", "tensr=2"), "unknown pin 'tensr'; did you mean tensor"),
    (
        (*PLAN, "--pin", "colour=2"),
        "unknown pin 'colour'; known pins: pipeline, data, context, tensor",
    ),
    ((*PLAN, "--pin", "schedule=fast"), "pin schedule=fast: expected one of gpipe, 1f1b"),
    (
        (*PLAN, "--pin", "recompute=some"),
        "pin recompute=some: expected one of none, selective, all",
    ),
    ((*PLAN, "--pin", "zero=4"), "pin zero=4: expected one of 0, 1, 2, 3"),
    ((*PLAN, "--pin", "weight:a=Q"), "pin weight:a=Q: not a placement: 'Q'"),
    ((*PLAN, "--pin", "data=2", "--pin", "data=4"), "pin data is given twice: 2 and 4"),
    ((*PLAN, "-o", "no/such/plan.json"), "-o no/such/plan.json: there is no folder no/such"),
    ((*PLAN, "-o", "/"), "-o /: is a folder; give the name of a file"),
    (("codegen", "p.json"), "the following arguments are required: -o/--output"),
    (("codegen", "p.json", "-o", "no/such/dir"), "-o no/such/dir: there is no folder no/such"),
    (("codegen", "p.json", "-o", __file__), f"-o {__file__}: is a file; give the name of a folder"),
    (
        ("codegen", "p.json", "-o", os.path.dirname(__file__)),
        f"-o {os.path.dirname(__file__)}: holds other files than a program",
    ),
    (("show", "no.json"), "cannot read no.json: No such file or directory"),
    (("train", "m", "--cluster", "local:2", "--steps", "0"), "argument --steps: expected a whole"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_USAGE, ids=[m[:50] for _, m in BAD_USAGE])
def test_bad_usage_is_refused_before_the_work(run, compiler, arguments, message):
    assert fails(run(*arguments), 2, message)
    assert compiler.calls == []


@pytest.mark.parametrize("key", ["pipeline", "data", "tensor", "schedule", "boundary", "weight"])
def test_help_names_every_pin(key):
    assert key in GOLDEN.read_text()


@pytest.mark.parametrize("command", ["plan", "verify", "train"])
def test_local_processes_are_priced_as_measured_unless_told_not_to(run, compiler, command):
    run(command, "gpt_tiny", "--cluster", "local:4")
    assert compiler.measured == ["local:4"]
    status, _, _ = run(command, "gpt_tiny", "--cluster", "local:2", "--no-measure")
    assert (status, compiler.measured) == (0, ["local:4"])
    assert compiler.calls[-1][2] == "local:2"


def test_errors_have_their_status(run, compiler):
    compiler.error = InfeasiblePlan("stage 0 needs 83.1 GiB of 79.0")
    assert run(*PLAN)[2].splitlines()[-1] == "autopar: stage 0 needs 83.1 GiB of 79.0"
    assert run(*PLAN)[:2] == (1, "")
    compiler.error = RuntimeFailure("rank 1 failed")
    assert run(*PLAN)[0] == 1
    compiler.error = KeyboardInterrupt()
    status, out, err = run(*PLAN)
    assert (status, out, err.splitlines()[-1]) == (130, "", "autopar: interrupted")


def test_a_fault_is_reported_in_short_and_in_full(run, compiler):
    compiler.error = ZeroDivisionError("division by zero")
    status, out, err = run(*PLAN)
    assert (status, out) == (70, "")
    assert "autopar: ZeroDivisionError: division by zero (" in err and "--debug" in err
    assert "Traceback" not in err
    status, _, err = run(*PLAN, "--debug")
    assert status == 70 and "Traceback" in err and "with --debug" not in err


def test_json_is_one_object_and_nothing_else(run, compiler, plan_file, tmp_path):
    for arguments in (
        PLAN,
        ("show", plan_file),
        ("explain", plan_file),
        ("explain", plan_file, "--op", "linear"),
        ("diff", plan_file, plan_file),
        ("check", plan_file),
        ("check", plan_file, "gpt_tiny"),
        ("codegen", plan_file, "-o", tmp_path / "program"),
        ("verify", "gpt_tiny", "--cluster", "local:4"),
        ("train", "gpt_tiny", "--cluster", "local:4"),
        ("hardware",),
        ("zoo",),
    ):
        status, out, _ = run(*arguments, "--json")
        assert status == 0, arguments
        assert isinstance(json.loads(out), dict), arguments


def test_json_of_a_failure(run, compiler):
    compiler.error = InfeasiblePlan("does not fit")
    status, out, err = run(*PLAN, "--json")
    assert status == 1
    assert json.loads(out) == {"error": "InfeasiblePlan", "message": "does not fit"}
    assert err.splitlines()[-1] == "autopar: does not fit"
    status, out, _ = run("plan", "--json")
    assert status == 2 and json.loads(out)["error"] == "InputError"


def test_show_and_explain(run, plan_file):
    status, out, err = run("show", plan_file)
    assert (status, err) == (0, "") and "column-parallel linear" in out
    assert "What bounds the step" in run("explain", plan_file)[1]
    assert "op linear_1 of variant layer" in run("explain", plan_file, "--op", "linear_1")[1]
    assert fails(
        run("explain", plan_file, "--op", "linaer_1"), 2, "no op or parameter 'linaer_1' in the"
    )


def test_diff(run, plan_file, sample_plan, tmp_path):
    assert run("diff", plan_file, plan_file)[:2] == (0, "the plans are identical\n")
    other = tmp_path / "other.json"
    other.write_text(to_json(replace(sample_plan, schedule="gpipe")))
    assert "schedule 1f1b -> pipeline" in run("diff", plan_file, other)[1]
    data = json.loads(run("diff", plan_file, other, "--json")[1])
    assert data["changes"] == [{"path": "schedule", "a": "1f1b", "b": "gpipe"}]


def test_check_answers(run, compiler, plan_file, sample_plan, tmp_path):
    assert run("check", plan_file)[:2] == (
        0,
        f"{plan_file}: sound, made for sample on 2x4:test-gpu\n",
    )
    assert compiler.calls == []
    assert run("check", plan_file, "other")[0] == 0
    assert compiler.calls == [
        ("load", "other", 32),
        ("build", "other", Options(precision="bf16")),
        ("adopt", "sample"),
    ]
    run("check", plan_file, "models.py:other")
    assert compiler.calls[3] == ("load", "models.py:other", None)
    compiler.error = PlanMismatch("parameter w: plan has [64], model has [96]")
    status, out, err = run("check", plan_file, "other")
    assert (status, err) == (1, "autopar: capturing\n")
    assert out == f"{plan_file}: parameter w: plan has [64], model has [96]\n"
    unsound = tmp_path / "unsound.json"
    unsound.write_text(to_json(replace(sample_plan, pipeline=3)))
    status, out, _ = run("check", unsound, "--json")
    assert status == 1
    assert json.loads(out)["problems"] == ["pipeline: expected 2, the number of stages, found 3"]


def test_unsound_plans_are_not_used(run, compiler, sample_plan, tmp_path):
    unsound = tmp_path / "unsound.json"
    unsound.write_text(to_json(replace(sample_plan, pipeline=3)))
    for arguments in (
        ("show", unsound),
        ("explain", unsound),
        ("diff", unsound, unsound),
        ("codegen", unsound, "-o", tmp_path / "program"),
        ("verify", "m", "--cluster", "local:4", "--plan", unsound),
    ):
        assert fails(run(*arguments), 2, f"{unsound}: the plan contradicts itself in 1 place:")
    assert compiler.calls == []


def test_codegen(run, compiler, plan_file, sample_plan, tmp_path):
    folder = tmp_path / "program"
    status, out, _ = run("codegen", plan_file, "-o", folder)
    assert (status, out) == (0, f"{folder}/plan.json\n")
    assert [call[:2] for call in compiler.calls] == [
        ("load", "sample"),
        ("build", "sample"),
        ("adopt", "sample"),
        ("write", str(folder)),
    ]
    assert run("codegen", plan_file, "other", "-o", folder)[0] == 0
    assert compiler.calls[4] == ("load", "other", 32)
    compiler.error = PlanMismatch("op list: differs")
    status, _, err = run("codegen", plan_file, "other", "-o", folder)
    assert (status, err.splitlines()[-1]) == (2, f"autopar: {plan_file}: op list: differs")


def test_verify_answers_with_its_status(run, compiler, plan_file):
    status, out, _ = run("verify", "gpt_tiny", "--cluster", "local:4", "--pin", "tensor=2")
    assert (status, out) == (0, "loss equal\n")
    assert compiler.calls[-1][3:] == (Options(pins=(("tensor", "2"),)), None)
    compiler.ok = False
    assert run("verify", "gpt_tiny", "--cluster", "local:4")[0] == 1


def test_a_given_plan_brings_its_setup(run, compiler, plan_file):
    arguments = ("train", "gpt_tiny", "--cluster", "local:4", "--plan", plan_file)
    status, out, _ = run(*arguments, "--steps", "3")
    assert (status, out) == (0, "steps: 3\nlast loss: 1.5\n")
    options = Options(global_batch=32, precision="bf16")
    assert compiler.calls == [
        ("load", "gpt_tiny", 32),
        ("train", "gpt_tiny", "local:4", options, read_plan(plan_file), 3),
    ]
    assert fails(
        run(*arguments, "--pin", "tensor=2", "--seq-len", "9"),
        2,
        f"--plan {plan_file} with --seq-len, --pin: a plan has these decided",
    )


def test_hardware(run):
    status, out, err = run("hardware")
    assert (status, err) == (0, "")
    assert "h100-sxm" in out and "Sources" in out
    devices = json.loads(run("hardware", "--json")[1])["devices"]
    h100 = next(row for row in devices if row["device"]["name"] == "h100-sxm")
    assert h100["device"]["peak_flops"]["bfloat16"] == 989e12


def test_zoo(run):
    pytest.importorskip("torch")
    status, out, err = run("zoo")
    assert (status, err) == (0, "")
    assert any(line.split()[:2] == ["llama3_405b", "405.9B"] for line in out.splitlines())
    models = json.loads(run("zoo", "--json")[1])["models"]
    assert {"name", "parameters", "seq_len", "source", "family"} == set(models[0])


MALFORMED = {
    "empty": b"",
    "truncated": b'{"version": 1, "model": {"name": "x"',
    "binary": b"\x80\x04\x95\x00pickle",
    "yaml": b"version: 1\n",
    "list": b"[1, 2]",
    "number": b"7",
    "nan": b'{"version": NaN}',
    "deep": b"[" * 200_000,
    "long number": b'{"version": ' + b"1" * 10_000 + b"}",
    "no version": b"{}",
    "old version": b'{"version": 0}',
    "empty plan": b'{"version": 1}',
    "twice": b'{"version": 1, "version": 1}',
    "escapes": b'{"version": 1, "\\u001b[31mred": 1}',
    "surrogate": b'{"version": 1, "\\ud800": 1}',
    "utf-16": '{"version": 1}'.encode("utf-16"),
}


@pytest.mark.parametrize("command", ["show", "check", "explain"])
@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_plan_gets_one_clear_line(run, tmp_path, command, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    status, out, err = run(command, path)
    assert (status, out) == (2, "")
    assert err.startswith(f"autopar: {path}: ")
    assert err.count("\n") == 1 and err.strip().isprintable()


def test_a_closed_pipe_ends_quietly(plan_file):
    command = f"{sys.executable} -m autopar show {plan_file} | true"
    result = subprocess.run(command, shell=True, check=False, **PIPES)
    assert result.stderr == ""


def test_the_bar_is_for_terminals(monkeypatch):
    import io

    from autopar.progress import progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress(stream) as report:
        report("capturing", None)
        report("solving [grids]", 0.25)
    assert "solving [grids]" in stream.getvalue()


def test_lines_tell_the_time_left_where_it_is_known():
    import io

    from autopar.progress import progress

    now_s = iter([0.0, 5.0, 30.0, 31.0, 300.0])
    stream = io.StringIO()
    with progress(stream, timed=True, clock=lambda: next(now_s)) as report:
        for fraction in (None, 0.1, 0.25, 0.26, 0.5):
            report("measuring", fraction)
    assert stream.getvalue().splitlines() == [
        "autopar: measuring",
        "autopar: measuring, 25%, 90 s left",
        "autopar: measuring, 50%, 5 min left",
    ]


if __name__ == "__main__":
    GOLDEN.write_text(help_text())
