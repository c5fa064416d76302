from typing import Any

import pytest

from rljax.envs.arithmetic import Arithmetic
from rljax.envs.base import Env, EnvClass, parse_options, resolve, task_maker


def test_names_and_places_resolve_to_classes() -> None:
    assert resolve("arithmetic") is Arithmetic
    assert resolve("rljax.envs.arithmetic:Arithmetic") is Arithmetic
    assert isinstance(Arithmetic, EnvClass)
    assert isinstance(Arithmetic(Arithmetic.Options()), Env)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("arithmetik", "did you mean 'arithmetic'"),
        ("chess", "Known are arithmetic"),
        ("", "package.module:Class"),
        ("no_such_package.envs:World", "importing 'no_such_package.envs' failed"),
        ("rljax.envs.arithmetic:Aritmetic", "did you mean 'Arithmetic'"),
        ("rljax.records:Task", "lacks reset, step, close, Options (a subclass of rljax.section.Section)"),
        ("json:dumps", "lacks"),
    ],
)
def test_a_wrong_name_is_refused_with_what_would_be_right(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=r"env\.name") as caught:
        resolve(name)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"add_digit": 2}, "env.options.add_digit is unknown; did you mean 'add_digits'?"),
        ({"add_digits": 0}, "env.options.add_digits: Input should be greater than or equal to 1 (got 0)"),
        ({"add_digits": "2"}, "env.options.add_digits: Input should be a valid integer (got '2')"),
        ({"operations": {"ad": 1.0}}, "env.options.operations.ad is unknown; did you mean 'add'?"),
        ({"operations": {"add": 0.0}}, "env.options.operations has no weight above 0"),
        ({"operations": {"add": -1.0}}, "env.options.operations.add: "),
        ({"reward": {"exakt": 1.0}}, "env.options.reward.exakt is unknown; did you mean 'exact'?"),
        ({"reward": {}}, "env.options.reward has no weight above 0"),
        ({"largest_digits": 1, "largest_count": 11}, "env.options.largest_count (11)"),
    ],
)
def test_a_wrong_option_is_named_with_its_remedy(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=r"env\.options") as caught:
        parse_options("arithmetic", options)
    assert told in str(caught.value)


def test_all_wrong_options_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)env\.options\.one .*env\.options\.two "):
        parse_options("arithmetic", {"one": 1, "two": 2})


def test_whole_numbers_are_weights() -> None:
    assert parse_options("arithmetic", {"operations": {"add": 2}}).model_dump()["operations"] == {"add": 2.0}


def test_an_environment_without_tasks_points_to_a_file() -> None:
    with pytest.raises(ValueError, match=r"data\.source = 'file'"):
        task_maker("tests.envs.faulty:Faulty", {})
