"""Reads launch scripts without running them: the words of each command, with variables filled in.

It reads what launch scripts consist of: variables with defaults and arithmetic, arrays, quotes, continued lines, if and
case with conditions that are known, `bash -c` and `srun` around a command, and #SBATCH lines. What is known only when
the script runs (the output of commands, variables from outside, what is set in a loop) stays open: it is named, and
never guessed. No library is used, because bashlex, the only parser of bash on PyPI, is under the GPL and expands
nothing.
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_BEGIN, _END, _SPACE = "\ue000", "\ue001", "\ue002"
"""Marks before and after the name of something open in a word, and in place of spaces in that name, where a word must
not be split."""

_OPEN = re.compile(f"{_BEGIN}(.*?){_END}", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_SBATCH = re.compile(r"^\s*#SBATCH\s+(.*)$", re.MULTILINE)
_DECLARE = ("export", "readonly", "local", "declare", "typeset")
_SEPARATORS = frozenset({"\n", ";", "&", "&&", "||", "|", "(", ")", ";;", "|&"})
_MOST_NESTED = 8
"""Most levels of strings inside strings that are read as commands."""


def open_names(word: str) -> list[str]:
    """Names of what is known in a word only when the script runs: variables, or commands as $(...)."""
    return [name.replace(_SPACE, " ") for name in dict.fromkeys(_OPEN.findall(word))]


def shown(word: str) -> str:
    """A word as people write it, with ${NAME} in place of what is open."""
    named = _OPEN.sub(lambda m: m[1] if m[1].startswith("$") else f"${{{m[1]}}}", word)
    return named.replace(_SPACE, " ")


def is_open(word: str) -> bool:
    """Whether all of a word is open."""
    return _OPEN.fullmatch(word) is not None


def _open(name: str) -> str:
    return f"{_BEGIN}{_SPACE.join(_OPEN.sub(lambda m: m[1], name).split())}{_END}"


@dataclass
class Script:
    """What was read from a script: the words of each command, its variables and arrays, the variables taken from
    outside, and the files that it sources, which are not read."""

    commands: list[tuple[str, ...]] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    not_read: list[str] = field(default_factory=list)


def read_script(text: str, outside: Mapping[str, str] | None = None) -> Script:
    """What a shell script says. outside: variables of the environment, for names that the script does not set.

    Raises ValueError for a quote or a bracket that is not closed.
    """
    reader = _Reader(dict(outside or {}))
    reader.script.values |= _of_slurm(text)
    reader.run(text, 0)
    return reader.script


def _of_slurm(text: str) -> dict[str, list[str]]:
    """Variable -> value, of those that Slurm sets by #SBATCH lines."""
    said: dict[str, str] = {}
    for line in _SBATCH.findall(text):
        words = line.partition(" #")[0].split()
        for place, word in enumerate(words):
            name, mark, value = word.partition("=")
            if not mark and word.startswith("-"):
                value = words[place + 1] if place + 1 < len(words) else ""
            said[{"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus"}.get(name, name)] = value
    gpus = said.get("--gpus-per-node") or (said.get("--gres", "") if "gpu" in said.get("--gres", "") else "")
    nodes, each = said.get("--nodes", ""), said.get("--ntasks-per-node", "")
    found = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS_PER_NODE": each,
        "SLURM_GPUS_PER_NODE": gpus.rpartition(":")[2],
        "SLURM_GPUS_ON_NODE": gpus.rpartition(":")[2],
        "SLURM_NTASKS": said.get("--ntasks", ""),
    }
    if not found["SLURM_NTASKS"] and nodes.isdecimal() and each.isdecimal():
        found["SLURM_NTASKS"] = str(int(nodes) * int(each))
    return {name: [value] for name, value in found.items() if value.isdecimal()}


@dataclass
class _Branch:
    """An if, case, loop or function that has begun and not ended. holds: whether the commands read now run, None if not
    known. done: whether an earlier branch of it ran. subject: the word that a case looks at."""

    kind: str
    holds: bool | None
    done: bool | None = False
    subject: str | None = None
    waits: bool = False
    """Whether the next words are a pattern of this case."""


class _Reader:
    """Reads a script from top to bottom, and keeps its variables."""

    def __init__(self, outside: dict[str, str]) -> None:
        self.outside = outside
        self.script = Script()

    def run(self, text: str, depth: int) -> None:
        """Read the commands of a text."""
        branches: list[_Branch] = []
        words: list[str] = []
        for token in _tokens(text):
            top = branches[-1] if branches else None
            if top is not None and top.waits:  # for a pattern of a case
                if token == "esac":
                    branches.pop()
                elif token == ")":
                    self._pattern(top, words)
                    words = []
                elif token not in ("\n", "("):
                    words.append(token)
                continue
            if token not in _SEPARATORS:
                words.append(token)
                continue
            if token == ")" and words[:1] == ["case"] and len(words) > 3:  # the first pattern is in its line
                self._command(words[:3], branches, depth)
                self._pattern(branches[-1], words[3:])
                words = []
            elif words:
                self._command(words, branches, depth)
            if token == ";;" and branches and branches[-1].kind == "case":
                branches[-1].holds, branches[-1].waits = False, True
            words = []
        if words:
            self._command(words, branches, depth)

    def _command(self, words: list[str], branches: list[_Branch], depth: int) -> None:
        """Read one simple command, or a keyword and what follows it."""
        while words:
            word = words[0]
            if word in ("then", "do", "{", "!", "time"):
                words = words[1:]
            elif word in ("fi", "done", "esac", "}"):
                if branches:
                    branches.pop()
                words = words[1:]
            elif word in ("if", "elif"):
                self._condition(words[1:], branches, word)
                return
            elif word == "else":
                if branches:
                    top = branches[-1]
                    top.holds = None if top.done is None else not top.done
                words = words[1:]
            elif word == "case":
                subject = "".join(self._fields(words[1])) if len(words) > 1 else ""
                branches.append(_Branch("case", False, subject=subject, waits=True))
                words = words[3:]
            elif word in ("for", "while", "until", "select"):
                if word == "for" and len(words) > 1 and _runs(branches) is not False:
                    self.script.values[words[1]] = [_open(words[1])]
                branches.append(_Branch("loop", None))
                return
            elif word == "function" or (word.endswith("()") and not _ASSIGNED.match(word)):
                branches.append(_Branch("function", None))
                words = [w for w in words[2 if word == "function" else 1 :] if w != "{"]
            else:
                break
        if words and _runs(branches) is not False:
            self._simple(words, _runs(branches) is True, depth)

    def _pattern(self, branch: _Branch, words: list[str]) -> None:
        """Set whether a branch of a case runs, by its pattern."""
        branch.waits = False
        patterns = [self._joined(word) for word in "".join(words).split("|")] if words else []
        if branch.subject is None or open_names(branch.subject):
            branch.holds = branch.done = None
        elif branch.done:
            branch.holds = False
        else:
            branch.holds = any(fnmatch.fnmatchcase(branch.subject, pattern) for pattern in patterns)
            branch.done = branch.holds

    def _condition(self, words: list[str], branches: list[_Branch], word: str) -> None:
        if word == "if":
            found = self._test(words) if _runs(branches) is not False else False
            branches.append(_Branch("if", found, found))
        elif branches:
            top = branches[-1]
            if top.done is None:
                top.holds = None
            else:
                found = False if top.done else self._test(words)
                top.holds, top.done = found, top.done or found

    def _test(self, words: list[str]) -> bool | None:
        """Whether a condition holds; None if that is not known."""
        if not words or words[0] not in ("[", "[["):
            return None
        said = [self._joined(word) for word in words[1:] if word not in ("]", "]]")]
        turned = said[:1] == ["!"]
        said = said[1:] if turned else said
        found = None if any(map(open_names, said)) else _tested(said)
        return (not found if turned else found) if found is not None else None

    def _simple(self, words: list[str], is_sure: bool, depth: int) -> None:
        """Read assignments, or a command with its words."""
        rest = words[1:] if words[0] in _DECLARE else words
        if words[0] in _DECLARE or all(_ASSIGNED.match(word) for word in words):
            for word in rest:
                match = _ASSIGNED.match(word)
                if match:
                    self._assign(match, word[match.end() :], is_sure)
            return
        while words and _ASSIGNED.match(words[0]):
            words = words[1:]
        found = [each for word in words for each in self._fields(word)]
        if not found:
            return
        if found[0] in ("source", "."):
            self.script.not_read.append(shown(" ".join(found[1:2])))
        elif found[0] not in ("echo", "printf", ":"):
            self._note(found, depth)

    def _note(self, found: list[str], depth: int) -> None:
        """Keep a command; if it is a shell that is given commands as a string, read those instead."""
        shells = [place for place, word in enumerate(found) if word.rpartition("/")[2] in ("bash", "sh", "eval")]
        for place in shells:
            after = found[place + 1 :]
            while after and after[0].startswith("-") and not after[0].endswith("c"):
                after = after[1:]
            is_eval = found[place] == "eval"
            given = " ".join(after) if is_eval else after[1] if len(after) > 1 and after[0].startswith("-") else ""
            if given and depth < _MOST_NESTED:
                self.run(given, depth + 1)
                return
        self.script.commands.append(tuple(found))

    def _assign(self, match: re.Match[str], raw: str, is_sure: bool) -> None:
        name, more = match[1], match[2] == "+"
        if raw.startswith("("):
            found = [each for word in _array(raw) for each in self._fields(word)]
            value = [*self.script.values.get(name, []), *found] if more else found
        else:
            said = self._joined(raw)
            value = ["".join(self.script.values.get(name, [])) + said] if more else [said]
        known = self.script.values.get(name)
        self.script.values[name] = value if is_sure or value == known else [_open(name)]

    def _joined(self, raw: str) -> str:
        """A word, expanded to one string, as on the right side of an assignment."""
        return " ".join(self._fields(raw, splits=False))

    def _fields(self, raw: str, splits: bool = True) -> list[str]:
        """The words that a word of the script expands to, without quotes; unquoted expansions are split at spaces if
        `splits`."""
        found: list[str] = []
        here: str | None = None
        place = 0
        while place < len(raw):
            letter = raw[place]
            if letter == "'":
                end = raw.index("'", place + 1)
                here, place = (here or "") + raw[place + 1 : end], end + 1
            elif letter == '"':
                end = _closing(raw, place)
                parts = self._quoted(raw[place + 1 : end])
                if parts:
                    here = (here or "") + parts[0]
                    for part in parts[1:]:
                        found.append(here)
                        here = part
                place = end + 1
            elif letter == "\\":
                here, place = (here or "") + raw[place + 1 : place + 2], place + 2
            elif letter == _BEGIN:
                end = raw.index(_END, place) + 1
                here, place = (here or "") + raw[place:end], end
            elif letter in "$`":
                values, place = self._value(raw, place)
                for index, value in enumerate(values):
                    pieces = value.split() if splits else [value]
                    if index or (splits and value[:1].isspace()):
                        found, here = [*found, *([here] if here is not None else [])], None
                    for number, piece in enumerate(pieces):
                        if number:
                            found.append(here or "")
                            here = None
                        here = (here or "") + piece
                    if splits and value[-1:].isspace() and here is not None:
                        found, here = [*found, here], None
            else:
                here, place = (here or "") + letter, place + 1
        return [*found, *([here] if here is not None else [])]

    def _quoted(self, text: str) -> list[str]:
        """The words that text between double quotes expands to: one; those of an array; or none, for an empty array
        alone."""
        found, place = [""], 0
        while place < len(text):
            letter = text[place]
            if letter == "\\" and text[place + 1 : place + 2] in ('"', "\\", "$", "`", "\n"):
                found[-1] += text[place + 1].replace("\n", "")
                place += 2
            elif letter == _BEGIN:
                end = text.index(_END, place) + 1
                found[-1], place = found[-1] + text[place:end], end
            elif letter in "$`":
                is_array = re.match(r"\$\{[A-Za-z_]\w*\[@\]\}", text[place:]) is not None
                values, place = self._value(text, place)
                if is_array:
                    if not values and len(text) == place and found == [""]:
                        return []
                    found[-1] += values[0] if values else ""
                    found += values[1:]
                else:
                    found[-1] += " ".join(values)
            else:
                found[-1] += letter
                place += 1
        return found

    def _value(self, text: str, place: int) -> tuple[list[str], int]:
        """(words that the expansion which begins at `place` stands for, index after its end)."""
        if text[place] == "`":
            end = text.index("`", place + 1)
            return [_open(f"$({text[place + 1 : end].strip()})")], end + 1
        if text.startswith("$((", place):
            end = _bracket(text, place + 1)
            return [self._computed(text[place + 3 : end - 1])], end + 1
        if text.startswith("$(", place):
            end = _bracket(text, place + 1)
            return [_open(f"$({text[place + 2 : end].strip()})")], end + 1
        if text.startswith("${", place):
            end = _bracket(text, place + 1)
            return self._parameter(text[place + 2 : end]), end + 1
        match = _NAME.match(text, place + 1)
        if match:
            return self._variable(match[0]), match.end()
        if text[place + 1 : place + 2] and text[place + 1] in "0123456789@*#?$!":
            return [_open(text[place + 1])], place + 2
        return ["$"], place + 1

    def _parameter(self, inner: str) -> list[str]:
        """Words that ${...} stands for."""
        match = re.fullmatch(r"([A-Za-z_]\w*|\d)(\[[@*]\])?(?:(:?[-=+?])(.*))?", inner, re.DOTALL)
        if match is None:
            return [_open(f"${{{inner}}}")]
        name, mark = match[1], match[3]
        known = self._known(name)
        if mark is None:
            return self._variable(name)
        usable = known is not None and not (mark.startswith(":") and known in ([], [""]))
        if mark.endswith("+"):
            return [self._joined(match[4])] if usable else [""]
        if usable and known is not None:
            return known
        if mark.endswith("?"):
            return [_open(name)]
        default = [self._joined(match[4])]
        if mark.endswith("="):
            self.script.values[name] = default
        return default

    def _known(self, name: str) -> list[str] | None:
        if name in self.script.values:
            return self.script.values[name]
        if name in self.outside:
            self.script.taken[name] = self.outside[name]
            return [self.outside[name]]
        return None

    def _variable(self, name: str) -> list[str]:
        known = self._known(name)
        return [_open(name)] if known is None else known

    def _computed(self, expression: str) -> str:
        """Value of $((...)), as text; names of what is open in it, if its value is not known."""
        text = re.sub(
            r"\$\{[^}]*\}|\$?[A-Za-z_]\w*",
            lambda m: self._joined(m[0]) if m[0][0] == "$" else "".join(self._variable(m[0])),
            expression,
        )
        names = open_names(text)
        try:
            return "".join(map(_open, names)) if names else str(_number(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return _open(f"$(({expression.strip()}))")


def _runs(branches: Sequence[_Branch]) -> bool | None:
    """Whether commands inside all of these branches run: False if one of the branches does not, None if that is not
    known."""
    held = [branch.holds for branch in branches]
    return False if False in held else None if None in held else True


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def _number(node: ast.expr) -> int:
    """Value of an expression of whole numbers with + - * / % **. Raises ValueError for others."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError("no arithmetic of whole numbers")


_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def _tested(said: Sequence[str]) -> bool | None:
    """Whether the condition in [ ... ] holds, for words that are all known; None for tests of files and the like."""
    match list(said):
        case ["-z", word]:
            return word == ""
        case ["-n", word]:
            return word != ""
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, name, right] if name in _COMPARED and (left + right).lstrip("-").isdecimal():
            return _COMPARED[name](int(left), int(right))
    return None


def _tokens(text: str) -> Iterator[str]:
    """Words as they are written, with their quotes, and what separates commands; without comments and
    here-documents."""
    place, begin = 0, -1
    waiting: list[str] = []

    def word() -> Iterator[str]:
        if begin >= 0:
            yield text[begin:place].replace("\\\n", "")

    while place < len(text):
        letter = text[place]
        if text.startswith("\\\n", place) and begin < 0:
            place += 2
        elif letter in "'\"`\\" + _BEGIN or text.startswith(("$(", "${"), place):
            begin = place if begin < 0 else begin
            place = _after(text, place)
        elif letter == "(" and begin >= 0 and text[place - 1] == "=":
            place = _bracket(text, place) + 1
        elif text.startswith("()", place) and begin >= 0:
            place += 2
        elif letter == "#" and begin < 0:
            end = text.find("\n", place)
            place = len(text) if end < 0 else end
        elif text.startswith("<<", place) and not text.startswith("<<<", place):
            match = re.match(r"<<-?\s*['\"]?(\w+)['\"]?", text[place:])
            waiting += [match[1]] if match else []
            place += match.end() if match else 2
        elif match := re.match(r"\d?(?:&>>?|>>?|<<<|<)&?\s*", text[place:]) if begin < 0 or letter in "<>" else None:
            yield from word()
            begin = -1
            place = _after_word(text, place + match.end())
        elif letter in " \t\r":
            yield from word()
            begin, place = -1, place + 1
        elif letter in "\n;&|()":
            yield from word()
            begin = -1
            found = next((two for two in ("&&", "||", ";;", "|&") if text.startswith(two, place)), letter)
            yield found
            place += len(found)
            if letter == "\n" and waiting:
                place = _after_document(text, place, waiting)
                waiting = []
        else:
            begin = place if begin < 0 else begin
            place += 1
    yield from word()


def _after_word(text: str, place: int) -> int:
    """Index after the end of the word that begins at `place`."""
    while place < len(text) and text[place] not in " \t\r\n;|()<>":
        place = _after(text, place) if text[place] in "'\"`\\$" else place + 1
    return place


def _after(text: str, place: int) -> int:
    """Index after the end of the quote, escape or expansion that begins at `place`."""
    letter = text[place]
    if letter == "\\":
        return place + 2
    if letter == '"':
        return _closing(text, place) + 1
    if letter in "'`" + _BEGIN:
        end = text.find(_END if letter == _BEGIN else letter, place + 1)
        if end < 0:
            raise ValueError(f"a {letter} in line {_line(text, place)} is not closed")
        return end + 1
    return _bracket(text, place + 1) + 1 if text.startswith(("$(", "${"), place) else place + 1


def _after_document(text: str, place: int, marks: Sequence[str]) -> int:
    """Index after the here-documents that begin at `place`. marks: words that end them, in order."""
    for mark in marks:
        match = re.compile(rf"^\s*{re.escape(mark)}\s*$", re.MULTILINE).search(text, place)
        place = len(text) if match is None else match.end()
    return place


def _closing(text: str, place: int) -> int:
    """Index of the quote that closes the double quote at `place`."""
    here = place + 1
    while here < len(text):
        if text[here] == '"':
            return here
        if text[here] == "\\":
            here += 2
        elif text.startswith(("$(", "${"), here):
            here = _bracket(text, here + 1) + 1
        else:
            here += 1
    raise ValueError(f'a " in line {_line(text, place)} is not closed')


def _bracket(text: str, place: int) -> int:
    """Index of the bracket that closes the one at `place`."""
    opening = text[place]
    closing, depth, here = {"(": ")", "{": "}"}[opening], 0, place
    while here < len(text):
        letter = text[here]
        if letter in "'\"":
            here = _after(text, here)
            continue
        if letter == "#" and text[here - 1].isspace():
            end = text.find("\n", here)
            here = len(text) if end < 0 else end
            continue
        depth += (letter == opening) - (letter == closing)
        if depth == 0:
            return here
        here += 2 if letter == "\\" else 1
    raise ValueError(f"a {opening} in line {_line(text, place)} is not closed")


def _array(raw: str) -> list[str]:
    """Words between the brackets of an array."""
    return [token for token in _tokens(raw[1:-1]) if token not in _SEPARATORS]


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1
