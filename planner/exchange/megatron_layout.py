"""Megatron-LM's --pipeline-model-parallel-layout: the string for blocks on each stage, and blocks read from the
string."""

from collections.abc import Iterable, Sequence


def layout_string(counts: Sequence[int]) -> str:
    """The string for so many blocks on each stage, with the embedding on the first, and norm and head on the last."""
    stages = ["t" * count if count < 3 else f"t*{count}" for count in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)


def parse_layout(text: str, pipeline: int, num_blocks: int) -> tuple[int, ...]:
    """Number of blocks on each stage, from a --pipeline-model-parallel-layout such as Et*3|(tt|)*4,L.

    Raises ValueError if it is malformed, holds another number of blocks, or has a stage with nothing on it.
    """
    where = f"--pipeline-model-parallel-layout {text}"
    stages = _unrolled(text.replace(",", ""), where).split("|")
    if "m" in text:
        raise ValueError(f"{where}: multi-token prediction layers (m) are not read")
    flat = "".join(stages)
    if flat != f"E{'t' * flat.count('t')}L":
        raise ValueError(f"{where}: write E, then the blocks as t, then L, with | between stages")
    if flat.count("t") != num_blocks:
        raise ValueError(f"{where}: {flat.count('t')} blocks, the model has {num_blocks}")
    if len(stages) % pipeline:
        raise ValueError(f"{where}: {len(stages)} stages are no multiple of the {pipeline} pipeline ranks")
    if "" in stages:
        raise ValueError(f"{where}: stage {stages.index('')} is empty, which no plan can say; put a block there")
    return tuple(stage.count("t") for stage in stages)


def _unrolled(text: str, where: str) -> str:
    """The text with (pattern)*N and x*N written out."""
    found, place = "", 0
    while place < len(text):
        item, place = text[place], place + 1
        if item == "(":
            end = text.find(")", place)
            if end < 0:
                raise ValueError(f"{where}: a bracket is not closed")
            item, place = _unrolled(text[place:end], where), end + 1
        digits = ""
        if text[place : place + 1] == "*":
            digits = "".join(_digits(text[place + 1 :]))
            place += 1 + len(digits)
        found += item * int(digits or 1)
    return found


def _digits(text: str) -> Iterable[str]:
    for letter in text:
        if not letter.isdecimal():
            return
        yield letter
