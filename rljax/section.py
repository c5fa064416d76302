"""What a group of options is: frozen, strict, each option declared with its meaning, and rules between options.

Owns the mechanism. Refuses to own any option (`config.py`, `algorithm_config.py`, environments). Imports nothing of rljax.
"""

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

CHECKING_RULES: ContextVar[bool] = ContextVar("checking_rules", default=False)
"""Whether a section is checking its rules: reading an option for that is no use of it (see `recipe.record_reads`)."""


def option(default: Any, text: str, **limits: Any) -> Any:
    """Declare one option: its default, its one-sentence meaning with the unit, and its limits."""
    return Field(default, description=text, **limits)


class Section(BaseModel):
    """A frozen group of options; an unknown key or a value of the wrong type is an error, never a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _keep_rules(self) -> "Section":
        checking = CHECKING_RULES.set(True)
        try:
            broken = list(self._broken_rules())
        finally:
            CHECKING_RULES.reset(checking)
        if broken:
            raise ValueError("\n".join(broken))
        return self

    def _broken_rules(self) -> Iterator[str]:
        """Yield one sentence per broken rule between options, naming each option as `section.name`."""
        yield from ()
