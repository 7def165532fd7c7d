"""The Python client of the service, blocking and asynchronous.

Nothing here is needed by agents: they use any OpenAI-compatible SDK.
"""

from agl_core.client.async_client import AsyncAglLiteClient
from agl_core.client.results import (
    CancelResult,
    GatewayView,
    HealthView,
    ModelServerView,
    PolicyView,
    ReadyView,
    Refusal,
    RolloutToken,
    WaitTimeout,
)
from agl_core.client.sync_client import AglLiteClient

__all__ = [
    "AglLiteClient",
    "AsyncAglLiteClient",
    "CancelResult",
    "GatewayView",
    "HealthView",
    "ModelServerView",
    "PolicyView",
    "ReadyView",
    "Refusal",
    "RolloutToken",
    "WaitTimeout",
]
