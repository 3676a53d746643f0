"""What a new interpreter does, for tests of what is imported when."""

import subprocess
import sys
from pathlib import Path


def modules_after(code: str, folder: Path) -> set[str]:
    """Names of the modules that are loaded once `code` has run in a new interpreter."""
    program = (
        f"import sys, atexit\natexit.register(lambda: print('\\n' + ' '.join(sys.modules), file=sys.stderr))\n{code}"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stderr.splitlines()[-1].split())
