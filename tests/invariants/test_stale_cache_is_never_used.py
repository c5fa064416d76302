"""After new weights a warm engine samples what a cold one does: no key or value of the old weights is read again."""

from tests.tiny_model import bits, engine_of, host_params, published, run, some_requests, warm_engine


def test_stale_cache_is_never_used() -> None:
    warm, requests = warm_engine(), some_requests(8)
    new = host_params(seed=1)
    old = run(warm, requests)
    warm.submit(requests)
    warm.step()
    warm.clear()  # half-done rollouts leave their keys and values behind, too
    try:
        warm.set_weights(published(warm, new), 1)
        found = run(warm, requests)
    finally:
        warm.set_weights(published(warm, host_params()), 0)
    assert {version for done in old.values() for version in done.versions} == {0}
    assert {version for done in found.values() for version in done.versions} == {1}
    assert [done.tokens.tolist() for done in found.values()] != [done.tokens.tolist() for done in old.values()]
    assert bits(found) == bits(run(engine_of(params=new, version=1), requests))
    assert bits(run(warm, requests)) == bits(old)
