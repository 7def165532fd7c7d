"""The HTTP API: everything under ``/api``, the agents' events and input, and operations.

Each module has a table of routes; ``register`` puts them all into a Quart application. Model calls
are not served here: the gateway answers them in front of Quart.
"""

from __future__ import annotations

from typing import cast

from quart import Quart, Response, request

from agl_core.api.endings import Endings
from agl_core.api.errors import register_error_handlers
from agl_core.api.events import EventRoutes
from agl_core.api.export import ExportRoutes
from agl_core.api.front import RequestFront
from agl_core.api.gateway_admin import GatewayRoutes
from agl_core.api.health import HealthRoutes
from agl_core.api.models import ModelRoutes
from agl_core.api.resources import ResourceRoutes
from agl_core.api.rollouts import RolloutRoutes
from agl_core.api.routes import READERS, IdConverter, Route, RouteBinder, client_of
from agl_core.auth import require
from agl_core.interfaces import AsgiApp
from agl_core.services import Services

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def register(app: Quart, services: Services) -> None:
    """Add the API to an application, and the limits that Quart's defaults get wrong.

    Args:
        app: Made with ``static_folder=None``.
        services: What the API works with.
    """
    settings = services.settings.server
    app.config["RESPONSE_TIMEOUT"] = None  # exports and long-polls end in their own time
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    app.config["BODY_TIMEOUT"] = settings.body_seconds
    app.url_map.converters["id"] = IdConverter
    app.url_map.merge_slashes = False
    register_error_handlers(app)
    app.asgi_app = RequestFront(cast(AsgiApp, app.asgi_app))  # type: ignore[method-assign, assignment]

    binder = RouteBinder(services)
    endings = Endings(services)
    health = HealthRoutes(services, endings, binder.requests)
    tables: dict[str, list[Route]] = {
        "rollouts": RolloutRoutes(services, endings).routes(),
        "events": EventRoutes(services).routes(),
        "models": ModelRoutes(services).routes(),
        "gateway_admin": GatewayRoutes(services).routes(),
        "resources": ResourceRoutes(services).routes(),
        "export": ExportRoutes(services).routes(),
        "health": health.routes(),
    }
    for name, routes in tables.items():
        binder.bind(app, name, routes)
    health.describe([route for routes in tables.values() for route in routes])
    templates = {route.rule: route.path for routes in tables.values() for route in routes}

    @app.before_request
    async def keep_added_routes() -> None:
        """Routes of plugins below ``/api`` need a key as ours do: a reader's to GET."""
        rule = request.url_rule
        if rule is None or rule.rule in templates or not rule.rule.startswith("/api/"):
            return
        scope = request.scope
        identity = services.authority.identify(scope["headers"], client_of(scope))
        readers = READERS if request.method in ("GET", "HEAD") else ()
        require(identity, *readers, to=f"{request.method} {rule.rule}")

    @app.after_request
    async def count(response: Response) -> Response:
        rule = request.url_rule
        template = "other" if rule is None else templates.get(rule.rule, "other")
        method = request.method if request.method in _METHODS else "other"
        binder.requests[method, template, response.status_code] += 1
        return response
