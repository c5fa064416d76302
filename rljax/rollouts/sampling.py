"""How a run samples: from the configuration to the record that goes with every request.

Owns the two rules of a run, one for training and one for evaluation. Refuses to own what a rule means (`SamplingParams`).
"""

from rljax.config import Config
from rljax.records import SamplingParams


def train_params(config: Config) -> SamplingParams:
    """Return how training samples: from the whole tempered distribution, which is what the learner scores."""
    sampler = config.sampler
    return SamplingParams(max_tokens=sampler.max_completion_length, temperature=sampler.temperature, stop=sampler.stop)


def eval_params(config: Config) -> SamplingParams:
    """Return how evaluation samples."""
    sampler, asked = config.sampler, config.eval
    return SamplingParams(
        max_tokens=sampler.max_completion_length,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        stop=sampler.stop,
    )


def params_in_use(config: Config) -> tuple[SamplingParams, ...]:
    """Return how a training run samples, in all that it does."""
    return (train_params(config), eval_params(config)) if config.eval.every else (train_params(config),)
