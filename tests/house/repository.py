"""Where the repository is and which files it has; shared by the house rules."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def files() -> tuple[Path, ...]:
    """List the repository's files relative to its root: those git tracks and those it would if they were added.

    Raises:
        RuntimeError: git cannot list them; the house rules are about a git checkout.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        raise RuntimeError(f"the house rules need a git checkout and the git command: {listed.stderr.strip()}")
    return tuple(sorted(path for path in map(Path, listed.stdout.split("\0")[:-1]) if (ROOT / path).is_file()))


def python_files() -> list[Path]:
    """List the Python files of rljax, tools and tests, relative to the root."""
    return [path for path in files() if path.suffix == ".py" and path.parts[0] in ("rljax", "tools", "tests")]
