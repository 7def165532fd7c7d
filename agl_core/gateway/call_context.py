"""What all calls share."""

from __future__ import annotations

from attrs import define

from agl_core.clock import Clock
from agl_core.gateway.call_limits import CallLimits
from agl_core.gateway.forward import Forwarder
from agl_core.gateway.gate import Gates
from agl_core.gateway.memory import ConversationMemory
from agl_core.gateway.recorder import Recorder
from agl_core.gateway.registry import Registry
from agl_core.gateway.rounds import Rounds
from agl_core.settings import GatewaySettings


@define(kw_only=True)
class CallContext:
    """What calls share."""

    settings: GatewaySettings
    clock: Clock
    registry: Registry
    gates: Gates
    forwarder: Forwarder
    recorder: Recorder
    memory: ConversationMemory
    limits: CallLimits
    rounds: Rounds
