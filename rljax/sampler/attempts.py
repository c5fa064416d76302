"""Several attempts at one prompt, returned together, the most likely first.

Owns the order. Refuses to own the sampling of each (engine.py) and the judging of answers by anything else.
"""

from collections.abc import Sequence
from dataclasses import replace

from rljax.records import Completion, SamplingParams
from rljax.sampler.engine import Engine, Request


def n_best(engine: Engine, prompt: Sequence[int], keys: Sequence[tuple[int, int]], params: SamplingParams) -> list[Completion]:
    """Sample the prompt once per key and return the completions, ranked by the mean of their tokens' `logp_raw`.

    The model's own log-probabilities rank them, because those under a truncated or tempered distribution say how likely a
    completion was to be drawn rather than how good the model finds it. Equal ones stay in the order of their keys.

    Args:
        engine: An engine that reports log-probabilities and has nothing else to do.
        prompt: Token ids to continue; computed once for all attempts that its `readers` allow.
        keys: Random key of each attempt.
        params: How all of them are drawn.
    """
    assert not engine.pending, "the completions of others would be dropped"
    asked = replace(params, logprobs=params.logprobs or 0)
    engine.submit([Request(attempt, tuple(prompt), key, asked) for attempt, key in enumerate(keys)])
    done = {}
    while engine.pending:
        engine.step()
        done |= dict(engine.poll())
    return sorted((done[attempt] for attempt in range(len(keys))), key=_likelihood, reverse=True)


def _likelihood(completion: Completion) -> float:
    assert completion.logp_raw is not None, "it was asked for"
    return float(completion.logp_raw.mean())
