"""The rules that every store keeps. This is the definition: ``interfaces.Store`` tells it."""

from __future__ import annotations

import pytest

from agl_core.interfaces import Store
from agl_core.testing.contracts.store_facts import EventRules, ResourceRules
from agl_core.testing.contracts.store_feed import FeedRules
from agl_core.testing.contracts.store_rollouts import RolloutRules
from agl_core.testing.contracts.store_shared import GatewayRules, LifeRules, ListenerRules


class StoreContract(
    RolloutRules, FeedRules, EventRules, ResourceRules, GatewayRules, ListenerRules, LifeRules
):
    """Subclass it and give the fixture ``store``: an entered, empty store, closed afterwards."""

    @pytest.fixture
    async def store(self) -> Store:
        """The store under test."""
        raise NotImplementedError("give a fixture 'store'")
