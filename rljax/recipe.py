"""Loading a configuration: a TOML recipe and `section.option=value` overrides become a `Config`.

Owns reading and writing of recipes, the place each value came from, error messages with place and remedy, and the
record of which options a run really reads. Refuses to own options and the rules between them: those are in
`config.py`. Imports no jax.

    recipe.toml --tomllib--> settings --coerce--> Config
                 line scan ---^   ^--- command line
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rljax.config import Config
from rljax.presets import default_source
from rljax.section import CHECKING_RULES, Section
from rljax.toml_text import Key, dotted, key_lines, parse_key, syntax_problem, to_toml

_COMMENT_COLUMN_LIMIT = 56
"""Widest assignment that moves the column of the source comments; longer ones stick out."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message lists every problem with its place and remedy."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            super().__init__(f"{len(self.problems)} problems in the configuration:\n  " + "\n  ".join(self.problems))


def load(path: Path | str | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load a recipe and apply overrides; without a recipe, start from the defaults.

    Raises:
        ConfigError: the file or an override cannot be used; the message lists all problems.
    """
    return load_with_sources(path, overrides)[0]


def load_with_sources(path: Path | str | None = None, overrides: Sequence[str] = ()) -> tuple[Config, dict[str, str]]:
    """Load like `load`, and tell for each option where its value came from.

    Relative paths count from the recipe's folder when set there, and from the current folder otherwise.

    Returns:
        The configuration, and a map such as `{"optimizer.learning_rate": "recipe.toml:12"}` whose values are
        `file:line`, `command line`, `preset name` or `default`.

    Raises:
        ConfigError: the file or an override cannot be used; the message lists all problems.
    """
    settings: dict[Key, _Setting] = {}
    problems: list[str] = []
    if path is not None:
        _apply_file(Path(path), settings, problems)
    for override in overrides:
        _apply_override(override, settings, problems)
    tree: dict[str, dict[str, Any]] = {}
    for option in _OPTIONS.values():
        _place_value(option, settings, tree, problems)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        # A mistyped option looks unset to the rules between options, so they would only add noise to other problems.
        raise ConfigError([*problems, *_validation_problems(error, settings, with_rules=not problems)]) from error
    if problems:
        raise ConfigError(problems)
    rows = [key for option in _OPTIONS.values() for key, _ in _rows(config, option)]
    preset = vars(config.algorithm)["preset"]  # not by attribute, which would count as a read
    return config, {dotted(key): settings[key].source if key in settings else default_source(preset, *key[:2]) for key in rows}


def render(config: Config, sources: Mapping[str, str] | None = None) -> str:
    """Write a configuration as a recipe that loads back to the same values.

    Args:
        config: What to write.
        sources: Where each value came from, as `load_with_sources` tells it; shown as aligned comments.
    """
    lines: list[str] = []
    for section in Config.model_fields:
        rows = [
            (f"{dotted(key[1:])} = {to_toml(value)}", dotted(key))
            for option in _OPTIONS.values()
            if option.section == section
            for key, value in _rows(config, option)
        ]
        column = max((len(text) for text, _ in rows if len(text) <= _COMMENT_COLUMN_LIMIT), default=0)
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for text, key in rows:
            lines.append(text if sources is None else f"{text:<{column}}  # {sources.get(key, 'default')}")
    return "\n".join(lines) + "\n"


def describe() -> str:
    """Describe every option as Markdown: its type and limits, its default and its meaning."""
    lines: list[str] = []
    for section, field in Config.model_fields.items():
        lines += [f"## [{section}]", "", (field.annotation.__doc__ or "").strip() if field.annotation else "", ""]
        lines += [
            f"- `{option.name}` ({option.expects}; default `{to_toml(option.default)}`): {option.meaning}"
            for option in _OPTIONS.values()
            if option.section == section
        ]
        lines.append("")
    return "\n".join(lines)


@contextmanager
def record_reads() -> Iterator[set[str]]:
    """Record which options are read from any `Config` while the context is open, in all threads of this process.

    Loading, checking rules, dumping, hashing, comparing and printing a configuration do not count as reads.

    Yields:
        The set of options read so far, such as `optimizer.learning_rate`; it grows while the context is open.
    """
    reads: set[str] = set()
    _RECORDERS.append(reads)
    # Patched in only while someone listens, so that reads cost nothing otherwise.
    type.__setattr__(Section, "__getattribute__", _recorded_getattribute)
    try:
        yield reads
    finally:
        _RECORDERS[:] = [other for other in _RECORDERS if other is not reads]
        if not _RECORDERS:
            type.__delattr__(Section, "__getattribute__")


def unread(config: Config, reads: set[str]) -> list[str]:
    """List the options of a configuration that are missing from a record of reads, in the order of declaration."""
    sections = type(config).model_fields
    return [dotted(key) for key in _OPTIONS if key[0] in sections and dotted(key) not in reads]


_RECORDERS: list[set[str]] = []


def _recorded_getattribute(section: Section, name: str) -> Any:
    key = _READ_NAMES.get((type(section), name))
    if key and not CHECKING_RULES.get():
        for reads in _RECORDERS:
            reads.add(key)
    return object.__getattribute__(section, name)


@dataclass(frozen=True)
class _Setting:
    """A value someone set: what, and where."""

    value: Any
    file: Path | None = None
    line: int = 0

    @property
    def place(self) -> str:
        """Where, for an error message."""
        return f"{self.file}:{self.line}" if self.file else "command line"

    @property
    def source(self) -> str:
        """Where, for the listing of a whole configuration."""
        return f"{self.file.name}:{self.line}" if self.file else "command line"


@dataclass(frozen=True)
class _Option:
    """What loading has to know about one option of the configuration."""

    section: str
    name: str
    kind: type[Any]
    choices: tuple[str, ...]
    optional: bool
    expects: str
    default: Any
    meaning: str

    @property
    def key(self) -> Key:
        return (self.section, self.name)


_KIND_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    Path: "a path",
    dict: "a table",
    tuple: "a list of strings",
}


def _option_of(section: str, name: str, field: FieldInfo) -> _Option:
    annotation: Any = field.annotation
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = [get_args(m)[0] if hasattr(m, "__metadata__") else m for m in members if m is not type(None)]
    assert len(kinds) == 1, f"{section}.{name}: loading handles one type per option, optionally with None"
    choices = get_args(kinds[0]) if get_origin(kinds[0]) is Literal else ()
    kind: type[Any] = str if choices else get_origin(kinds[0]) or kinds[0]
    expects = "one of " + ", ".join(f'"{choice}"' for choice in choices) if choices else _KIND_NAMES[kind]
    limits = [
        f"{sign} {getattr(limit, attribute)}"
        for limit in field.metadata
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if hasattr(limit, attribute)
    ]
    optional = len(members) > 1
    expects = " ".join([expects, " and ".join(limits)]).strip() + (" or none" if optional else "")
    default = field.get_default()
    return _Option(section, name, kind, choices, optional, expects, default, field.description or "")


def _apply_file(path: Path, settings: dict[Key, _Setting], problems: list[str]) -> None:
    """Add the settings of a recipe; note unknown keys as problems."""
    text = _read(path)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([syntax_problem(path, text, str(error))]) from error
    lines: dict[Key, int] = {}
    for key, line in key_lines(text):
        lines.setdefault(key, line)
    for key, value in _leaves((), tree):
        # Keys inside a value (inline tables, arrays of tables) have no line of their own: their parent's line counts.
        line = next(lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines)
        setting = _Setting(value, path, line)
        if key[0] in Config.model_fields and not key[1:] and value == {}:
            continue  # a section without options
        if problem := _key_problem(key):
            problems.append(f"{setting.place}: {dotted(key)}: {problem}")
        else:
            settings[key] = setting


def _apply_override(override: str, settings: dict[Key, _Setting], problems: list[str]) -> None:
    """Add the setting of one `section.option=value`; note what is wrong with it as a problem."""
    name, equals, text = override.partition("=")
    key = parse_key(name.strip())
    if not equals or key is None:
        problems.append(f"command line: {override!r} is not of the form section.option=value")
        return
    if re.search("[\ud800-\udfff]", override):  # how Python passes bytes that are not UTF-8
        problems.append(f"command line: {dotted(key)}: the value is not valid UTF-8")
        return
    option = _OPTIONS.get(key[:2])
    value, problem = _override_value(option, text.strip())
    problem = _key_problem(key) or problem
    if problem:
        problems.append(f"command line: {dotted(key)}: {problem}")
        return
    for other in list(settings):
        if other[: len(key)] == key or key[: len(other)] == other:
            del settings[other]
    for leaf, leaf_value in _leaves(key, value):
        settings[leaf] = _Setting(leaf_value)


def _override_value(option: _Option | None, text: str) -> tuple[Any, str | None]:
    """Parse the value of an override, as TOML where it can be and as plain text elsewhere; returns (value, problem)."""
    if not text:
        return None, 'has no value; write "" for empty text'
    if option and option.optional and text in ("none", "null"):
        return "none", None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    value = parsed["value"] if parsed.keys() == {"value"} else text
    if option and option.kind in (str, Path) and not isinstance(value, str):
        return text, None  # a folder may be called 2024
    if value is text and option and option.kind is dict and text[0] in "[{\"'":
        return None, f"the value {text} is not TOML"
    return value, None


def _place_value(
    option: _Option, settings: Mapping[Key, _Setting], tree: dict[str, dict[str, Any]], problems: list[str]
) -> None:
    """Put the value of one option, converted to its type, into the tree that becomes a `Config`."""
    section = tree.setdefault(option.section, {})
    if option.kind is dict:
        for key, setting in settings.items():
            if key[:2] == option.key:
                _set_deep(tree, key, setting.value)
        return
    setting = settings.get(option.key)
    if setting is None:
        if option.kind is Path and option.default is not None:
            section[option.name] = _resolve(str(option.default), Path())
        return
    value = setting.value
    if option.optional and value == "none":
        section[option.name] = None
    elif option.kind is Path and isinstance(value, str):
        try:
            section[option.name] = _resolve(value, setting.file.parent if setting.file else Path())
        except ValueError as error:
            problems.append(f"{setting.place}: {dotted(option.key)}: {error}")
    elif option.kind is int and isinstance(value, float) and value.is_integer():
        section[option.name] = int(value)  # 1e3 is how people write 1000
    elif option.kind is tuple and isinstance(value, list):
        section[option.name] = tuple(value)
    else:
        section[option.name] = value


def _set_deep(tree: dict[str, Any], key: Key, value: Any) -> None:
    for part in key[:-1]:
        tree = tree.setdefault(part, {})
    tree[key[-1]] = value


def _resolve(text: str, folder: Path) -> Path:
    if not text or "\0" in text:
        raise ValueError(f"expects a path, got {to_toml(text)}")
    if "://" in text:
        raise ValueError(f"{to_toml(text)} is a remote address, but only paths of mounted file systems can be used")
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"cannot expand the home directory in {to_toml(text)}: {error}") from error
    return Path(os.path.abspath(folder / path))


def _read(path: Path) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        names = [str(other) for other in path.parent.glob("*.toml")]
        raise ConfigError([f"{path}: no such recipe{_did_you_mean(str(path), names)}"]) from error
    except IsADirectoryError as error:
        raise ConfigError([f"{path} is a directory; name a recipe file in it"]) from error
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise ConfigError([f"{path}:{line}: the byte 0x{byte:02x} is not valid UTF-8; save the recipe as UTF-8"]) from error


def _leaves(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    """Yield what is assigned: every value that is not a table, and empty tables.

    A table given to an option that takes none is yielded whole, to be reported as a value of the wrong type.
    """
    option = _OPTIONS.get(key[:2])
    if isinstance(value, dict) and (value or not key) and (option is None or option.kind is dict):
        for name, inner in value.items():
            yield from _leaves((*key, name), inner)
    else:
        yield key, value


def _key_problem(key: Key) -> str | None:
    """Say why a key cannot be set, or None."""
    if option := _OPTIONS.get(key[:2]):
        return f"{dotted(option.key)} is no section; it takes {option.expects}" if key[2:] and option.kind is not dict else None
    if len(key) == 1 and key[0] in Config.model_fields:
        return f"is a section; set its options one by one, such as {key[0]}.{_SECTION_NAMES[key[0]][0]}"
    return _unknown_problem(key)


def _unknown_problem(key: Key) -> str:
    section, name = key[:2] if key[1:] else ("", key[0])
    plain = name.replace("-", "_").lower()
    known = section in _SECTION_NAMES
    if section == "sampler" and plain in _TRUNCATION:
        return f"{_TRUNCATION_REFUSED}; {_TRUNCATION[plain]}"
    if section and not known and (near := difflib.get_close_matches(section.lower(), _SECTION_NAMES, 1, 0.6)):
        meant = f"{near[0]}.{plain}" if plain in _SECTION_NAMES[near[0]] else f"[{near[0]}]"
        return f"unknown section [{section}]; did you mean {meant}?"
    what = "unknown option" if known else f"unknown section [{section}]" if section else "unknown key"
    if plain in _SECTION_NAMES.get(section, ()):
        return f"{what}; write {section}.{plain}"
    if homes := [home for home, names in _SECTION_NAMES.items() if plain in names]:
        return f"{what}; {plain} belongs in " + " or ".join(f"[{home}]" for home in homes)
    if plain in _OTHER_NAMES:
        return f"{what}; rljax calls it {_OTHER_NAMES[plain]}"
    if not section and (near := difflib.get_close_matches(plain, _SECTION_NAMES, 1, 0.75)):
        return f"{what}; did you mean [{near[0]}]?"
    if near := difflib.get_close_matches(plain, _SECTION_NAMES.get(section, ()), 1, 0.75):
        return f"{what}; did you mean {section}.{near[0]}?"
    names = [option.name for option in _OPTIONS.values()]
    if len(plain) > 2 and (near := difflib.get_close_matches(plain, names, 1, 0.6)):
        homes = [home for home, names in _SECTION_NAMES.items() if near[0] in names]
        return f"{what}; did you mean " + " or ".join(f"{home}.{near[0]}" for home in homes) + "?"
    if known:
        return f"{what}; [{section}] has " + ", ".join(_SECTION_NAMES[section])
    return f"{what}; the sections are " + ", ".join(f"[{name}]" for name in _SECTION_NAMES)


def _validation_problems(error: ValidationError, settings: Mapping[Key, _Setting], with_rules: bool) -> Iterator[str]:
    reported: set[Key] = set()
    for detail in error.errors():
        key: Key = tuple(str(part) for part in detail["loc"][:2])
        option = _OPTIONS.get(key)
        if option is None:
            rules = detail["msg"].removeprefix("Value error, ").split("\n") if with_rules else []
            yield from (f"{_rule_place(rule, settings)}: {rule}" for rule in rules)
        elif key not in reported:
            reported.add(key)
            place = settings[key].place if key in settings else "default"
            value = settings[key].value if key in settings else option.default
            hint = _did_you_mean(str(value), option.choices)
            yield f"{place}: {dotted(key)}: expects {option.expects}, got {to_toml(value)}{hint}"


def _rule_place(rule: str, settings: Mapping[Key, _Setting]) -> str:
    """Name the places where the options of a broken rule were set."""
    named = [key for key in settings if re.search(rf"\b{re.escape(dotted(key))}\b", rule)]
    return ", ".join(sorted({settings[key].place for key in named}, key=lambda place: (len(place), place))) or "default"


def _did_you_mean(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _rows(config: Config, option: _Option) -> Iterator[tuple[Key, Any]]:
    section = vars(config)[option.section]
    yield from _leaves(option.key, vars(section)[option.name])  # not by attribute, which would count as a read


_OPTIONS: dict[Key, _Option] = {
    (section, name): _option_of(section, name, option)
    for section, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    for name, option in field.annotation.model_fields.items()
}
_SECTION_NAMES: dict[str, list[str]] = {
    section: [option.name for option in _OPTIONS.values() if option.section == section] for section in Config.model_fields
}
_READ_NAMES: dict[tuple[Any, str], str] = {
    (Config.model_fields[section].annotation, name): dotted((section, name)) for section, name in _OPTIONS
}
_TRUNCATION_REFUSED = (
    "training draws from the whole tempered distribution. From a truncated one, the sampler's log-probabilities are those of "
    "the kept tokens alone, renormalised, the learner's are not, and importance ratios would be wrong"
)
_TRUNCATION = {  # what samplers can do and training refuses
    **{name: f"eval.{name} sets it for evaluations" for name in ("top_k", "top_p", "min_p")},
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "min_tokens"), "`SamplingParams` has it for sampling alone"),
}
_OTHER_NAMES = {  # what other systems call these options
    "lr": "optimizer.learning_rate",
    "max_steps": "train.steps",
    "num_epochs": "train.steps",
    "group_size": "algorithm.num_generations",
    "kl_coef": "algorithm.beta",
    "clip_ratio": "algorithm.epsilon",
    "train_batch_size": "train.rollout_batch_size",
    "max_new_tokens": "sampler.max_completion_length",
    "output_dir": "run.dir",
}
