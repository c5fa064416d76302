"""The run directory: what a run leaves behind, and what a restart finds.

Owns the names of files in it and the two files that describe a run: config.json, the resolved configuration, and
run.json, every launch with its command, code and machine. Refuses to own metrics, rollouts and checkpoints themselves.
"""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rljax import __version__
from rljax.config import Config

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class RunDir:
    """Paths and descriptions of one run.

    Example:
        run_dir = RunDir(Path("runs/arithmetic"))
        run_dir.record_launch(config, devices=["TFRT_CPU_0"], began=run_dir.began())
    """

    def __init__(self, path: Path):
        """Name the places; nothing is created."""
        self.path = path
        self.config = path / "config.json"
        self.launches = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"
        self.adapter = path / "adapter"

    def began(self) -> datetime:
        """Return when the run was first launched; now, if it never was.

        Chat templates may print the date, and a resumed run must see the prompts it would have seen.
        """
        if not self.launches.exists():
            return datetime.now(UTC)
        return datetime.fromisoformat(json.loads(self.launches.read_text())["began"])

    def differences(self, config: Config) -> list[str]:
        """Return which deciding options differ from those the run was launched with, as `section.option: old -> new`."""
        if not self.config.exists():
            return []
        old, new = json.loads(self.config.read_text()), config.deciding()
        return [
            f"{section}.{name}: {json.dumps(old.get(section, {}).get(name))} -> {json.dumps(value)}"
            for section, options in new.items()
            for name, value in options.items()
            if old.get(section, {}).get(name) != value
        ]

    def record_launch(self, config: Config, devices: list[str], began: datetime) -> None:
        """Write the resolved configuration and add this launch to the list.

        Args:
            config: The configuration.
            devices: The devices of the mesh, for people.
            began: When the run was first launched, as `began` said before anything depended on it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        launches = json.loads(self.launches.read_text())["launches"] if self.launches.exists() else []
        launches.append(
            {
                "time": datetime.now(UTC).isoformat(),
                "command": sys.argv,
                "directory": str(Path.cwd()),
                "git": _git_state(),
                "host": platform.node(),
                "python": platform.python_version(),
                "packages": {"rljax": __version__, **{name: version(name) for name in _PACKAGES}},
                "devices": devices,
                "environment": {name: os.environ[name] for name in ("JAX_PLATFORMS", "XLA_FLAGS") if name in os.environ},
            }
        )
        _write_json(self.config, config.model_dump(mode="json"))
        _write_json(self.launches, {"began": began.isoformat(), "launches": launches})


def _git_state() -> str | None:
    """Return the commit of the code, marked when files differ from it; None when it is not in a git checkout."""
    where = Path(__file__).parent
    try:
        run = subprocess.run(
            ["git", "-C", str(where), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git here: a fact about the machine, not a failure of the run
    return run.stdout.strip() or None


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)
