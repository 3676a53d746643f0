"""A value that contradicts another in a framework's settings is named with it: refused, or said where it counts not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.exchange.given import Kind, read_given
from meshwright.planner.exchange.imports import Layout
from support.exported import PROFILE

MEGATRON = "--micro-batch-size 1 --global-batch-size 64 --bf16"
FSDP = "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
DEEPSPEED = FSDP.replace("FSDP", "DEEPSPEED")


def all_of(words: tuple[str, str]) -> str:
    """A pattern of texts that hold all words, in any order."""
    return "".join(f"(?=.*{re.escape(each)})" for each in words)


def read(kind: Kind, text: str) -> Layout:
    return read_given(kind, text, {}).layout(8, PROFILE)


@pytest.mark.parametrize(
    ("kind", "text", "both"),
    [
        ("megatron", "--fp16", ("--bf16", "--fp16")),
        (
            "megatron",
            "--recompute-activations --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            ("--recompute-activations", "--recompute-granularity full"),
        ),
        (
            "megatron",
            "--recompute-granularity selective --recompute-method uniform",
            ("--recompute-granularity selective", "--recompute-method uniform"),
        ),
        ("megatron", "--use-torch-fsdp2 --use-megatron-fsdp", ("--use-torch-fsdp2", "--use-megatron-fsdp")),
        (
            "megatron",
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*4|t*4L "
            "--decoder-first-pipeline-num-layers 3",
            ("--pipeline-model-parallel-layout Et*4|t*4L", "--decoder-first-pipeline-num-layers 3"),
        ),
        (
            "megatron",
            "--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split "
            "--decoder-first-pipeline-num-layers 3",
            ("--account-for-loss-in-pipeline-split", "--decoder-first-pipeline-num-layers 3"),
        ),
        (
            "megatron",
            "--num-virtual-stages-per-pipeline-rank 2",
            ("--num-virtual-stages-per-pipeline-rank 2", "--pipeline-model-parallel-size 1"),
        ),
        (
            "torchtitan",
            "--activation_checkpoint.mode none activation_checkpoint:full",
            ("activation_checkpoint:full", "--activation_checkpoint.mode none"),
        ),
        (
            "torchtitan",
            "--parallelism.data_parallel_shard_degree 4",
            ("--parallelism.data_parallel_shard_degree 4", "8 GPUs"),
        ),
    ],
)
def test_arguments_that_contradict_each_other_are_both_named(kind: Kind, text: str, both: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=all_of(both)):
        read(kind, f"{MEGATRON} {text}" if kind == "megatron" else text)


@pytest.mark.parametrize(
    ("kind", "text", "note"),
    [
        (
            "megatron",
            "--tensor-model-parallel-size 2 --tensor-model-parallel-size 4",
            "--tensor-model-parallel-size 2 and later --tensor-model-parallel-size 4: the last counts",
        ),
        ("megatron", "--sequence-parallel", "--sequence-parallel has no effect without tensor parallelism"),
        ("megatron", "--cp-comm-type a2a", "--cp-comm-type a2a has no effect without --context-parallel-size"),
        (
            "megatron",
            "--data-parallel-sharding-strategy optim",
            "--data-parallel-sharding-strategy optim has no effect without --use-megatron-fsdp",
        ),
        (
            "torchtitan",
            "--training.local_batch_size 8 --training.batch_size 4",
            "--training.local_batch_size 8 and later --training.batch_size 4: the last counts",
        ),
        (
            "torchtitan",
            "--compile.enable --compile.no-enable",
            "--compile.enable and later --compile.no-enable: the last counts",
        ),
        (
            "torchtitan",
            "--parallelism.pipeline_parallel_schedule GPipe",
            "--parallelism.pipeline_parallel_schedule GPipe has no effect without pipeline_parallel_degree",
        ),
    ],
)
def test_arguments_that_count_not_are_said(kind: Kind, text: str, note: str) -> None:
    assert note in read(kind, f"{MEGATRON} {text}" if kind == "megatron" else text).notes


@pytest.mark.parametrize(
    ("text", "both"),
    [
        (
            f"{FSDP}fsdp_config:\n  fsdp_reshard_after_forward: true\n  fsdp_reshard_after_forward: false\n",
            ("fsdp_reshard_after_forward", "as True and as False"),
        ),
        (FSDP.replace("FSDP", "'NO'"), ("distributed_type: NO", "num_processes: 8")),
        (f"{FSDP}num_machines: 3\n", ("num_machines: 3", "num_processes: 8")),
        (f"{FSDP}gpu_ids: '0,1,2'\n", ("gpu_ids: 0,1,2", "num_processes: 8")),
        (
            f"{DEEPSPEED}deepspeed_config:\n  deepspeed_config_file: half.json\n",
            ("mixed_precision: bf16", "half.json says fp16"),
        ),
        (
            f"{DEEPSPEED}deepspeed_config:\n  zero_stage: 0\n  offload_optimizer_device: cpu\n",
            ("device: cpu", "stage: 0"),
        ),
        (
            f"{DEEPSPEED}parallelism_config:\n  parallelism_config_tp_size: 2\n",
            ("parallelism_config_tp_size: 2", "distributed_type: DEEPSPEED"),
        ),
        (
            f"{FSDP}fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\nnum_machines: 2\nparallelism_config:\n"
            "  parallelism_config_dp_replicate_size: 4\n",
            ("parallelism_config_dp_replicate_size: 4", "num_machines: 2"),
        ),
        (
            f"{FSDP}fsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\nparallelism_config:\n"
            "  parallelism_config_dp_shard_size: 8\n",
            ("parallelism_config_dp_shard_size: 8", "NO_SHARD"),
        ),
    ],
)
def test_keys_of_accelerate_that_contradict_each_other_are_both_named(
    text: str, both: tuple[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "half.json").write_text(json.dumps({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    (tmp_path / "c.yaml").write_text(text)

    with pytest.raises(ValueError, match=all_of(both)):
        read("accelerate", str(tmp_path / "c.yaml"))


def test_a_merged_key_may_be_written_again_and_keys_that_are_lists_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "c.yaml").write_text(
        f"{FSDP}fsdp_config: &both\n  fsdp_version: 2\nparallelism_config:\n  <<: {{parallelism_config_tp_size: 1}}\n"
        "  parallelism_config_tp_size: 2\n"
    )
    assert read("accelerate", str(tmp_path / "c.yaml")).tensor == 2

    (tmp_path / "c.yaml").write_text("? [a]\n: 1\n")
    with pytest.raises(ValueError, match="is not YAML"):
        read("accelerate", str(tmp_path / "c.yaml"))


def test_a_section_that_its_kind_does_not_read_is_said(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "c.yaml").write_text(f"{FSDP}deepspeed_config:\n  zero_stage: 3\nmegatron_lm_config: {{}}\n")

    notes = read("accelerate", str(tmp_path / "c.yaml")).notes

    assert [note for note in notes if "no effect" in note] == [
        "deepspeed_config has no effect beside distributed_type: FSDP"
    ]


ON: dict[str, Any] = {"enabled": True}


@pytest.mark.parametrize(
    ("text", "both"),
    [
        ('{"zero_optimization": {"stage": 2, "stage": 3}}', ("stage is there twice", "as 2 and as 3")),
        (
            json.dumps({"bf16": ON, "bfloat16": {"enabled": False}}),
            ("bfloat16.enabled: False", "bf16.enabled: True"),
        ),
        (json.dumps({"fp16": ON, "bfloat16": ON}), ("bf16.enabled", "fp16.enabled")),
        (json.dumps({"bf16": ON, "amp": ON}), ("amp", "use bf16 or fp16")),
        (
            json.dumps({"bf16": ON, "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}),
            ("offload_optimizer.device: cpu", "stage: 0"),
        ),
        (json.dumps({"bf16": ON, "zero_optimization": {"stage": 2, "cpu_offload": True}}), ("cpu_offload", "dropped")),
        (
            json.dumps({"bf16": ON, "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}),
            ("tp.tp_size: 4", "autotp_size: 2"),
        ),
    ],
)
def test_keys_of_deepspeed_that_contradict_each_other_are_both_named(
    text: str, both: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(text)

    with pytest.raises(ValueError, match=all_of(both)):
        read("deepspeed", str(tmp_path / "ds.json"))


def test_bf16_by_its_old_name_is_bf16(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"bfloat16": ON}))

    assert read("deepspeed", str(tmp_path / "ds.json")).precision == "bf16"
