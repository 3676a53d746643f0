"""Model files of a folder, each asked for several plans: profiled, planned and verified, or refused with a rule."""

import json
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import shape_of
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.trace import trace

from .outcomes import FAILURES, Kind, answered

_ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"pipeline": 2},
    {"data_shard": 4},
    {"tensor": 2},
    {"pipeline": 2, "schedule": "zb-h1"},
    {"pipeline": 2, "data_shard": 2},
    {"data_replicate": 4},
    {"data_replicate": 4, "micro_batch": 2},
    {"data_replicate": 4, "micro_batch": 1},
    {"pipeline": 2, "schedule": "interleaved"},
    {"data_shard": 2, "data_replicate": 2, "recompute": "full"},
)
"""What a model is asked for, until so many different plans of it have been verified: the open question first."""

_LONGEST_S = 1800.0


@dataclass(frozen=True)
class Answer:
    """What a model file was answered. asked: pins, or "profile". said: the plan, or the rule, or what went wrong."""

    asked: str
    kind: Kind
    said: str
    cpu_s: float


def table_of(paths: Iterable[Path], plans: int) -> Iterator[tuple[str, list[Answer]]]:
    """(name, answers) of each model file, each in a process of its own: what one does to it is gone with it."""
    context = multiprocessing.get_context("fork")
    for path in paths:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(sender, path, plans))
        process.start()
        sender.close()
        answers: list[Answer] = []
        until = time.monotonic() + _LONGEST_S
        try:
            while receiver.poll(max(0.0, until - time.monotonic())):
                answers.append(receiver.recv())
            answers.append(Answer("", "failed", f"no answer within {_LONGEST_S:.0f} s", 0.0))
        except EOFError:
            process.join()
            if process.exitcode:
                answers.append(Answer("", "failed", f"the process ended with {process.exitcode}", 0.0))
        process.kill()
        yield path.stem, answers


def _send(sender: Connection, path: Path, plans: int) -> None:
    warnings.simplefilter("ignore")
    for answer in _answers(path, plans):
        sender.send(answer)


def _answers(path: Path, plans: int) -> Iterator[Answer]:
    began = time.process_time()
    try:
        loaded = load_model(path)
        profile = trace(loaded)
    except ValueError as error:
        yield Answer("profile", "refused", str(error), time.process_time() - began)
        return
    except Exception:
        yield Answer("profile", "traceback", traceback.format_exc(), time.process_time() - began)
        return
    said = {"micro_batch": 4} if profile.coupling else {}
    yield Answer("profile", "verified", f"{len(profile.layers)} layers", time.process_time() - began)
    seen: list[str] = []

    def differs(plan: Plan) -> bool:
        return _label(plan) not in seen

    for pins in _ASKED:
        if len(seen) == plans:
            return
        began = time.process_time()
        kind, words, found = answered(loaded, profile, {**said, **pins}, differs)
        label = _label(found.plan) if found is not None else ""
        if label in seen:
            continue
        seen += [label] if kind == "verified" else []
        asked = ", ".join(f"{name}={value}" for name, value in {**said, **pins}.items()) or "nothing pinned"
        yield Answer(asked, kind, words or label, time.process_time() - began)


def _label(plan: Plan) -> str:
    return f"{shape_of(plan).label}, {plan.num_microbatches} x {plan.micro_batch} samples"


def is_well(answers: list[Answer], plans: int) -> bool:
    """Whether a model was refused by a rule, or each of its plans verified and fewer of them only for rules' sake."""
    kinds = [answer.kind for answer in answers if answer.asked != "profile"]
    if any(answer.kind in FAILURES for answer in answers):
        return False
    return not kinds or kinds.count("verified") >= min(plans, 1)


def written(table: dict[str, list[Answer]], output: Path) -> None:
    """Writes the table as JSON and for readers."""
    output.mkdir(parents=True, exist_ok=True)
    data = {name: [asdict(answer) for answer in answers] for name, answers in table.items()}
    (output / "folder.json").write_text(json.dumps(data, indent=1) + "\n")
    lines = ["| model | asked | outcome | plan or rule | CPU s |", "|---|---|---|---|---|"]
    for name, answers in table.items():
        for answer in answers:
            said = " ".join(answer.said.split()).replace("|", "\\|")
            lines.append(f"| {name} | {answer.asked} | {answer.kind} | {said} | {answer.cpu_s:.1f} |")
    (output / "folder.md").write_text("\n".join(lines) + "\n")
