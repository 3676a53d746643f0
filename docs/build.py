"""Build the documentation: references from code, links and code blocks checked, and a site of plain HTML.

    python -m docs.build                 # writes docs/reference and docs/site
    python -m docs.build --run           # also runs every block, page by page
    python -m docs.build --run --outputs # and writes what the blocks print into the pages
    python -m docs.build --check         # writes nothing: are the references current, do links lead somewhere?

Of a page's fenced blocks, `sh` and `python` are run in the page's own empty folder, with the repository's benchmarks
beside it; `sh exit=3` ends so. Blocks with file=NAME are written there first. `text output` holds what the block above
prints (its first lines, by lines=N), and is refused where that is something else now, but for how long a search took
and what it left open; `text output measured` holds what hangs on this machine. Others are only shown.
"""

import argparse
import importlib.util
import inspect
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from markdown_it import MarkdownIt
from pydantic import BaseModel

import meshwright as mw
from meshwright.executor.cli import SUBCOMMANDS
from meshwright.executor.commands.answers import EXIT_CODES
from meshwright.executor.reporting.glossary import TERMS
from meshwright.profiler.machine.cluster import Link
from meshwright.profiler.machine.instances import instances
from meshwright.profiler.model.model_profile import LayerClass, LayerProfile

DOCS = Path(__file__).parent
ROOT = DOCS.parent

ORDER = (
    "README.md",
    "start.md",
    "how-to-choose.md",
    "tutorials/eight-gpus.md",
    "tutorials/cluster-file.md",
    "tutorials/train-and-resume.md",
    "tutorials/megatron-script.md",
    "tutorials/lora.md",
    "tutorials/rented-gpus.md",
    "tutorials/tune.md",
    "tutorials/frameworks.md",
    "reference/cli.md",
    "reference/api.md",
    "reference/documents.md",
    "reference/machines.md",
    "predictions.md",
    "architecture.md",
    "glossary.md",
    "faq.md",
)
"""The pages, as a reader goes through them."""

_FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_GENERATED = "<!-- written by python -m docs.build; edit the code instead -->\n"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, what follows that, its content, and where the content stands."""

    language: str
    options: tuple[str, ...]
    content: str
    start: int
    end: int

    def option(self, name: str) -> str | None:
        """The value of NAME=VALUE behind the language."""
        return next((o.partition("=")[2] for o in self.options if o.startswith(f"{name}=")), None)


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    found = []
    for match in _FENCE.finditer(text):
        words = tuple(match.group(2).split())
        found.append(Block(match.group(1), words, match.group(3), match.start(3), match.end(3)))
    return found


# ---- references from code


def references() -> dict[str, str]:
    """Page -> its text, of all that are written from code."""
    return {
        "reference/cli.md": _GENERATED + _cli(),
        "reference/api.md": _GENERATED + _api(),
        "reference/documents.md": _GENERATED + _documents(),
        "reference/machines.md": _GENERATED + _machines(),
        "glossary.md": _GENERATED + _glossary(),
    }


def _cli() -> str:
    lines = [
        "# Command line",
        "",
        "`plan`, `meshwright` and `python -m meshwright` are the same command. `plan MODEL` is short for `plan plan "
        f"MODEL`. Exit codes: {', '.join(f'{code} {meaning}' for code, meaning in EXIT_CODES.items())}.",
    ]
    for name, app in SUBCOMMANDS.items():
        command = typer.main.get_command(app)
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join(["plan", name, *(str(p.metavar or p.name) for p in arguments), "[OPTIONS]"])
        lines += ["", f"## plan {name}", "", f"    {usage}", "", " ".join((command.help or "").split()), ""]
        rows = []
        for p in command.params:
            if p.param_type_name == "option" and p.name != "help":
                flags = ", ".join(f"`{flag}`" for flag in (*p.opts, *p.secondary_opts))
                rows.append((flags, p.metavar or "", getattr(p, "help", None) or "", _default(p)))
        lines += _table(("flag", "takes", "meaning", "default"), rows)
    return "\n".join(lines) + "\n"


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or value == () or parameter.required:
        return ""
    return f"`{getattr(value, 'value', value)}`"


_WITH_MEMBERS = ("Metrics", "Planned", "Trainer")
"""Classes whose methods and properties are documented, too."""


def _api() -> str:
    lines = [
        "# Python",
        "",
        "    import meshwright as mw",
        "",
        "Every name is imported when it is first used; planning from a profile loads no torch. Arguments mean what the "
        "flags of the same names mean. Bad input raises `ValueError` with the command's own sentence, and a job that "
        "fits nowhere `mw.InfeasibleError`.",
    ]
    for name in mw.__all__:
        value = getattr(mw, name)
        if callable(value) and not inspect.isclass(value):
            lines += ["", f"## mw.{name}", "", *_code(f"mw.{name}{_signature(value)}"), "", *_prose(value)]
        elif inspect.isclass(value):
            lines += ["", f"## mw.{name}", "", *_prose(value)]
            if name in _WITH_MEMBERS:
                for part, member in vars(value).items():
                    if part.startswith("_") or not getattr(member, "__doc__", None):
                        continue
                    shown = _signature(member) if inspect.isfunction(member) else ""
                    lines += [
                        "",
                        f"### {name}.{part}",
                        "",
                        *(_code(f"{part}{shown}") if shown else []),
                        "",
                        *_prose(member),
                    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Place:
    """Where the text of a number goes."""

    number: int

    def __repr__(self) -> str:
        return f"<{self.number}>"


def _signature(function: Any) -> str:
    signature, words = inspect.signature(function), list[str]()
    parameters = []
    for each in signature.parameters.values():
        if isinstance(each.default, str | Path):  # kept whole: "plan.json" is no name in a module
            words.append(f'"{each.default}"')
            each = each.replace(default=_Place(len(words) - 1))
        parameters.append(each)
    text = str(signature.replace(parameters=parameters)).replace("self, ", "").replace("(self)", "()").replace("'", "")
    text = re.sub(r"(?:[a-z_]\w*\.)+(\w+)", r"\1", text)  # names without their modules; 1.0 stays
    text = re.sub(r"<(\d+)>", lambda place: words[int(place[1])], text)
    if len(text) <= 90:
        return text
    head, _, tail = text.rpartition(") ->")
    parts = _split_top(head[1:] if tail else text[1:-1])
    end = f") ->{tail}" if tail else ")"
    return "(\n    " + ",\n    ".join(parts) + ",\n" + end


def _split_top(text: str) -> list[str]:
    """Parts between the commas that stand in no brackets."""
    parts, depth, last = [], 0, 0
    for i, char in enumerate(text):
        depth += char in "[({"
        depth -= char in "])}"
        if char == "," and depth == 0:
            parts.append(text[last:i].strip())
            last = i + 1
    return [*parts, text[last:].strip()]


def _code(text: str) -> list[str]:
    return ["```text", text, "```"]


def _prose(value: Any) -> list[str]:
    """A docstring, its indented continuation lines joined, for Markdown."""
    words = inspect.getdoc(value) or ""
    return [re.sub(r"\n\s{2,}", " ", words)]


def _documents() -> str:
    lines = [
        "# Documents",
        "",
        "Plans and profiles are JSON; they say of which kind and version they are, are written whole or not at all, "
        "and are refused when a field is unknown. `plan show plan.json --json` prints one.",
    ]
    for model in (mw.Plan, *_parts(mw.Plan), mw.ModelProfile, LayerClass, LayerProfile):
        lines += ["", f"## {model.__name__}", "", *_prose(model), "", *_fields(model)]
    return "\n".join(lines) + "\n"


def _parts(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The models that fields of a model hold, which are of the same file."""
    found: dict[str, type[BaseModel]] = {}
    todo = [model]
    while todo:
        for field in todo.pop().model_fields.values():
            for part in _models_in(field.annotation):
                if part.__module__ == model.__module__ and part.__name__ not in found and part is not model:
                    found[part.__name__] = part
                    todo.append(part)
    return list(found.values())


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)


def _fields(model: type[BaseModel]) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        default = "" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        shown = default if len(default) < 40 else ""
        rows.append((f"`{name}`", f"`{_type(field.annotation)}`", field.description or "", shown))
    return _table(("field", "type", "meaning", "default"), rows)


def _type(annotation: Any) -> str:
    """A type as people write it: `dict[str, float]`, `int or None`; constraints are left out."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0])
    if origin is Literal:
        return " or ".join(repr(part) for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(map(_type, parts))
    if annotation is type(None):
        return "None"
    name = getattr(origin or annotation, "__name__", str(annotation))
    return f"{name}[{', '.join('...' if part is ... else _type(part) for part in parts)}]" if parts else name


def _machines() -> str:
    lines = [
        "# Device and cluster files",
        "",
        "`--device` takes a preset's name or the path of a TOML with these fields; `plan calibrate -o device.toml` "
        'writes one. Rates are texts such as `"3.35 TB/s"`, sizes such as `"79 GiB"`, times such as `"5 us"`. '
        "`[sources]` says of every number where it comes from.",
        "",
        "## Device",
        "",
        *_fields(mw.Device),
        "",
        "## Link",
        "",
        "`[link]` is between devices of a host, per device; `[network]` between hosts, per host.",
        "",
        *_fields(Link),
        "",
        "## Presets",
        "",
    ]
    rows = [
        (f"`{each.name}`", f"{each.memory / 2**30:.1f}", f"{each.flops['bf16'] / 1e12:,.4g}",
         f"{each.bandwidth / 1e9:,.0f}", f"{each.link.bandwidth / 1e9:,.4g}", str(each.devices_per_host))
        for each in mw.devices().values()
    ]  # fmt: skip
    headings = ("name", "GiB", "bf16 TFLOP/s", "memory GB/s", "link GB/s", "per host")
    lines += [*_table(headings, rows), "", "## Cluster file", "", *_code(_cluster_example()), ""]
    lines += [
        "Several `[[hosts]]` may hold different devices; a plan then says in which order the hosts are started.",
        "",
        "## Cloud instances",
        "",
        "`--instance NAME --nodes N`; prices are yours to say (`--price-per-hour`, US dollars of one GPU).",
        "",
    ]
    rows = [
        (f"`{each.name}`", each.cloud, f"{each.gpus} x {each.device}", f"{each.network:,.0f}", each.source)
        for each in instances().values()
    ]
    return "\n".join([*lines, *_table(("instance", "cloud", "GPUs", "network Gbit/s", "source"), rows)]) + "\n"


def _cluster_example() -> str:
    from meshwright.profiler.machine.cluster import load_cluster

    words = inspect.getdoc(load_cluster) or ""
    return inspect.cleandoc(
        "\n".join(line for line in words.splitlines() if line.startswith("    ") or not line)
    ).strip()


def _glossary() -> str:
    lines = ["# Glossary", "", "`plan glossary` prints it; `plan glossary ZB-V` one word of it.", ""]
    for each in sorted(TERMS, key=lambda term: term.name.lower()):
        lines += [f"### {each.name}", "", each.says, ""]
    return "\n".join(lines)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [_row(headings), _row(["---"] * len(headings)), *map(_row, cells)] if cells else []


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---- checks


def problems(docs: Path = DOCS) -> list[str]:
    """What is wrong with the pages as they are: references that are not current, links that lead nowhere, pages that
    are not in the order."""
    found = [f"{page}: not current: run python -m docs.build" for page, text in references().items()
             if not (docs / page).exists() or (docs / page).read_text() != text]  # fmt: skip
    there = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md") if "site" not in path.parts}
    found += [f"{page}: missing in ORDER of docs/build.py" for page in sorted(there - set(ORDER))]
    for page in ORDER:
        found += [f"{page}: {link} leads nowhere" for link in broken_links(docs / page)]
    return found


def broken_links(page: Path) -> list[str]:
    """Links of a page to files that are not there, or to headings that their page has not."""
    broken = []
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    return broken


def _anchors(page: Path) -> set[str]:
    return {_anchor(line.lstrip("# ")) for line in page.read_text().splitlines() if line.startswith("#")}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


# ---- running


def run_page(page: Path, scratch: Path, outputs: bool = False, compare: bool = True) -> list[str]:
    """What is wrong with a page's blocks once they are run, in order, in a folder of their own under `scratch`.

    outputs: write what they print into the page. compare: or find what is printed otherwise now, which on a slower
    machine may be another plan, where a search is cut short. A block that needs=package is left out, with its output,
    where that is not installed.
    """
    text = page.read_text()
    folder = scratch / page.stem
    folder.mkdir(parents=True)
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    environment = _environment(scratch)
    found, printed, edits = [], "", []
    is_left_out = False
    for block in blocks_of(text):
        name, needed = block.option("file"), block.option("needs")
        is_output = block.language == "text"
        is_left_out = is_left_out if is_output else needed is not None and importlib.util.find_spec(needed) is None
        if is_left_out:
            continue
        if name is not None:
            (folder / name).write_text(block.content)
        elif block.language in ("sh", "python"):
            command = ["bash", "-euo", "pipefail", "-c", block.content] if block.language == "sh" else [
                sys.executable, "-c", block.content]  # fmt: skip
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
            )
            wanted = int(block.option("exit") or 0)
            printed = done.stdout if wanted == 0 else done.stdout + done.stderr
            if done.returncode != wanted:
                line = text.count("\n", 0, block.start)
                found.append(f"{page.name}:{line}: exit code {done.returncode}, not {wanted}: {done.stderr[-600:]}")
        elif block.language == "text" and "output" in block.options:
            lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
            most = int(block.option("lines") or len(lines))
            cut = [*lines[:most], "..."] if len(lines) > most else lines
            edits.append((block, "\n".join(cut) + "\n"))
            is_fixed = compare and not outputs and "measured" not in block.options
            if is_fixed and steady(edits[-1][1]) != steady(block.content):
                line = text.count("\n", 0, block.start)
                found.append(f"{page.name}:{line}: not what is printed now: run python -m docs.build --run --outputs")
    if outputs and not found:
        for block, content in reversed(edits):
            text = text[: block.start] + content + text[block.end :]
        page.write_text(text)
    return found


def steady(printed: str) -> str:
    """What is printed, without what depends on how fast the machine searched: seconds, layouts counted, the proven
    gap. Lines are joined, as other numbers wrap elsewhere."""
    words = " ".join(printed.split())
    words = re.sub(r"no plan that (?:is searched|[\w-]+ runs) is .*? in [\d.]+ m?s\)", "PROOF", words)
    return re.sub(r"\d+ \w+ ago", "SOME TIME ago", words)


def _environment(scratch: Path) -> dict[str, str]:
    """With the commands of this very interpreter first on the path, and profiles kept from page to page."""
    programs = scratch / "bin"
    programs.mkdir(exist_ok=True)
    for name, words in {"plan": "-m meshwright", "meshwright": "-m meshwright", "python": "",
                        "torchrun": "-m torch.distributed.run"}.items():  # fmt: skip
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "MESHWRIGHT_CACHE": str(scratch / "profiles"),
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
    }


# ---- the site


def write_site(folder: Path) -> None:
    """Every page as HTML, with the others beside it."""
    style = (ROOT / "executor" / "reporting" / "html_report.css").read_text()
    reader = MarkdownIt("commonmark").enable("table")
    titles = {page: (DOCS / page).read_text().partition("# ")[2].partition("\n")[0] for page in ORDER}
    for page in ORDER:
        target = folder / page.replace("README.md", "index.md").replace(".md", ".html")
        target.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * page.count("/")
        body = reader.render((DOCS / page).read_text().replace(_GENERATED, ""))
        body = re.sub(r"<(h[1-6])>(.*?)</\1>", _with_anchor, body)
        body = re.sub(
            r'href="(?!https?:|#)([^"]+)"', lambda m, p=page, t=target: f'href="{_to_html(m.group(1), p, t)}"', body
        )
        body = re.sub(r"<table>.*?</table>", lambda m: f'<div class="wide">{m.group(0)}</div>', body, flags=re.DOTALL)
        links = "".join(
            f'<a href="{up}{other.replace("README.md", "index.md").replace(".md", ".html")}">{escape(title)}</a>'
            for other, title in titles.items()
        )
        target.write_text(
            f'<!doctype html>\n<html lang="en" data-theme="light"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(titles[page])}</title>'
            f"<style>{style}pre{{overflow-x:auto;padding:.8em;border:1px solid #8884;border-radius:6px}}"
            f"img{{max-width:100%}}td:first-child code{{white-space:nowrap}}.wide{{margin-bottom:1em}}"
            f"</style></head>\n<body><main><nav>{links}</nav>{body}</main></body></html>\n"
        )


def _with_anchor(match: re.Match[str]) -> str:
    plain = re.sub(r"<[^>]+>", "", match.group(2))
    return f'<{match.group(1)} id="{_anchor(plain)}">{match.group(2)}</{match.group(1)}>'


def _to_html(link: str, page: str, target: Path) -> str:
    """Where a link of a page leads on the site: to the page there, or to the file beside the documentation."""
    file, mark, anchor = link.partition("#")
    path = (DOCS / page).parent / file
    if path.resolve() in {(DOCS / other).resolve() for other in ORDER}:
        return file.replace("README.md", "index.md").replace(".md", ".html") + mark + anchor
    return os.path.relpath(path, target.parent) + mark + anchor


def main() -> None:
    """Build, or check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--run", action="store_true", help="run every block")
    parser.add_argument("--outputs", action="store_true", help="with --run: write what blocks print into the pages")
    parser.add_argument("pages", nargs="*", help="run only these, as in start.md")
    given = parser.parse_args()
    if not given.check:
        for page, text in references().items():
            (DOCS / page).write_text(text)
    found = problems()
    if given.run:
        with tempfile.TemporaryDirectory() as scratch:
            for page in given.pages or ORDER:
                print(page, flush=True)
                found += run_page(DOCS / page, Path(scratch), given.outputs)
    if not given.check and not found:
        write_site(DOCS / "site")
    for each in found:
        print(each, file=sys.stderr)
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
