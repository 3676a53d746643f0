"""Settings of other frameworks as people have them are read as the frameworks read them, or asked about; none silently.

data/launch holds twenty for each framework, written by hand in their style, and what each means.
"""

import itertools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exports.targets import torchtitan_job
from meshwright.planner.exchange.given import Kind, read_given
from meshwright.planner.exchange.imports import Layout, Said, with_flags
from meshwright.planner.exchange.shell import read_script, shown
from meshwright.profiler.model.model_profile import ModelProfile
from support.cli import run_plan
from support.exported import MIXTURE, PROFILE

DATA = Path(__file__).parent / "data" / "launch"

Case = tuple[str, str, dict[str, Any]]


def cases(*folders: str) -> list[Any]:
    found: list[Any] = []
    for folder in folders:
        expected = json.loads((DATA / folder / "expected.json").read_text())
        found += [pytest.param(folder, name, each, id=f"{folder}/{name}") for name, each in expected.items()]
    return found


def decoder_of(blocks: int, experts: bool) -> ModelProfile:
    """The decoder with so many blocks; only their number is read."""
    plain = MIXTURE if experts else PROFILE
    first, block, last = plain.layers[0], plain.layers[1], plain.layers[-1]
    names = [f"model.layers.{i}" for i in range(blocks)]
    row = [
        block.model_copy(
            update={
                "name": name,
                "root": name,
                "modules": (name,),
                "parameters": tuple(f"{name}{p.removeprefix(block.root)}" for p in block.parameters),
            }
        )
        for name in names
    ]
    return plain.model_copy(update={"layers": (first, *row, last)})


def layout_of(folder: str, name: str, case: dict[str, Any]) -> Layout:
    kind: Kind = case.get("kind", folder)
    given = read_given(kind, str(DATA / folder / name), case.get("environment", {}))
    profile = decoder_of(case.get("blocks", 32), case.get("experts", False))
    return with_flags(given.layout(case["gpus"], profile), Said(**case.get("flags", {})))


@pytest.mark.parametrize(("folder", "name", "case"), cases("megatron", "torchtitan", "accelerate", "deepspeed", "nemo"))
def test_settings_as_people_have_them_are_read_or_asked_about(folder: str, name: str, case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(ValueError, match=re.escape(case["error"])):
            layout_of(folder, name, case)
        return

    found = layout_of(folder, name, case)

    said = {field: getattr(found, field) for field in case["layout"]}
    assert json.loads(json.dumps(said)) == case["layout"]
    for note in case.get("notes", []):
        assert any(note in each for each in found.notes)
    for key in case.get("ignored", []):
        assert key in found.ignored


def test_there_are_twenty_for_each_framework() -> None:
    for folder in ("megatron", "torchtitan", "accelerate", "deepspeed"):
        expected = json.loads((DATA / folder / "expected.json").read_text())
        assert len(expected) == 20
        assert {path.name for path in (DATA / folder).iterdir()} >= {name.partition(":")[0] for name in expected}


def theirs(name: str) -> Any:
    """A module of a framework, or a skip where it is not installed; its own warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def read_cases(folder: str) -> list[tuple[str, Path, dict[str, Any], Layout]]:
    """Those that are read, each with its file and what is read."""
    expected = json.loads((DATA / folder / "expected.json").read_text())
    good = {name: case for name, case in expected.items() if "error" not in case}
    return [(name, DATA / folder / name, case, layout_of(folder, name, case)) for name, case in good.items()]


def test_accelerate_reads_the_same_of_its_files() -> None:
    config = theirs("accelerate.commands.config.config_args").ClusterConfig
    for name, path, case, found in read_cases("accelerate"):
        read = config.from_yaml_file(path)

        assert read.num_processes == case["gpus"], name
        assert read.distributed_type in ("FSDP", "MULTI_GPU", "DEEPSPEED", "MEGATRON_LM")
        if read.distributed_type == "DEEPSPEED" and "zero_stage" in read.deepspeed_config:
            assert (read.deepspeed_config["zero_stage"] == 3) == (found.reshard == "all"), name
        if read.distributed_type == "MEGATRON_LM":
            assert read.megatron_lm_config["megatron_lm_tp_degree"] == found.tensor, name


def test_deepspeed_reads_the_same_of_its_zero_sections() -> None:
    config = theirs("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    for name, path, _, found in read_cases("deepspeed"):
        section = json.loads(path.read_text()).get("zero_optimization", {})
        said = {key: value for key, value in section.items() if value != "auto"}

        read = config(**said)

        stage = 3 if found.reshard == "all" else 2 if found.sync_every else int(found.data_shard > 1)
        assert int(read.stage) == stage, name
        assert (read.offload_optimizer is not None and read.offload_optimizer.device != "none") == (
            found.offload_optimizer
        ), name


def test_torchtitan_parses_the_same_of_its_command_lines() -> None:
    for name in ("tyro", "torchtitan.config.configs"):
        theirs(name)
    tried = 0
    for name, path, case, found in read_cases("torchtitan"):
        words = read_given("torchtitan", str(path), case.get("environment", {})).command.words
        if path.suffix not in (".sh", ".txt", ".slurm") or any(word.startswith("--job") for word in words):
            continue
        own = list(itertools.dropwhile(lambda word: not word.startswith(("--parallelism.", "--training.")), words))

        read = torchtitan_job(own)

        tried += 1
        assert read.parallelism.tensor_parallel_degree == found.tensor, name
        assert read.parallelism.pipeline_parallel_degree == found.pipeline, name
        assert read.parallelism.context_parallel_degree == found.context, name
        assert read.parallelism.expert_parallel_degree == found.expert, name
        assert read.parallelism.data_parallel_shard_degree in (-1, found.data_shard), name
    assert tried > 5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--deepspeed", "deepspeed/hf_zero3.json"), "give --precision bf16"),
        (("--deepspeed", "deepspeed/zero2.json", "--micro-batch", "4"), "--micro-batch 4, but the settings say 2"),
        (("--deepspeed", "deepspeed/zero2.json", "--optimizer", "sgd", "--precision", "bf17"), "--precision bf17"),
        (("--megatron-args", "megatron/fp8_hybrid.sh", "--seq-len", "4096"), "--seq-len 4096, but the settings say"),
        (("--megatron-args", "megatron/fp8_hybrid.sh", "--gpus", "16"), "the settings start 8 processes"),
        (("--torchtitan-args", "torchtitan/missing_config.sh"), "my_own.toml"),
        (("--accelerate", "accelerate/fsdp2_contradicts.yaml"), "contradicts fsdp_reshard_after_forward"),
        (("--nemo", "nemo/bridge_open.py"), "the expression tp"),
    ],
)
def test_what_settings_leave_open_or_flags_contradict_is_said(
    words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = decoder_of(32, experts=False).model_copy(update={"seq_len": 4096})
    model.save(tmp_path / "decoder.json")
    flag, file, *others = words
    gpus = () if "--gpus" in others else ("--gpus", "8")

    code = run_plan("check", str(tmp_path / "decoder.json"), *gpus, flag, str(DATA / file), *others)

    assert code == 2
    both = capsys.readouterr()
    assert sentence in " ".join((both.out + both.err).split())


def test_a_launch_script_is_checked_on_the_gpus_that_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder_of(32, experts=False).save(tmp_path / "decoder.json")
    script = tmp_path / "train.sh"
    script.write_text(
        "TP=${TP:-2}\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --bf16 --micro-batch-size 1 \\\n"
        "  --global-batch-size 16 --tensor-model-parallel-size $TP --use-distributed-optimizer $MORE\n"
    )

    code = run_plan("check", str(tmp_path / "decoder.json"), "--megatron-args", str(script), "--time-limit", "2")

    printed = " ".join(capsys.readouterr().out.split())
    assert code in (0, 3)
    assert "8 x h100-80gb" in printed
    assert "more arguments may come from ${MORE}" in printed
    assert "ZeRO-1 over 4 + TP 2" in printed


SCRIPTS = [
    ("A=1; B=$((A + 2 * 3)); run --x $B", ("run", "--x", "7")),
    ("A='x y'; run \"$A\" $A", ("run", "x y", "x", "y")),
    ("A=(1 '2 3'); A+=(4); run \"${A[@]}\"", ("run", "1", "2 3", "4")),
    ("A=1\nif [ $A -eq 2 ]; then B=x; elif [[ $A == 1 ]]; then B=y; else B=z; fi\nrun $B", ("run", "y")),
    ("case $S in a) B=1 ;; b|c) B=2 ;; esac\nrun $B", ("run", "${B}")),
    ("S=c; case $S in a) B=1 ;; b|c) B=2 ;; esac\nrun $B", ("run", "2")),
    ("if [ -f x ]; then B=1; fi\nrun ${B:-3}", ("run", "${B}")),
    ("run a \\\n  b # c\n", ("run", "a", "b")),
    ("run ${X:-$Y} ${Z:-4}", ("run", "${Y}", "4")),
    ("run $(nproc --all) `hostname`", ("run", "$(nproc --all)", "$(hostname)")),
    ("A=b; srun -n 2 bash -c 'run $A'", ("run", "b")),
    ("FOO=1 run --a=$FOO 2>&1 | tee log", ("run", "--a=${FOO}")),
    ("cat <<E\nrun no\nE\nrun yes > out.txt", ("run", "yes")),
]


@pytest.mark.parametrize(("script", "words"), SCRIPTS)
def test_a_script_is_read_as_a_shell_would_run_it(script: str, words: tuple[str, ...]) -> None:
    found = [each for each in read_script(script).commands if each[0] == "run"]

    assert tuple(map(shown, found[0])) == words


@pytest.mark.parametrize("script", ["run 'a", 'run "a', "run $(a", "A=(1 2\nrun"])
def test_what_is_not_closed_is_said_with_its_line(script: str) -> None:
    with pytest.raises(ValueError, match="in line 1 is not closed"):
        read_script(script)


@pytest.mark.parametrize(
    ("kind", "name"), [("megatron", "a.sh"), ("torchtitan", "a.toml"), ("deepspeed", "a.json"), ("nemo", "a.py")]
)
def test_what_is_no_text_is_said(kind: Kind, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(bytes(range(128, 256)))

    with pytest.raises(ValueError, match="is no text file"):
        read_given(kind, str(tmp_path / name))
