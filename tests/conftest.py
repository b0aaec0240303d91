"""Fixtures that every test folder may use."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, the only loop the product runs on."""
    return "asyncio"
