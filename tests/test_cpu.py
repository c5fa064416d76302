"""Whether a CPU has products of bfloat16 is read from what Linux says of it."""

from pathlib import Path

import pytest

from rljax.cpu import multiplies_bfloat16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16 vaes\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f amx_bf16 amx_tile\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n", True),
        ("processor\t: 0\nmodel name\t: with bf16\nflags\t\t: fpu avx2 avx512f\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("processor\t: 0\nhart\t: 0\nisa\t: rv64imafdc\n", None),
    ],
)
def test_the_instructions_are_found(text: str, expected: bool | None, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert multiplies_bfloat16(file) is expected


def test_a_system_that_does_not_tell_is_not_guessed_at(tmp_path: Path) -> None:
    assert multiplies_bfloat16(tmp_path / "cpuinfo") is None
