"""What changes a model server is out of an agent's reach: its weights, adapters, caches, its sleep.

Every other path below ``v1`` is passed on, and by these an agent could change the server that
trains it. vLLM has two of them there; the rest stand at a server's root, where a path below ``v1``
arrives when something before the server cuts that off.
"""

from __future__ import annotations

import logging
import re
from urllib.parse import unquote

from agl_core.auth import Identity
from agl_core.errors import Forbidden

log = logging.getLogger(__name__)

# vLLM's entrypoints/serve (lora, dev, elastic_ep, profile, and SageMaker's adapters) and SGLang's
# srt/entrypoints/http_server.py, with what their names have in common. Paths that only tell
# something, such as is_paused and weight_info, are not among them.
_CHANGES = re.compile(
    r"""
    (un)?load_lora_adapter\w* | adapters
    | pause(_generation)? | resume | continue_generation | abort_requests?
    | sleep | wake_up | collective_rpc | scale_elastic_ep | admin
    | reset_\w+ | flush_cache | clear_\w+ | (release|resume)_memory_occupation
    | update_weight\w* | (init|start|finish|destroy|send)_(\w+_)?weights?_\w+ | weight_checker
    | (start|stop|dump)_(profile|\w+_record)
    | set_internal_state | configure_logging | slow_down | freeze_gc | (open|close)_session
    """,
    re.VERBOSE,
)
_BETWEEN = re.compile(r"[^a-z0-9_.-]+")
# What stands before a server may decode once more than the server does; nobody does it oftener.
_DECODINGS = 5


def check_reach(identity: Identity, below: str) -> None:
    """Keep agents off the paths that change a model server.

    Args:
        identity: Who asks; only agents are kept off.
        below: The path below ``v1`` as it came: it is compared however it is spelled.

    Raises:
        Forbidden: An agent asks for one.
    """
    if identity.role != "agent":
        return
    path = below
    for _ in range(_DECODINGS):
        decoded = unquote(path, errors="replace")
        if decoded == path:
            break
        path = decoded
    parts = _BETWEEN.split(path.casefold())
    found = next((part for part in parts if _CHANGES.fullmatch(part)), None)
    if found is not None:
        log.warning(
            "refused an agent %r below /v1",
            found,
            extra={"rollout_id": identity.rollout_id, "code": Forbidden.default_code},
        )
        raise Forbidden(
            f"agents may not change a model server: {found!r} is not for them",
            hint="whoever trains does it, with the algorithm's key or at the server itself",
        )
