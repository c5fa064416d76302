"""What every test runs under: eight virtual CPU devices, strict broadcasting, no network.

The variables are set before anything imports jax, and as environment variables, so that child processes have them too.
"""

import os
import sys

assert "jax" not in sys.modules, "jax was imported before tests/conftest.py could configure it"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
