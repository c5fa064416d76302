"""RL post-training for language models in JAX.

Owns the Python interface: each verb of the command line is one function here, of the same name and with the same meaning.
They are imported on first use, so that `import rljax`, the command line's help and the environment workers do not pay for jax.

    import rljax

    config = rljax.load_config("configs/smoke/arithmetic-tiny-grpo.toml")
    rljax.train(config)
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rljax.chat import sample
    from rljax.convert import convert
    from rljax.evaluate import evaluate
    from rljax.loop import train
    from rljax.recipe import load as load_config

__version__ = "0.1.0"
__all__ = ["__version__", "convert", "evaluate", "load_config", "sample", "train"]

_HOMES = {
    "convert": ("rljax.convert", "convert"),
    "evaluate": ("rljax.evaluate", "evaluate"),
    "load_config": ("rljax.recipe", "load"),
    "sample": ("rljax.chat", "sample"),
    "train": ("rljax.loop", "train"),
}


class _Package(ModuleType):
    """The package, in which a verb stays a function although a submodule has its name.

    Importing `rljax.evaluate` makes Python set the attribute `evaluate` of this package to that module, which would hide
    the function or not, depending on who imported what before.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rljax' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, function = _HOMES[name]
    return getattr(import_module(module), function)


def __dir__() -> list[str]:
    return sorted(__all__)
