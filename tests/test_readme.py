"""The README tells the truth: its commands are the ones CI runs, its flags exist, its links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest
import typer

import meshwright.executor.cli as cli
from meshwright.executor.commands.answers import EXIT_CODES
from meshwright.executor.reporting.report import certificate_line
from meshwright.planner.plan.document import load_plan
from support.cli import run_plan

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TWO_COMMANDS = (
    "pip install -e . && plan benchmarks/models/gpt.py --gpus 8",
    "pip install -e '.[test]' && pytest",
)


def command_problems(readme: str, ci: str) -> list[str]:
    """Which of the two commands is missing where."""
    lines = readme.splitlines()
    return [f"README: {c}" for c in TWO_COMMANDS if c not in lines] + [
        f".ci/run: {c}" for c in TWO_COMMANDS if c not in ci
    ]


def plan_calls(readme: str) -> list[list[str]]:
    """Words of every `plan ...` line in a code block, without its comment."""
    blocks = re.findall(r"```sh\n(.*?)```", readme, re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    calls = [line.split(" && ")[-1] for line in lines]
    return [shlex.split(call, comments=True)[1:] for call in calls if call.startswith("plan ")]


def flag_problems(readme: str) -> list[str]:
    """Flags in the README that the command they follow does not have."""
    found = []
    for words in plan_calls(readme):
        name, rest = cli.route(words)
        app = cli.SUBCOMMANDS.get(name, cli.plan_app)
        known = {flag for option in typer.main.get_command(app).params for flag in option.opts}
        found += [f"plan {name}: {word}" for word in rest if word.startswith("-") and word not in known]
    everything = {
        flag
        for app in (cli.plan_app, *cli.SUBCOMMANDS.values())
        for option in typer.main.get_command(app).params
        for flag in option.opts
    }
    mentioned = set(re.findall(r"`(--[a-z-]+)", readme))
    return found + sorted(mentioned - everything)


def link_problems(readme: str, root: Path) -> list[str]:
    """Relative links that lead nowhere."""
    links = re.findall(r"\]\(([^)#]+)\)", readme)
    return [link for link in links if "://" not in link and not (root / link).exists()]


def test_the_two_commands_are_there_and_are_what_ci_runs() -> None:
    assert command_problems(README, (ROOT / ".ci" / "run").read_text()) == []


def test_every_exit_code_is_there_with_its_meaning() -> None:
    said = " ".join(README.split())

    assert f"Exit codes: {', '.join(f'{code} {meaning}' for code, meaning in EXIT_CODES.items())}." in said


def test_every_flag_exists() -> None:
    assert len(plan_calls(README)) >= 10
    assert flag_problems(README) == []


@pytest.mark.parametrize("name", ["README.md", "benchmarks/README.md", "CHANGELOG.md"])
def test_relative_links_lead_somewhere(name: str) -> None:
    path = ROOT / name

    assert link_problems(path.read_text(), path.parent) == []


def test_the_documents_name_no_path_of_a_machine() -> None:
    for name in ("README.md", "benchmarks/README.md", "CHANGELOG.md", ".ci/run"):
        assert not re.search(r"(?<![\w.])/(work|tmp|home|root|opt)/", (ROOT / name).read_text()), name


def test_planted_faults_are_found(tmp_path: Path) -> None:
    ci = "\n".join(TWO_COMMANDS)

    assert command_problems(README, ci.replace("--gpus 8", "--gpus 4")) == [f".ci/run: {TWO_COMMANDS[0]}"]
    assert command_problems(README.replace("&& pytest", "; pytest"), ci) == [f"README: {TWO_COMMANDS[1]}"]
    assert flag_problems("```sh\nplan model.py --gpu 8\n```") == ["plan : --gpu"]
    assert flag_problems("```sh\nplan compare model.py --pin tensor=4\n```") == ["plan compare: --pin"]
    assert flag_problems("give `--devices`") == ["--devices"]
    assert link_problems("[a](nowhere.md) [b](https://example.org)", tmp_path) == ["nowhere.md"]


def test_the_errors_that_are_quoted_are_those_of_the_fit() -> None:
    fit = (ROOT / "benchmarks" / "published" / "fitted" / "fit.md").read_text()
    quoted = (ROOT / "benchmarks" / "README.md").read_text()
    told = (ROOT / "docs" / "predictions.md").read_text()

    rows = re.search(r", (\d+) rows, ", fit)
    assert rows is not None
    assert f"fitted on {rows[1]} published training runs" in told
    for name, here, there in (
        ("dense 16 bit", "dense, bf16 and fp16", "step time, dense models in 16 bit"),
        ("dense low precision", "dense, fp8 and fp4", "dense models in fp8 and fp4"),
        ("moe 16 bit", "mixtures, bf16", "mixtures of experts in 16 bit"),
        ("moe low precision", "mixtures, fp8", "mixtures of experts in fp8"),
    ):
        found = re.search(rf"^\| {name} \|(.*)\|[^|]*\|$", fit, re.M)  # the last column is the bias
        assert found is not None
        assert f"| {here} |{found[1]}|" in quoted, name
        median, tenth = found[1].split("|")[3].strip().split(" / ")  # sources out
        assert re.search(rf"^\| {there} \|.*\| {median} in the median, {tenth} for one run in ten \|$", told, re.M), (
            name
        )


@pytest.mark.slow
def test_the_certificate_that_is_explained_is_the_one_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    assert run_plan("benchmarks/models/gpt.py", "--gpus", "8", "--device", "h100-80gb", "-q") == 0

    (quoted,) = re.findall(r"^    (optimal: .*\n    .*)$", README, re.M)
    printed = certificate_line(load_plan(tmp_path / "plan.json"))
    took = r"[\d,]+ pruned by bound \+ \d+ solved|, [\d.]+ m?s$"  # what depends on the machine
    assert re.sub(took, "", " ".join(quoted.split())) == re.sub(took, "", printed)
