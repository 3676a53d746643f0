"""Profiles kept on disk, each with all that it was seen to depend on, so that none is used after a change.

An entry is found by what is known before the model is loaded (its path as typed, the folder, the sequence length,
Python, the installed distributions, our own source files, the machine) and is used only if what was recorded while the
model was loaded and traced is still the same:

- every file that was opened or imported, by its sha256, and every folder that was listed, by its names;
- what was looked for, there or not: imports that could now be found elsewhere, paths that were asked about;
- every environment variable that was read, by a hash of the values.

Libraries (the standard library, site-packages) count by the names and times of their installed distributions: a file
edited in place there is not seen. A model that starts a program, opens a connection or a database, or opens a file
above 64 MB is not kept. What no one can see is not seen: the clock, random numbers, sys.argv, files opened by compiled
code. `--no-cache` is for those.

The folder is $MESHWRIGHT_CACHE ("off": none), else $XDG_CACHE_HOME/meshwright, else ~/.cache/meshwright.
"""

import functools
import hashlib
import importlib.util
import json
import os
import platform
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ..document import Frozen, replace_file
from .model_profile import ModelProfile
from .source import file_of

_MOST_ENTRIES = 200
_MOST_BYTES = 200_000_000
_LARGEST_FILE = 64_000_000
"""Bytes of a data file above which hashing it would take as long as a trace."""

_UNSEEN = frozenset(
    {
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "socket.connect",
        "socket.getaddrinfo",
        "sqlite3.connect",
        "subprocess.Popen",
    }
)
"""Audit events after which the model may depend on what nobody recorded."""

_MACHINE_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("dev", "proc", "sys"))
_OURS = Path(__file__).resolve().parents[1]
_stat, _lstat = os.stat, os.lstat


@dataclass(frozen=True)
class CachedProfile:
    """A profile that was kept, and the seconds since it was made."""

    profile: ModelProfile
    age_s: float


class _Dependencies(Frozen):
    made_at: float
    contents: dict[str, str]
    """path -> what was in it: sha256 of a file, sha256 of a folder's names, '' where there was nothing"""
    kinds: dict[str, str]
    """path -> what it was: see _kind"""
    variables: tuple[str, ...]
    values: str
    """hash of the values of `variables`"""

    def hold(self) -> bool:
        """Whether everything is still as it was recorded."""
        return (
            _values(self.variables, os.environ) == self.values
            and all(_kind(path) == kind for path, kind in self.kinds.items())
            and all(_content(path) == content for path, content in self.contents.items())
        )


class ProfileCache:
    """The kept profile of one model at one sequence length (lengths: made to hold at others, too)."""

    def __init__(self, source: str, seq_len: int | None, lengths: bool = False) -> None:
        self._folder = default_folder()
        self._source = source
        self._key = _key(source, seq_len, lengths)

    def look_up(self) -> CachedProfile | None:
        """The kept profile if all that it depends on is unchanged; reads the model's files, imports none of them."""
        if self._folder is None:
            return None
        try:
            digest, told, document = self._path(self._folder).read_bytes().split(b"\n", 2)
            if hashlib.sha256(told + b"\n" + document).hexdigest().encode() != digest:
                return None
            dependencies = _Dependencies.model_validate_json(told)
            if not dependencies.hold():
                return None
            profile = ModelProfile.model_validate_json(document)
        except (OSError, ValueError):  # not there, not readable, cut off, of another version
            return None
        return CachedProfile(profile, max(0.0, time.time() - dependencies.made_at))

    @contextmanager
    def recording(self) -> Iterator["Recording"]:
        """Records what the code inside reads; one at a time in a process."""
        global _current
        _install_hook()
        _library_folders()
        recording = Recording(dict(os.environ))
        with _watched_environment(recording), _watched_stat(recording):
            _current = recording
            try:
                yield recording
            finally:
                _current = None

    def keep(self, profile: ModelProfile, recording: "Recording") -> str:
        """Keep a profile that was made under `recording`. Returns why it was not kept; '' if it was kept, or no
        profiles are to be."""
        if self._folder is None:
            return ""
        dependencies = recording.dependencies(_user_folders(self._source))
        if isinstance(dependencies, str):
            return dependencies
        body = f"{dependencies.model_dump_json()}\n{profile.model_dump_json()}".encode()
        try:
            self._write(self._folder, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        except OSError as error:
            return f"{self._folder} cannot be written: {error.strerror}"
        with suppress(OSError):  # another process removes the same ones
            _prune(self._folder)
        return ""

    def _path(self, folder: Path) -> Path:
        return folder / f"{self._key}.profile"

    def _write(self, folder: Path, entry: bytes) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._path(folder), entry)


def default_folder() -> Path | None:
    """Folder of the kept profiles; None if the user wants none or has no home."""
    named = os.environ.get("MESHWRIGHT_CACHE", "")
    if named:
        return None if named == "off" else Path(named).absolute() / "profiles"
    base = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "meshwright" / "profiles"
    with suppress(RuntimeError):  # no home folder
        return Path.home() / ".cache" / "meshwright" / "profiles"
    return None


@dataclass
class Recording:
    """What the code inside ProfileCache.recording read."""

    environment: dict[str, str]
    opened: dict[str, tuple[int, int, int] | None] = field(default_factory=dict)
    """file -> its size, time and number when it was first opened"""
    listed: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    unseen: str = ""

    def event(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Note one of Python's audit events."""
        if name == "open":
            self._open(*arguments)
        elif name == "import":
            self.imports.add(arguments[0])
        elif name in ("os.listdir", "os.scandir"):
            caller = sys._getframe(2).f_globals.get("__name__", "")
            folder = _tracked(arguments[0] or ".")
            if folder and not caller.startswith("importlib."):
                self.listed.add(folder)
        elif name in _UNSEEN:
            self.unseen = f"it calls {name}"
        elif name == "ctypes.dlopen" and os.path.isabs(arguments[0] or "") and _tracked(arguments[0]):
            self.unseen = f"it loads {arguments[0]}"

    def ask(self, path: Any) -> None:
        """Note that a path's existence, size or kind was asked for."""
        found = _tracked(path)
        if found:
            self.asked.add(found)

    def read_variable(self, name: str | None) -> None:
        """Note that an environment variable was read; None: that all were listed."""
        frame = sys._getframe(2)
        while frame.f_back is not None:
            if frame.f_globals.get("__name__", "").startswith("rich."):  # our own progress bar
                return
            frame = frame.f_back
        if name is None:
            self.unseen = "it lists the environment"
        else:
            self.variables.add(name)

    def _open(self, path: Any, mode: str | None, flags: int) -> None:
        found = _tracked(path)
        if flags & (os.O_EXCL | os.O_TRUNC):
            self.written.add(found)
        elif found and found not in self.written and not flags & os.O_WRONLY:
            self.opened.setdefault(found, _identity(found))

    def dependencies(self, user_folders: Iterable[str]) -> _Dependencies | str:
        """All that was read, in its present state; or, in words, what cannot be told, or has changed since it was
        read."""
        if self.unseen:
            return self.unseen
        for path, identity in self.opened.items():
            if _identity(path) != identity:
                return f"{path} was written while it was read"
        modules = [name for name in sys.modules if not name.startswith("meshwright.")]
        files = {path for name in modules for path in _module_files(sys.modules[name])}
        contents = {path: _content(path) for path in (*self.opened, *self.listed, *files)}
        for path, content in contents.items():
            if content is None:
                return f"{path} is larger than {_LARGEST_FILE // 1_000_000} MB"
            if not content and path in files:
                return f"{path} was imported and is no file"
        for path in files:
            if path not in self.opened and _imported.get(path, _identity(path)) != _identity(path):
                return f"{path} changed after it was imported"
            _imported[path] = _identity(path)
        names = tuple(sorted(self.variables))
        asked = self.asked | set(_places([*self.imports, *modules], user_folders))
        return _Dependencies(
            made_at=time.time(),
            contents={path: content for path, content in contents.items() if content is not None},
            kinds={path: _kind(path) for path in sorted(asked)},
            variables=names,
            values=_values(names, self.environment),
        )


_current: Recording | None = None

_imported: dict[str, tuple[int, int, int] | None] = {}
"""Files of the user's modules in earlier recordings: Python imports a module only once in a process, so later
recordings do not see them opened."""


@functools.cache
def _install_hook() -> None:
    """Install our audit hook. It cannot be removed; when nothing is recorded it does nothing."""
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _current is not None:
        _current.event(event, arguments)


@contextmanager
def _watched_environment(recording: Recording) -> Iterator[None]:
    """While it lasts, os.environ tells the recording which variables are read."""
    kind: Any = type(os.environ)
    get, iterate = kind.__getitem__, kind.__iter__

    def watched_get(self: Any, key: Any) -> Any:
        if isinstance(key, str | bytes):
            recording.read_variable(os.fsdecode(key))
        return get(self, key)

    def watched_iterate(self: Any) -> Any:
        recording.read_variable(None)
        return iterate(self)

    kind.__getitem__, kind.__iter__ = watched_get, watched_iterate
    try:
        yield
    finally:
        kind.__getitem__, kind.__iter__ = get, iterate


@contextmanager
def _watched_stat(recording: Recording) -> Iterator[None]:
    """While it lasts, os.stat tells the recording which paths are asked about; so do exists, is_file and getsize, which
    use it and raise no audit event."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def asking(path: Any, *arguments: Any, **options: Any) -> Any:
            recording.ask(path)
            return function(path, *arguments, **options)

        return asking

    os.stat, os.lstat = watched(_stat), watched(_lstat)
    try:
        yield
    finally:
        os.stat, os.lstat = _stat, _lstat


def _key(source: str, seq_len: int | None, lengths: bool) -> str:
    """Hash of what a profile depends on and is known before the model is loaded."""
    known = [
        source,
        os.getcwd(),
        seq_len,
        lengths,
        sys.version,
        sys.prefix,
        sys.path,
        _installed(),
        {str(path.relative_to(_OURS)): _content(str(path)) for path in sorted(_OURS.rglob("*.py"))},
        platform.node(),
        platform.machine(),
        os.path.exists("/dev/nvidiactl"),
        os.environ.get("CUDA_VISIBLE_DEVICES"),
    ]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]


def _installed() -> list[tuple[str, int]]:
    """Name (with the version) and time of every installed distribution, and of the files that extend sys.path."""
    found = []
    for folder in sys.path:
        with suppress(OSError), os.scandir(folder or ".") as entries:
            found += [
                (entry.path, entry.stat().st_mtime_ns)
                for entry in entries
                if entry.name.endswith((".dist-info", ".egg-info", ".pth", ".egg-link"))
            ]
    return sorted(found)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """Folders whose files count by the versions of what is installed, each with a separator at its end."""
    named = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    named += [*site.getsitepackages(), site.getusersitepackages()]
    named += [folder for folder in sys.path if os.path.basename(folder) in ("site-packages", "dist-packages")]
    named += [str(_OURS.parent / package) for package in ("profiler", "planner", "executor")]
    folders = {form + os.sep for folder in named for form in (os.path.abspath(folder), os.path.realpath(folder))}
    return (*sorted(folders), *_MACHINE_FOLDERS)


def _tracked(path: Any) -> str:
    """Absolute path of what an entry must record; '' for libraries, machine files and open file numbers."""
    if not isinstance(path, str | bytes | os.PathLike):
        return ""
    absolute = os.path.abspath(os.fsdecode(path))
    if absolute.endswith(".pyc"):
        with suppress(ValueError):
            absolute = importlib.util.source_from_cache(absolute)
    return "" if (absolute + os.sep).startswith(_library_folders()) else absolute


def _user_folders(source: str) -> list[str]:
    """Folders on the import path, the model's own included, whose files are not a library's."""
    path = file_of(source).absolute()
    folders = [str(path if path.is_dir() else path.parent), *(os.path.abspath(folder) for folder in sys.path)]
    return [folder for folder in dict.fromkeys(folders) if _tracked(folder)]


def _places(names: Iterable[str], user_folders: Iterable[str]) -> Iterator[str]:
    """Paths at which a module of these names would be found instead of the one that was."""
    tops = list(user_folders)
    for name in dict.fromkeys(names):
        package, _, leaf = name.rpartition(".")
        folders = tops if not package else [f for f in _search_path(sys.modules.get(package)) if _tracked(f)]
        for folder in folders:
            yield os.path.join(folder, leaf)
            yield os.path.join(folder, leaf + ".py")


def _search_path(package: ModuleType | None) -> list[str]:
    found = getattr(package, "__path__", None)
    return [str(folder) for folder in found] if found else []


def _module_files(module: ModuleType) -> list[str]:
    """The file that a module came from, if it is the user's; else none. (torch.ops and the like have a relative path
    that does not exist.)"""
    found = getattr(module, "__file__", None)
    tracked = _tracked(found) if isinstance(found, str) and os.path.isabs(found) else ""
    return [tracked] if tracked else []


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        found = _stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def _kind(path: str) -> str:
    """'folder', 'file' with its size in bytes, or '' for nothing."""
    try:
        found = _stat(path)
    except OSError:
        return ""
    return "folder" if found.st_mode & 0o170000 == 0o040000 else f"file {found.st_size}"


def _content(path: str) -> str | None:
    """sha256 of a file or of a folder's names, '' for nothing, None for a file too large to hash."""
    try:
        if os.path.isdir(path):
            names = sorted(name for name in os.listdir(path) if name != "__pycache__")
            return hashlib.sha256(json.dumps(names).encode()).hexdigest()
        if _stat(path).st_size > _LARGEST_FILE:
            return None
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _values(names: Iterable[str], environment: Any) -> str:
    values = [environment.get(name) for name in names]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _prune(folder: Path) -> None:
    """Remove all but the newest entries, and files that writers left unfinished when they were killed."""
    entries = sorted(((_lstat(path), path) for path in folder.glob("*.profile")), key=lambda e: -e[0].st_mtime)
    num_bytes = 0
    for i, (found, path) in enumerate(entries):
        num_bytes += found.st_size
        if i >= _MOST_ENTRIES or num_bytes > _MOST_BYTES:
            path.unlink(missing_ok=True)
    for path in folder.glob("*.partial"):
        if time.time() - _lstat(path).st_mtime > 3600:
            path.unlink(missing_ok=True)
