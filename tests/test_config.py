"""The options, and the rules between them."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rljax.config import Config, OptimizerConfig
from rljax.section import Section


def broken(**sections: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(sections)
    return [line for error in caught.value.errors() for line in error["msg"].removeprefix("Value error, ").split("\n")]


def test_the_defaults_keep_the_rules() -> None:
    config = Config()
    assert config.mini_batch_size == config.train.rollout_batch_size
    assert config.updates_per_batch == 1
    assert config.pack_length == config.sampler.max_prompt_length + config.sampler.max_completion_length


@pytest.mark.parametrize(
    ("train", "generations", "length", "rows"),
    [
        ({}, 8, 256, 8),
        ({"micro_batch_tokens": 1024}, 8, 512, 2),  # a group needs 128 + 8 x 128 tokens
        ({"micro_batch_tokens": 1024}, 2, 512, 2),  # less than two groups of 128 + 2 x 128
        ({"micro_batch_tokens": 300}, 8, 300, 1),
        ({"micro_batch_tokens": 600, "micro_batch_size_per_device": 2}, 8, 300, 2),
        ({"micro_batch_tokens": 2000, "pack_length": 256}, 8, 256, 7),
        ({"micro_batch_size_per_device": 3}, 8, 256, 3),
    ],
)
def test_rows_follow_from_a_budget_of_tokens(train: dict[str, int], generations: int, length: int, rows: int) -> None:
    lengths = {"max_prompt_length": 128, "max_completion_length": 128}
    config = Config.model_validate({"train": train, "sampler": lengths, "algorithm": {"num_generations": generations}})
    assert (config.pack_length, config.micro_batch_size_per_device) == (length, rows)


def test_every_option_has_a_sentence() -> None:
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, Section), name
        assert field.annotation.__doc__
        for option, declared in field.annotation.model_fields.items():
            assert declared.description, f"{name}.{option}"
            assert declared.description.endswith("."), f"{name}.{option}"


def test_a_configuration_is_frozen_and_closed() -> None:
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 3
    assert broken(train={"step": 3}) == ["Extra inputs are not permitted"]
    assert len(broken(train={"steps": True}, optimizer={"learning_rate": "1e-5"})) == 2


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"train": {"mini_batch_size": 3}}, ["train.rollout_batch_size (8)", "train.mini_batch_size (3)"]),
        ({"train": {"mini_batch_size": 16}}, ["train.rollout_batch_size (8)", "train.mini_batch_size (16)"]),
        ({"sampler": {"slots": 9}}, ["sampler.slots (9)", "algorithm.num_generations (8)"]),
        ({"algorithm": {"num_iterations": 3}, "checkpoint": {"every": 9}}, ["train.steps (100)", "algorithm.num_iterations"]),
        ({"algorithm": {"num_iterations": 4}}, ["checkpoint.every (10)", "algorithm.num_iterations"]),
        ({"train": {"mini_batch_size": 4}, "eval": {"every": 3}}, ["eval.every (3)", "train.mini_batch_size"]),
        ({"train": {"pack_length": 100}}, ["train.pack_length (100)", "sampler.max_prompt_length", "max_completion_length"]),
        ({"train": {"micro_batch_tokens": 200}}, ["train.micro_batch_tokens (200)", "a row of 256 tokens"]),
        (
            {"train": {"micro_batch_tokens": 400, "micro_batch_size_per_device": 2}},
            ["train.micro_batch_tokens (400)", "train.micro_batch_size_per_device rows of 256"],
        ),
        (
            {"train": {"micro_batch_tokens": 512, "micro_batch_size_per_device": 2, "pack_length": 256}},
            ["train.micro_batch_tokens has no effect", "train.pack_length"],
        ),
        ({"sampler": {"cache_tokens": 200}}, ["sampler.cache_tokens (200)", "sampler.max_prompt_length (128)"]),
        ({"mesh": {"fsdp": 0}}, ["mesh.fsdp"]),
        ({"data": {"source": "file"}}, ["data.source", "data.path"]),
        ({"data": {"source": "file", "path": "a"}, "eval": {"every": 10}}, ["eval.every", "eval.path"]),
        ({"data": {"path": "a"}}, ["data.path", "data.source"]),
        ({"eval": {"path": "a"}}, ["eval.path", "data.source"]),
        ({"data": {"num_tasks": 4}}, ["data.num_tasks (4)", "train.rollout_batch_size (8)"]),
        ({"sampler": {"temperature": 0}}, ["sampler.temperature"]),
        ({"algorithm": {"overlong_buffer_len": 129}}, ["algorithm.overlong_buffer_len (129)", "max_completion_length (128)"]),
        ({"algorithm": {"advantage": "maxrl", "scale_rewards": "none"}}, ["algorithm.scale_rewards", "algorithm.advantage"]),
        ({"algorithm": {"advantage": "gdpo"}}, ["algorithm.advantage", "algorithm.reward_weights"]),
        ({"algorithm": {"reward_weights": {"a": 1.0}}}, ["algorithm.reward_weights", "algorithm.advantage"]),
        (
            {"algorithm": {"preset": "gdpo", "reward_weights": {"a": 1.0}, "overlong_buffer_len": 4}},
            ["algorithm.overlong_buffer_len", "'gdpo'"],
        ),
        ({"algorithm": {"preset": "maxrl", "overlong_buffer_len": 4}}, ["algorithm.overlong_buffer_len", "'maxrl'"]),
        ({"algorithm": {"advantage": "gae", "scale_rewards": "none"}}, ["algorithm.scale_rewards", "'gae'"]),
        ({"algorithm": {"advantage": "gae", "dynamic_sampling": True}}, ["algorithm.dynamic_sampling", "'gae'"]),
        ({"algorithm": {"advantage": "return", "dynamic_sampling": True}}, ["algorithm.dynamic_sampling", "'return'"]),
        ({"algorithm": {"num_generations": 1}}, ["algorithm.num_generations = 1", "'grpo'", "'gae'"]),
        ({"algorithm": {"gamma": 0.9}}, ["algorithm.gamma", "'gae'", "algorithm.credit = 'turn'"]),
        ({"algorithm": {"gae_lambda": 1.0}}, ["algorithm.gae_lambda", "'gae'"]),
        ({"algorithm": {"whiten_advantages": False}}, ["algorithm.whiten_advantages", "'gae'"]),
        ({"algorithm": {"cliprange_value": 0.2}}, ["algorithm.cliprange_value", "'gae'"]),
        ({"algorithm": {"critic_warmup_steps": 2}}, ["algorithm.critic_warmup_steps", "'gae'"]),
        (
            {"algorithm": {"advantage": "gae", "critic_warmup_steps": 100}},
            ["algorithm.critic_warmup_steps (100)", "train.steps (100)"],
        ),
        ({"optimizer": {"critic_learning_rate": 1e-5}}, ["optimizer.critic_learning_rate", "'grpo'"]),
        ({"algorithm": {"advantage": "maxrl", "credit": "turn"}}, ["algorithm.credit = 'turn'", "'maxrl'"]),
        (
            {"algorithm": {"credit": "turn", "kl_in_reward": True, "beta": 0.1}},
            ["algorithm.credit = 'turn'", "algorithm.kl_in_reward"],
        ),
        ({"algorithm": {"credit": "turn", "overlong_buffer_len": 4}}, ["algorithm.credit", "algorithm.overlong_buffer_len"]),
        ({"algorithm": {"surrogate": "sapo", "epsilon_c": 3.0}}, ["algorithm.epsilon_c", "algorithm.surrogate"]),
        ({"algorithm": {"proximal": "behavior"}}, ["algorithm.proximal", "algorithm.rollout_is = 'none'"]),
        ({"algorithm": {"rollout_is_threshold_lower": 3.0}}, ["algorithm.rollout_is_threshold_lower (3.0)"]),
        ({"algorithm": {"rollout_rs_threshold": 0.4}}, ["algorithm.rollout_rs_threshold (0.4)"]),
        (
            {"algorithm": {"beta": 0.1, "kl_in_reward": True, "kl_estimator": "k3+"}},
            ["algorithm.kl_estimator", "algorithm.kl_in_reward"],
        ),
        ({"algorithm": {"kl_target": 0.1}}, ["algorithm.kl_target", "algorithm.beta"]),
        ({"algorithm": {"reference_sync_steps": 1}}, ["algorithm.reference_sync_steps", "algorithm.beta"]),
        ({"algorithm": {"reference_mixup_alpha": 0.5}}, ["algorithm.reference_mixup_alpha", "reference_sync_steps"]),
        ({"lora": {"alpha": 8.0}}, ["lora.alpha", "lora.rank = 0"]),
        ({"lora": {"rank": 4, "target_modules": ("all-linear", "q_proj")}}, ["lora.target_modules", "'all-linear'"]),
        ({"sampler": {"lora": "separate"}}, ["sampler.lora", "lora.rank = 0"]),
        ({"lora": {"base_dtype": "nf4"}}, ["lora.base_dtype", "lora.rank = 0"]),
        ({"lora": {"rank": 4, "base_dtype": "int8"}, "model": {"remat": "none"}}, ["model.remat = 'none'", "'int8'", "'dots'"]),
        (
            {"lora": {"rank": 4}, "algorithm": {"beta": 0.1, "reference_sync_steps": 1, "reference_mixup_alpha": 0.5}},
            ["algorithm.reference_mixup_alpha (0.5)", "lora.rank"],
        ),
        ({"optimizer": {"decay_steps": 9}}, ["optimizer.decay_steps", "optimizer.schedule"]),
        ({"optimizer": {"min_learning_rate": 1e-9}}, ["optimizer.min_learning_rate", "optimizer.schedule"]),
        ({"optimizer": {"muon_momentum": 0.9}}, ["optimizer.muon_momentum", "'adamw'"]),
        ({"optimizer": {"rule": "adafactor", "b1": 0.8}}, ["optimizer.b1", "'adafactor'", "no moments"]),
        ({"optimizer": {"rule": "adafactor", "moments_dtype": "bfloat16"}}, ["optimizer.moments_dtype", "'adafactor'"]),
        ({"optimizer": {"rule": "adafactor", "moments_dtype": "int8"}}, ["optimizer.moments_dtype", "'adafactor'"]),
        ({"optimizer": {"schedule": "cosine"}}, ["optimizer.schedule", "optimizer.decay_steps"]),
        (
            {"optimizer": {"schedule": "linear", "decay_steps": 9, "warmup_steps": 9}},
            ["optimizer.decay_steps (9)", "optimizer.warmup_steps (9)"],
        ),
        (
            {"optimizer": {"schedule": "linear", "decay_steps": 9, "min_learning_rate": 1.0}},
            ["optimizer.min_learning_rate (1.0)", "optimizer.learning_rate"],
        ),
    ],
)
def test_a_broken_rule_names_its_options(sections: dict[str, dict[str, Any]], named: list[str]) -> None:
    (message,) = broken(**sections)
    for name in named:
        assert name in message


def test_the_critic_learns_ten_times_as_fast_unless_told_otherwise() -> None:
    critic = {"advantage": "gae", "num_generations": 1}
    made = Config.model_validate({"algorithm": critic, "optimizer": {"learning_rate": 2e-6}})
    assert made.critic_learning_rate == pytest.approx(2e-5)
    told = {"learning_rate": 2e-6, "critic_learning_rate": 1e-6}
    assert Config.model_validate({"algorithm": critic, "optimizer": told}).critic_learning_rate == 1e-6


def test_all_broken_rules_are_told_together() -> None:
    assert len(broken(train={"mini_batch_size": 3}, sampler={"slots": 9, "temperature": 0}, data={"num_tasks": 4})) == 4


def test_the_hash_changes_with_what_decides_the_parameters_and_with_nothing_else() -> None:
    def hash_of(**sections: dict[str, Any]) -> str:
        return Config.model_validate(sections).hash()

    same = Config().hash()
    assert hash_of(optimizer={"learning_rate": 2e-6}) != same
    assert hash_of(run={"seed": 1}) != same
    assert hash_of(env={"options": {"operations": ["add"]}}) != same
    assert hash_of(train={"rollout_batch_size": 4}) != same
    assert hash_of(run={"dir": "elsewhere"}, train={"steps": 200}, mesh={"fsdp": 8}, telemetry={"live": "off"}) == same
    packed = {"micro_batch_tokens": 600, "pack_length": 300, "skip_zero_advantages": False}
    assert hash_of(train=packed) == same, "how rows are made moves sums by rounding"
    assert hash_of(checkpoint={"every": 20}, eval={"every": 10}, env={"workers": 7}, sampler={"slots": 128}) == same


def test_the_resolved_configuration_survives_json() -> None:
    config = Config.model_validate(
        {
            "run": {"dir": Path("a b")},
            "optimizer": {"max_grad_norm": None, "learning_rate": 1e-5},
            "env": {"options": {"x": [1, "y"]}},
        }
    )
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_a_section_alone_checks_its_own_rules() -> None:
    with pytest.raises(ValidationError, match=r"optimizer\.decay_steps"):
        OptimizerConfig(schedule="cosine")
