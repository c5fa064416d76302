import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_of_the_guide_runs(tmp_path: Path) -> None:
    module, trial = re.findall(r"```python\n(.*?)```", (ROOT / "docs/howto/environments.md").read_text(), re.DOTALL)
    (tmp_path / "guess.py").write_text(module)
    (tmp_path / "trial.py").write_text(trial)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-W", "error", "trial.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("reset ok Observation")
    assert all(line.startswith("step ok StepResult") for line in lines[1:])
    assert "done=True" in lines[-1]
