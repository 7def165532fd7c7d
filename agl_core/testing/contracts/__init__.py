"""What it means to be a store, a route resolver or a runner: pytest classes to run on one's own.

A plugin author subclasses a contract under a name that begins with ``Test`` and gives the fixture
that it asks for. The tests are coroutines, for pytest-asyncio with ``asyncio_mode = auto``.
"""

from __future__ import annotations

import pytest

# Before the modules are imported, so that a broken rule shows both sides of its assert.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in (
            "resolver",
            "runner",
            "store_facts",
            "store_feed",
            "store_rollouts",
            "store_shared",
            "store_support",
        )
    )
)

from agl_core.testing.contracts.resolver import RouteResolverContract  # noqa: E402
from agl_core.testing.contracts.runner import RunnerContract  # noqa: E402
from agl_core.testing.contracts.store import StoreContract  # noqa: E402

__all__ = ["RouteResolverContract", "RunnerContract", "StoreContract"]
