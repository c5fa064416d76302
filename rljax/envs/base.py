"""What an environment is, and how its name and options in a recipe become one.

Owns the `Env` interface, the table of environments that come with rljax, and the checks of `env.name` and
`env.options` that need no process. Refuses to own processes and deadlines (`pool.py`) and rewards (`rewards.py`).
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import ValidationError

from rljax.records import Observation, StepResult, Task
from rljax.section import Section

Split = Literal["train", "eval"]
"""Which tasks are made: those to learn from, or those held out."""

TaskMaker = Callable[[int, Split], Task]
"""Makes task number `index` of a split; the same arguments give the same task in every process."""


@runtime_checkable
class Env(Protocol):
    """One episode of one task: synchronous, single-threaded, in messages rather than tokens.

    An instance lives in a worker process and is used for one episode: `reset` once, `step` until it answers `done`,
    then `close`. Draws must come from the `seed` of `reset` (the worker also seeds `random` and `numpy.random` before
    every call, because one process holds many episodes). What `reset` returns must depend on its arguments alone: an
    episode whose worker died before the first `step` is opened again elsewhere. An exception is reported as an error
    of this episode, never as a reward.
    """

    def reset(self, task: Task, seed: int) -> Observation:
        """Open the episode of `task` and return what the model sees first."""
        ...

    def step(self, text: str) -> StepResult:
        """Take one model message; return the answer, the reward of this turn and whether the episode is over."""
        ...

    def close(self) -> None:
        """Let go of what the episode holds (files, processes); called once, also after an exception."""
        ...


@runtime_checkable
class EnvClass(Protocol):
    """What `env.name` names: a class whose instances are episodes.

    It may also have a classmethod `make_task(options, index, split) -> Task`; then `data.source = "generated"` works with it.
    """

    Options: type[Any]
    """A subclass of `Section`: the options the environment takes from `env.options`, with their defaults."""

    def __call__(self, options: Any) -> Env:
        """Make the world of one episode from an instance of `Options`."""
        ...


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the known name most like `word`, or "." when none is alike, to end a sentence."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else "."


def resolve(name: str) -> EnvClass:
    """Return the class that `env.name` stands for: a name in `ENVS`, or `package.module:Class`.

    Raises ValueError when there is no such environment, its module cannot be imported, or the class is not an `Env`.
    """
    place = ENVS.get(name, name)
    module_name, _, class_name = place.partition(":")
    if not module_name or not class_name:
        raise ValueError(
            f"env.name = {name!r} is not an environment{nearest(name, ENVS)} Known are {', '.join(sorted(ENVS))}; "
            "your own is written as 'package.module:Class'"
        )
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"env.name = {name!r}: importing {module_name!r} failed ({error}); install it, or add its folder to PYTHONPATH"
        ) from error
    env_class = getattr(module, class_name, None)
    if env_class is None:
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise ValueError(f"env.name = {name!r}: module {module_name!r} has no {class_name!r}{nearest(class_name, classes)}")
    options = getattr(env_class, "Options", None)
    lacks = [method for method in ("reset", "step", "close") if not callable(getattr(env_class, method, None))]
    if not (inspect.isclass(options) and issubclass(options, Section)):
        lacks.append("Options (a subclass of rljax.section.Section)")
    if lacks:
        raise ValueError(f"env.name = {name!r}: {class_name!r} is not an environment class; it lacks {', '.join(lacks)}")
    return env_class


def parse_options(name: str, options: Mapping[str, Any]) -> Section:
    """Check `env.options` against the environment's own `Options` and return them.

    Raises ValueError that names every wrong key as `env.options.<key>`, with the nearest name for an unknown one.
    """
    model = resolve(name).Options
    try:
        return model(**options)
    except ValidationError as error:
        raise ValueError("\n".join(_complaint(model, problem) for problem in error.errors())) from error


def _complaint(model: type[Section], problem: Any) -> str:
    place = [str(part) for part in problem["loc"]]
    key = ".".join(["env.options", *place])
    if not place:  # a rule between options, which names them itself
        return problem["msg"].removeprefix("Value error, ")
    if problem["type"] != "extra_forbidden":
        return f"{key}: {problem['msg'].removeprefix('Value error, ')} (got {problem['input']!r})"
    for part in place[:-1]:
        inner = model.model_fields[part].annotation if part in model.model_fields else None
        if not (inspect.isclass(inner) and issubclass(inner, Section)):
            return f"{key} is unknown"
        model = inner
    known = sorted(model.model_fields)
    return f"{key} is unknown{nearest(place[-1], known)} Known are {', '.join(known) or 'no options at all'}"


def task_maker(name: str, options: Mapping[str, Any]) -> TaskMaker:
    """Return the function that makes the generated tasks of an environment.

    Raises ValueError when the environment makes no tasks, or for a wrong name or option.
    """
    parsed = parse_options(name, options)
    make_task = getattr(resolve(name), "make_task", None)
    if make_task is None:
        raise ValueError(
            f"env.name = {name!r} makes no tasks of its own; set data.source = 'file' and data.path, "
            "or give its class a classmethod make_task(options, index, split)"
        )
    return lambda index, split: make_task(parsed, index, split)


ENVS: Mapping[str, str] = {
    "arithmetic": "rljax.envs.arithmetic:Arithmetic",
    "reasoning_gym": "rljax.envs.reasoning_gym:ReasoningGym",
}
"""Where each environment that comes with rljax lives. Places rather than classes, so that a worker imports only its own."""
