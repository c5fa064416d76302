"""What the CPU of this host can do. Imports no jax, so that it can be asked before anything is decided."""

from pathlib import Path

_WITH_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}
"""Names that Linux gives to the instructions, on x86 and on Arm."""


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Return whether the CPU has products of bfloat16; None where the system does not tell (anywhere but Linux).

    Without them XLA converts every operand and every result: docs/benchmarks.md has what that costs.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return bool(_WITH_BFLOAT16 & set(value.split()))
    return None
