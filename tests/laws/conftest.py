"""The session's real ranks end with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import close_all


@pytest.fixture(autouse=True, scope="session")
def ranks_end_with_the_session() -> Iterator[None]:
    """Ranks that the tests started are gone when the last one is done."""
    yield
    close_all()
