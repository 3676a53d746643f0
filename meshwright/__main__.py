"""`python -m meshwright` is the `meshwright` command, which is `plan` by another name."""

import atexit
import gc
import sys
from _thread import interrupt_main
from threading import Timer
from typing import Any

_INTERRUPTED = 130
"""128 and the number of the signal, as shells have it."""


def main() -> None:
    """Entry point of all commands: what is interrupted ends without a traceback, while it is imported, too."""
    sys.unraisablehook = _noted
    gc.set_threshold(1_000_000, 50, 100)  # a command is short, and imports and traces make millions of objects
    atexit.register(gc.freeze)  # which Python would look through for garbage once more as it ends
    try:
        from .executor.cli import main as command

        command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(_INTERRUPTED) from None


def _noted(unraisable: Any) -> None:
    """An interrupt that came while Python ran a callback, and is lost there, comes again."""
    if unraisable.exc_type is KeyboardInterrupt:
        Timer(0.01, interrupt_main).start()
    else:
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    main()
