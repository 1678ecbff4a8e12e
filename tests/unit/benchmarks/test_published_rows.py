"""Published rows as jobs: models, clusters, pins, measured times, and which part they are in."""

from __future__ import annotations

import json
import re

import pytest
from replay.frameworks import ATTENTION, FLASH_1, framework_of
from replay.model import build, parameters
from replay.rows import Unpriced, is_oom, job, left_out, measured_s, read_rows
from replay.split import part

from autopar.costs.clusters import parse_cluster
from autopar.errors import InputError

SC21 = {
    "id": "a",
    "dataset": "Megatron-LM SC21 Table 1",
    "status": "ok",
    "task": "pretrain",
    "params_b": 145.6,
    "layers": 80,
    "hidden": 12288,
    "heads": 96,
    "ffn": 49152,
    "vocab": 51200,
    "seq_len": 2048,
    "gpu": "A100-80GB-SXM",
    "n_gpus": 1536,
    "gpus_per_node": 8,
    "internode_gbps_per_gpu": 200,
    "precision": "fp16 mixed",
    "global_batch_seqs": 2304,
    "micro_batch_seqs": 2,
    "tp": 8,
    "pp": 8,
    "vpp": 2,
    "sequence_parallel": False,
    "zero_stage": 0,
    "recompute": "full",
    "framework": "Megatron-LM",
    "measured_tflops_per_gpu": 148,
}
LLAMA = {
    **SC21,
    "dataset": "somewhere",
    "params_b": 8.03,
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "gpu": "H100-80GB-SXM",
    "n_gpus": 8,
    "precision": "bf16",
    "global_batch_seqs": 64,
    "micro_batch_seqs": 1,
    "tp": 2,
    "pp": 1,
    "vpp": 1,
    "sequence_parallel": True,
    "zero_stage": 1,
    "recompute": "selective (core attention)",
    "framework": "NeMo",
    "measured_tokens_per_s_per_gpu": 8192.0,
}


def test_a_plan_becomes_pins():
    pins = dict(job(SC21).pins)
    assert pins == {
        "pipeline": "8",
        "tensor": "8",
        "context": "1",
        "data": "24",
        "micro_batch": "2",
        "sequence": "off",
        "schedule": "interleaved-1f1b",
        "chunks": "2",
        "recompute": "all",
        "zero": "0",
    }
    other = dict(job(LLAMA).pins)
    assert (other["sequence"], other["schedule"], other["recompute"]) == ("on", "1f1b", "selective")
    assert (other["data"], other["zero"]) == ("4", "1")


def test_devices_and_links_become_a_cluster():
    cluster = parse_cluster(job(SC21).cluster)
    assert (cluster.num_devices, cluster.groups[0].device.name) == (1536, "a100-80gb")
    assert cluster.links[-1].bandwidth_bytes_s == pytest.approx(0.92 * 25e9)
    few = {**SC21, "intranode_link": 'NVLink3 (8 GPUs, "NVLink 4 inter-gpu connects")'}
    usual, slow = (parse_cluster(job(row).cluster).links[0] for row in (SC21, few))
    assert slow.bandwidth_bytes_s == pytest.approx(usual.bandwidth_bytes_s / 3, rel=1e-3)
    assert job(LLAMA).cluster == "8:h100-sxm"


def test_the_model_is_the_one_with_the_published_parameter_count():
    gpt, llama = job(SC21).architecture, job(LLAMA).architecture
    assert (gpt.gated, gpt.fused_attention, gpt.dropout, gpt.dtype) == (
        False,
        False,
        0.1,
        "float16",
    )
    assert (llama.gated, llama.tied, llama.fused_attention, llama.kv_heads) == (
        True,
        False,
        True,
        8,
    )
    for row, architecture in ((SC21, gpt), (LLAMA, llama)):
        count = parameters(architecture, row["layers"])
        assert count == pytest.approx(row["params_b"] * 1e9, rel=0.01)
        model, _ = build(architecture, 1, 1)
        own = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        assert own == parameters(architecture, 1)


def test_times_are_seconds_or_tokens_or_the_papers_own_formula():
    assert measured_s({**SC21, "iteration_s": 3.0}) == 3.0
    assert measured_s(LLAMA) == 64 * 2048 / (8192.0 * 8)
    tokens, layers, hidden = 2304 * 2048, 80, 12288
    flops = 96 * tokens * layers * hidden**2
    flops *= 1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)
    assert measured_s(SC21) == pytest.approx(flops / (148e12 * 1536))
    assert measured_s({**SC21, "status": "oom"}) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"task": "lora"}, "task lora"),
        ({"precision": "nvfp4"}, "narrower than fp8"),
        ({"offload": "full CPU offload"}, "offloads"),
        ({"gpu": "TPUv4"}, "no such row"),
        ({"heads": None}, "not published: heads"),
        ({"tp": 7}, "does not divide"),
        ({"micro_batch_seqs": 5}, "do not make up"),
        ({"recompute": "full on 20 of 32 layers"}, "recompute"),
        ({"pipeline_schedule": "DualPipe"}, "schedule DualPipe"),
    ],
)
def test_what_cannot_be_priced_says_why(change, why):
    with pytest.raises(Unpriced, match=why):
        job({**SC21, **change})


def test_rows_that_say_nothing_are_left_out_with_the_reason():
    assert left_out(SC21) is None
    assert left_out({**SC21, "checks": ["mfu"]}) == "its own numbers disagree"
    assert left_out({**SC21, "status": "failed (nan: OOM or crash)"}).startswith("status failed")
    assert left_out({**SC21, "measured_tflops_per_gpu": None, "recompute": None}) == "no step time"
    oom = {**SC21, "status": "oom"}
    assert is_oom(oom) and left_out(oom) is None


def test_frameworks_are_found_by_how_their_name_begins():
    assert framework_of({"framework": "Megatron-LM v1"}).execution.scatters
    assert not framework_of({"framework": "Megatron-DeepSpeed"}).execution.scatters
    assert framework_of({"framework": "Megatron-Core r0.8.0"}).execution.early_sync >= {0, 1}
    assert not framework_of({"framework": "torchtitan"}).execution.fuses
    assert framework_of({"framework": "torchtitan FSDP2"}).execution.fuses


def test_a_source_tells_the_version_of_its_framework():
    early = framework_of({"framework": "Megatron-LM", "dataset": "Megatron-LM SC21 Table 1"})
    late = framework_of({"framework": "Megatron-LM", "dataset": "Korthikanti 2022 Table 5"})
    assert not early.execution.fuses_accumulation
    assert late.execution.fuses_accumulation


def test_attention_is_as_fast_as_its_kernel_on_the_device():
    fsdp = {**LLAMA, "framework": "Composer/LLM-Foundry FSDP"}
    assert job(fsdp).execution.attention == ATTENTION[FLASH_1, "h100"]
    assert job({**fsdp, "attention_kernel": "flash_attention2"}).execution.attention == 0.58
    assert job({**fsdp, "gpu": "A100-80GB-SXM"}).execution.attention == 0.5
    assert job(LLAMA).execution.attention == 1.0
    assert not job({**fsdp, "attention_kernel": "fused"}).architecture.fused_attention


def test_messages_hide_where_stages_are_interleaved_and_norms_run_whole_without_sequence_split():
    assert not job(LLAMA).execution.hides_messages
    deep = {**LLAMA, "pp": 2, "tp": 1, "vpp": 2, "sequence_parallel": False}
    assert job(deep).execution.hides_messages
    assert job(LLAMA).execution.whole_outside == ()
    assert "attention" in job(deep).execution.whole_outside


def test_sources_say_what_their_rows_do_not(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"dataset": "SC21 Fig 14 (PP x DP)", "hidden": 8, "id": "a"}
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "dataset": "other"}))
    assert [r.get("ffn") for r in read_rows([path])] == [32, None]


def test_a_model_of_another_size_than_published_is_not_priced():
    assert job(SC21).layers == 80
    with pytest.raises(Unpriced, match="another parameter count"):
        job({**SC21, "layers": 70})


def test_whole_sources_are_split_by_device_and_the_two_tables_are_held_out():
    def rows(source: str, count: int, gpu: str = "A100-80GB-SXM") -> list[dict[str, object]]:
        return [{**LLAMA, "dataset": source, "gpu": gpu}] * count

    found = part(
        [
            *rows("Korthikanti 2022 Table 5", 9),
            *rows("SC21 Fig 13", 9),
            *rows("large", 5),
            *rows("middle", 4),
            *rows("small", 3),
            *rows("other device", 1, "H100-80GB-SXM"),
        ]
    )
    assert found == {
        "Korthikanti 2022 Table 5": "test",
        "SC21 Fig 13": "test",
        "large": "fit",
        "middle": "test",
        "small": "fit",
        "other device": "fit",
    }


def test_the_split_of_the_rows_that_come_with_the_benchmarks():
    from published import DATA

    found = part(read_rows([DATA]))
    fit = {source for source, name in found.items() if name == "fit"}
    assert {"HF Ultra-Scale Playbook benchmarks_interactive"} < fit
    assert any(source.startswith("Hagemann") for source in fit)
    assert any(source.startswith("BLOOM") for source in fit)
    assert not any(source.startswith(("Megatron-LM SC21", "SC21", "Korthikanti")) for source in fit)
    assert "llm-foundry MPT benchmarks" not in fit


DEEPSPEED = {
    **SC21,
    "dataset": "somewhere",
    "framework": "DeepSpeed",
    "params_b": 1.0,
    "n_gpus": 64,
    "internode_gbps_per_gpu": 1.25,
    "global_batch_seqs": 1024,
    "micro_batch_seqs": 1,
    "tp": 1,
    "pp": 1,
    "zero_stage": 3,
    "iteration_s": 100.0,
}


def test_a_run_that_had_no_time_for_what_its_plan_moves_is_left_out():
    """16 times 2 GB of weights and as much of gradients, of which a node of 8 has an eighth itself,
    over 1.25 GB/s."""
    least_s = 16 * 2 * 2 * 7 / 8 / 1.25
    assert left_out({**DEEPSPEED, "iteration_s": 1.01 * least_s}) is None
    assert "network" in left_out({**DEEPSPEED, "iteration_s": 0.99 * least_s})
    other = {**DEEPSPEED, "iteration_s": 0.99 * least_s}
    assert left_out({**other, "zero_stage": 1}) is None
    assert left_out({**other, "n_gpus": 8}) is None
    assert left_out({**other, "micro_batch_seqs": 2}) is None


def test_instances_of_several_sizes_are_groups_of_the_cluster(tmp_path):
    """As the source says it of its second case: four devices share a card, or one has its own."""
    row = {**SC21, "dataset": "DT-FM NeurIPS22 Case 2 (64 V100)", "gpu": "V100-16GB", "n_gpus": 64}
    row |= {"pp": 1, "vpp": 1, "global_batch_seqs": 64}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (read,) = read_rows([tmp_path / "rows.jsonl"])
    cluster = parse_cluster(job(read).cluster)
    assert [(g.nodes, g.devices_per_node) for g in cluster.groups] == [(8, 4), (32, 1)]
    near, own, shared = (cluster.link(pair) for pair in ((0, 1), (32, 33), (0, 4)))
    assert near.name == "node"
    assert own.bandwidth_bytes_s == 4 * shared.bandwidth_bytes_s


def test_how_many_stages_a_rank_has_must_be_published_where_recipes_choose_it():
    row = {**SC21, "framework": "NeMo", "zero_stage": 1}
    assert ("chunks", "2") in job(row).pins
    with pytest.raises(Unpriced, match="stages of a rank"):
        job({key: value for key, value in row.items() if key != "vpp"})


def test_a_loss_on_gathered_logits_is_priced_where_the_framework_has_it():
    assert job({**LLAMA, "framework": "AA-Scaling (DeepSpeed/Megatron-like)"}).execution.whole_loss
    assert not job(LLAMA).execution.whole_loss


WHOLE = {
    **{"id": "a", "dataset": "b", "status": "ok", "gpu": "A100-80GB-SXM", "iteration_s": 2.0},
    **{"layers": 4, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 512, "seq_len": 32},
    **{"n_gpus": 8, "global_batch_seqs": 16, "micro_batch_seqs": 1, "tp": 2, "pp": 2, "vpp": 1},
}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layers": "many"}, "layers: expected a whole number from 1, found 'many'"),
        ({"tp": 0}, "tp: expected a whole number from 1, found 0"),
        ({"pp": 1.5}, "pp: expected a whole number from 1, found 1.5"),
        ({"iteration_s": -1}, "iteration_s: expected a number above 0, found -1"),
        ({"zero_stage": True}, "zero_stage: expected a ZeRO level, 0 to 3, found True"),
        ({"framework": ["x"]}, r"framework: expected a text, found \['x'\]"),
    ],
)
def test_a_line_that_is_malformed_is_left_out_with_the_reason(tmp_path, changes, why):
    file = tmp_path / "runs.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in (WHOLE, WHOLE | changes)))
    sound, wrong = read_rows([file])
    assert left_out(sound) is None
    assert job(sound).layers == 4
    assert re.fullmatch(f"malformed: {why}", left_out(wrong) or "")
    with pytest.raises(Unpriced, match=why):
        job(wrong)


def test_fields_that_are_null_or_missing_are_not_known(tmp_path):
    file = tmp_path / "mine.jsonl"
    less = {name: value for name, value in WHOLE.items() if name not in ("id", "dataset")}
    file.write_text(f"\n{json.dumps(less | {'kv_heads': None, 'moe_experts': 8})}\n")
    (row,) = read_rows([file])
    assert (row["dataset"], row["id"]) == ("mine", "line 2")
    assert "kv_heads" not in row
    with pytest.raises(Unpriced, match="not published: moe_ffn, moe_top_k"):
        job(row)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "runs.jsonl:1: expected one JSON object a line"), ("[1]", "found a list")],
)
def test_a_file_that_holds_no_runs_is_refused(tmp_path, text, message):
    file = tmp_path / "runs.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        list(read_rows([file]))
    with pytest.raises(InputError, match="cannot be read"):
        list(read_rows([tmp_path / "nothing.jsonl"]))
