"""Named algorithms: what `algorithm.preset` sets.

Owns one table from a name to the options that make up the algorithm as its source states it. Refuses to own options,
defaults and rules (`config.py`) and formulas (docs/math.md). Imports nothing of rljax.

A preset changes defaults only: an option that is set in the recipe or on the command line wins.
"""

from collections.abc import Mapping
from typing import Any


def default_source(preset: str, section: str, option: str) -> str:
    """Say where the value of an option comes from that nobody has set: `preset NAME` or `default`."""
    return f"preset {preset}" if section == "algorithm" and option in PRESETS[preset] else "default"


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    # DeepSeekMath, arXiv:2402.03300, eq. 3 and 4; its weight of the divergence is 0.04.
    "grpo": {
        "advantage": "grpo",
        "scale_rewards": "group",
        "loss_agg_mode": "seq-mean-token-mean",
        "epsilon_high": 0.2,
        "beta": 0.04,
        "kl_estimator": "k3",
    },
    # arXiv:2503.20783, section 3.2: no deviation, a constant length, no reference.
    "dr_grpo": {
        "advantage": "grpo",
        "scale_rewards": "none",
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "epsilon_high": 0.2,
    },
    # arXiv:2402.14740: REINFORCE on whole completions, the divergence in the reward.
    "rloo": {
        "advantage": "rloo",
        "scale_rewards": "none",
        "surrogate": "reinforce",
        "loss_agg_mode": "seq-mean-token-sum",
        "beta": 0.05,
        "kl_estimator": "k1",
        "kl_in_reward": True,
    },
    # arXiv:2501.03262: no baseline but the batch, the divergence in the reward of each token.
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "epsilon_high": 0.2,
        "beta": 0.01,
        "kl_estimator": "k1",
        "kl_in_reward": True,
    },
    # The same paper: the group's mean, then whitening over the batch; the divergence in the loss, as k2.
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline",
        "epsilon_high": 0.2,
        "beta": 0.01,
        "kl_estimator": "k2",
    },
    # arXiv:2503.14476. A fifth of the length limit is its 4096 of 20480 tokens.
    "dapo": {
        "advantage": "grpo",
        "scale_rewards": "group",
        "loss_agg_mode": "token-mean",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "overlong_buffer_len": -1,
        "overlong_penalty_factor": 1.0,
        "dynamic_sampling": True,
    },
    # arXiv:2507.18071, section 5.1 for the bounds.
    "gspo": {
        "importance_sampling_level": "sequence",
        "loss_agg_mode": "seq-mean-token-mean",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    # The same paper, section 4.3.
    "gspo_token": {
        "importance_sampling_level": "sequence-token",
        "loss_agg_mode": "seq-mean-token-mean",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    # MiniMax-M1, arXiv:2506.13585, eq. 4: no lower bound. The upper bound of 5 is from ScaleRL, arXiv:2510.13786.
    "cispo": {"surrogate": "cispo", "loss_agg_mode": "token-mean", "epsilon": 1.0, "epsilon_high": 4.0},
    # arXiv:2511.20347, section 3.
    "sapo": {"surrogate": "sapo", "loss_agg_mode": "seq-mean-token-mean"},
    # arXiv:2602.02710: the mean reward takes the place of the deviation.
    "maxrl": {"advantage": "maxrl", "epsilon_high": 0.2},
    # arXiv:2601.05242: needs reward_weights, one per named reward.
    "gdpo": {"advantage": "gdpo", "epsilon_high": 0.2},
    # PPO, arXiv:1707.06347, as language models were first trained with it: arXiv:1909.08593 (section 2.2 for the divergence
    # in the reward, gamma and lambda), arXiv:2403.17031 for the bounds, whitening and the weight of the divergence.
    "ppo": {
        "advantage": "gae",
        "gamma": 1.0,
        "gae_lambda": 0.95,
        "whiten_advantages": True,
        "cliprange_value": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.05,
        "kl_estimator": "k1",
        "kl_in_reward": True,
    },
}
"""Options of the section `algorithm` by preset."""
