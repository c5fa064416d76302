"""One fork server for all end-to-end tests."""

from collections.abc import Iterator

import pytest

from tests.e2e.processes import Server, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Start runs in processes of their own."""
    with serving() as opened:
        yield opened
