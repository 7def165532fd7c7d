"""Operations: is it alive, is it ready, what does it count, and what can it do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quart import Response

from agl_core import __version__
from agl_core.api.endings import Endings
from agl_core.api.openapi import openapi_document
from agl_core.api.routes import Answer, Call, Route, json_answer, raw_json_answer
from agl_core.api.shapes import Health, Readiness
from agl_core.services import Services
from agl_core.wire import to_json

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[str, Mapping[str, str], float]


class HealthRoutes:
    """Handlers of the operators' routes.

    Args:
        services: What is reported on.
        endings: Counts failures of hooks.
        requests: Answered requests by (method, path template, status).
    """

    def __init__(
        self, services: Services, endings: Endings, requests: Counter[tuple[str, str, int]]
    ) -> None:
        self._services = services
        self._endings = endings
        self._requests = requests
        self._document = b""

    def routes(self) -> list[Route]:
        """The table of this module."""
        are_keys_set = self._services.authority.has_role_keys
        return [
            Route(
                method="GET",
                path="/healthz",
                handler=self.health,
                says="Whether the process serves.",
                roles=None,
                answers=(Answer(200, Health, "It does."),),
            ),
            Route(
                method="GET",
                path="/readyz",
                handler=self.readiness,
                says="Whether calls of agents can be served.",
                roles=None,
                answers=(
                    Answer(200, Readiness, "They can."),
                    Answer(503, Readiness, "They cannot, and why."),
                ),
            ),
            Route(
                method="GET",
                path="/metrics",
                handler=self.metrics,
                says="Counters and gauges for Prometheus.",
                roles=("viewer", "controller") if are_keys_set else None,
                answers=(Answer(200, str, "Text format 0.0.4.", media_type="text/plain"),),
            ),
            Route(
                method="GET",
                path="/openapi.json",
                handler=self.openapi,
                says="This document.",
                roles=None,
                answers=(Answer(200, Mapping[str, Any], "OpenAPI 3.1."),),
            ),
        ]

    def describe(self, routes: Sequence[Route]) -> None:
        """Make the document of all routes, which these are among."""
        self._document = to_json(openapi_document(routes))

    async def health(self, call: Call) -> Response:
        return json_answer(
            Health(status="ok", version=__version__, plugins=tuple(self._services.plugins))
        )

    async def readiness(self, call: Call) -> Response:
        reasons = tuple(self._services.gateway.unready())
        if reasons:
            answer = json_answer(Readiness(ready=False, reasons=reasons), 503)
            answer.headers["Retry-After"] = "1"
            return answer
        return json_answer({"ready": True})

    async def metrics(self, call: Call) -> Response:
        samples: list[Sample] = [
            (
                "agl_api_requests_total",
                {"method": method, "route": route, "status": str(status)},
                float(count),
            )
            for (method, route, status), count in sorted(self._requests.items())
        ]
        samples.append(("agl_api_waiters", {}, float(self._services.feed.waiting)))
        samples.extend(
            ("agl_hook_errors_total", {"hook": hook}, float(count))
            for hook, count in sorted(self._endings.hook_errors.items())
        )
        samples.extend(self._services.gateway.metrics())
        return Response(prometheus_text(samples).encode(), 200, content_type=METRICS_MEDIA_TYPE)

    async def openapi(self, call: Call) -> Response:
        return raw_json_answer(self._document)


def prometheus_text(samples: Iterable[Sample]) -> str:
    """Samples in Prometheus' text format 0.0.4; those of one name stand together."""
    by_name: dict[str, list[str]] = {}
    for name, labels, value in samples:
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        number = repr(int(value)) if value == int(value) else repr(value)
        by_name.setdefault(name, []).append(
            f"{name}{{{pairs}}} {number}" if pairs else f"{name} {number}"
        )
    lines: list[str] = []
    for name, rows in by_name.items():
        lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
        lines.extend(rows)
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
