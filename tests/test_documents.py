"""Files of ours appear whole or not at all, and those of another version say what was found and what to do."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshwright.executor.measuring.measurement import Measurement
from meshwright.executor.state.checkpoint_folder import Progress
from meshwright.planner.plan.document import Plan
from meshwright.profiler.document import Document, replace_file, write_file
from meshwright.profiler.model.model_profile import ModelProfile
from support.cli import run_plan, small_profile, some_plan

MEASURED = Measurement(
    label="a", model="m", layout="x", num_ranks=1, device="cpu", torch_version="2", steps_s=((1.0,),),
    tokens_per_step=1, peak_memory_bytes=(1,), memory_kind="resident",
)  # fmt: skip
DOCUMENTS: list[Document] = [some_plan(), small_profile(), MEASURED, Progress(steps=3)]


@contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """Files end after so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.noun())
def test_a_document_reads_back_equal(document: Document, tmp_path: Path) -> None:
    document.save(tmp_path / "a.json")

    assert type(document).load(tmp_path / "a.json") == document
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.noun())
def test_another_version_names_both_and_the_way_out(document: Document, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(json.loads(document.model_dump_json()) | {"schema_version": 99}))

    with pytest.raises(ValueError, match="is not a") as raised:
        type(document).load(path)

    said = str(raised.value)
    assert "schema_version 99" in said
    assert f"this version reads {document.schema_version}" in said
    assert f"make it again with: {document.made_by.format(path=path)}" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a Meshwright plan"),
        ('{"kind": "meshwright-profile", "schema_version": 1}', "is not a Meshwright plan"),
        ('{"kind": "meshwright-plan"}', "schema_version None, this version reads 1"),
        ('{"kind": "meshwright-plan", "schema_version": 1}', "is not a valid plan: model: Field required"),
    ],
)
def test_broken_and_foreign_files_are_refused_in_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)

    with pytest.raises(ValueError, match=r"a\.json") as raised:
        Plan.load(tmp_path / "a.json")

    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_says_no_version_is_not_taken_for_this_one(tmp_path: Path) -> None:
    data = json.loads(small_profile().model_dump_json())
    del data["schema_version"]
    (tmp_path / "a.json").write_text(json.dumps(data))

    with pytest.raises(ValueError, match="schema_version None, this version reads 3"):
        ModelProfile.load(tmp_path / "a.json")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    some_plan(shard=2).save(path)

    with full_after(1000), pytest.raises(ValueError, match=r"plan\.json cannot be written: File too large"):
        some_plan(shard=4).save(path)

    assert os.listdir(tmp_path) == ["plan.json"]
    assert Plan.load(path).degrees.num_devices == 2


def test_a_folder_that_cannot_be_written_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ValueError, match="cannot be written: Not a directory; choose another place"):
        write_file(tmp_path / "file" / "a.json", "{}")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "a.json").symlink_to(tmp_path / "there" / "b.json")

    write_file(tmp_path / "a.json", "{}")

    assert (tmp_path / "a.json").is_symlink()
    assert (tmp_path / "there" / "b.json").read_text() == "{}"


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    replace_file(pipe, b"{}")

    assert os.read(reader, 10) == b"{}"
    assert pipe.is_fifo()
    os.close(reader)


def test_a_full_disk_ends_a_command_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small_profile().save(Path("profile.json"))

    with full_after(1000):
        code = run_plan("profile.json", "--gpus", "2", "-o", "plan.json")

    assert code == 2
    assert "plan.json cannot be written: File too large" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["profile.json"]
