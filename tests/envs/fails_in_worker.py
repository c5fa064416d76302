"""An environment that can be imported here but not in a worker process, like one with a missing device or licence."""

import sys

from tests.envs.faulty import Faulty

if "pytest" not in sys.modules:
    raise RuntimeError("this machine has no licence")

Unlicensed = Faulty
