"""What a rollout becomes follows from the weights, its prompt and its key: not from its slot, its neighbours or when it came.

Within one compiled shape that holds to the last bit; between shapes the tokens are the same and log-probabilities agree to
rounding. A batch-invariant engine has one shape.
"""

import numpy as np
import pytest

from tests.tiny_model import bits, drain, engine_of, request, run, some_requests, warm_engine

LOGP_ATOL = 5e-6
"""Float32 sums in another order; log-probabilities are of the order 10 (nats)."""


def test_alone_it_is_what_it_is_among_others() -> None:
    requests = some_requests(10)
    together = bits(run(warm_engine(), requests))
    for asked in requests[::3]:
        assert bits(run(warm_engine(), [asked])) == {asked.ticket: together[asked.ticket]}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_submission_changes_nothing(seed: int) -> None:
    requests = some_requests(10)
    order = np.random.default_rng(seed).permutation(len(requests))
    assert bits(run(warm_engine(), [requests[index] for index in order])) == bits(run(warm_engine(), requests))


def test_other_prompts_change_nothing() -> None:
    requests = some_requests(3)
    expected = bits(run(warm_engine(), requests))
    others = [other for other in some_requests(12, 3, seed=7) if other.ticket not in expected]
    crowd = [*others[:9], *requests, *others[9:]]
    found = bits(run(warm_engine(), crowd))
    assert {ticket: found[ticket] for ticket in expected} == expected


def test_coming_late_changes_nothing() -> None:
    requests = some_requests(10)
    expected = bits(run(warm_engine(), requests))
    engine, found = warm_engine(), {}
    for asked in requests:
        engine.submit([asked])
        engine.step()
        found |= bits(dict(engine.poll()))
    assert found | bits(drain(engine)) == expected


def test_in_a_batch_invariant_engine_longer_neighbours_change_no_bit() -> None:
    short, long = (
        [request((f"of {limit}", index), [7 + index] * 20, max_tokens=limit) for index in range(4)] for limit in (120, 400)
    )
    options = {"max_completion_length": 400, "stop_ids": (0,), "batch_invariant": True}
    alone = bits(run(engine_of(**options), short))
    together = run(engine_of(**options), [*long, *short])
    assert max(len(done.tokens) for done in together.values()) > 200
    found = bits(together)
    assert {ticket: found[ticket] for ticket in alone} == alone


def test_the_number_of_slots_and_the_length_of_a_chunk_change_no_token() -> None:
    requests = some_requests(10)
    one, two = run(warm_engine(), requests), run(engine_of(slots=3, decode_chunk_steps=2, readers=3), requests)
    for ticket, done in one.items():
        assert two[ticket].tokens.tolist() == done.tokens.tolist()
        np.testing.assert_allclose(two[ticket].logp, done.logp, rtol=0, atol=LOGP_ATOL)
