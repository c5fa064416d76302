"""A preset sets defaults, an explicit option wins, and everybody can see which is which."""

from pathlib import Path
from typing import get_args

import pytest

from rljax.algorithm_config import AlgorithmConfig
from rljax.config import Config
from rljax.presets import PRESETS
from rljax.recipe import ConfigError, load, load_with_sources, render

NEEDED = {"gdpo": ["algorithm.reward_weights.answer=1.0"]}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_names_and_nothing_else(name: str) -> None:
    config, sources = load_with_sources(None, [f"algorithm.preset={name}", *NEEDED.get(name, [])])
    plain = AlgorithmConfig().model_dump()
    assert set(PRESETS[name]) <= set(plain) - {"preset"}
    for option, value in config.algorithm.model_dump().items():
        if option in PRESETS[name]:
            assert value == PRESETS[name][option]
            assert sources[f"algorithm.{option}"] == f"preset {name}"
        elif option not in ("preset", "reward_weights"):
            assert value == plain[option]
            assert sources[f"algorithm.{option}"] == "default"


def test_every_name_of_the_configuration_is_a_preset() -> None:
    assert get_args(AlgorithmConfig.model_fields["preset"].annotation) == tuple(PRESETS)


def test_what_is_set_wins_wherever_it_is_set(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[algorithm]\nepsilon = 0.1\npreset = "dapo"\n')
    config, sources = load_with_sources(recipe, ["algorithm.dynamic_sampling=false"])
    algorithm = config.algorithm
    assert (algorithm.epsilon, algorithm.epsilon_high, algorithm.dynamic_sampling) == (0.1, 0.28, False)
    named = {name: sources[f"algorithm.{name}"] for name in ("epsilon", "epsilon_high", "dynamic_sampling", "beta")}
    assert named == {
        "epsilon": "recipe.toml:2",
        "epsilon_high": "preset dapo",
        "dynamic_sampling": "command line",
        "beta": "default",
    }
    assert "overlong_buffer_len = -1" in render(config, sources)
    assert "# preset dapo" in render(config, sources)


def test_an_unknown_preset_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r'algorithm.preset: expects one of "none", "grpo".*did you mean dapo'):
        load(None, ["algorithm.preset=dappo"])


def test_python_and_json_agree_with_the_recipe() -> None:
    made = Config(algorithm=AlgorithmConfig(preset="gspo", epsilon=0.1))
    assert made.algorithm == load(None, ["algorithm.preset=gspo", "algorithm.epsilon=0.1"]).algorithm
    assert Config.model_validate_json(made.model_dump_json()) == made


def test_a_preset_written_out_is_the_same_run() -> None:
    written = [f"algorithm.{name}={str(value).lower()}" for name, value in PRESETS["dapo"].items()]
    assert load(None, written).hash() == load(None, ["algorithm.preset=dapo"]).hash()


def test_dapo_takes_a_fifth_of_the_limit() -> None:
    config = load(None, ["algorithm.preset=dapo", "sampler.max_completion_length=20480"])
    assert config.overlong_buffer_len == 4096
    assert load(None, ["algorithm.preset=dapo", "algorithm.overlong_buffer_len=7"]).overlong_buffer_len == 7
    assert load(None, []).overlong_buffer_len == 0


def test_a_line_says_what_is_combined() -> None:
    assert AlgorithmConfig(preset="rloo").describe() == (
        "rloo: rloo advantages, reinforce surrogate, seq-mean-token-sum, KL k1 in the reward"
    )
