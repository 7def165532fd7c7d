"""The whole plugin contract: the hooks that a plugin may implement.

Hooks are plain functions, called while the service, the controller or a client is built. They hand
over objects of ``interfaces.py``, which do the work. Implementations may take fewer arguments than
a spec has.
"""

from __future__ import annotations

import pluggy

from agl_core.clock import Clock
from agl_core.interfaces import (
    AsgiServer,
    CaptureSink,
    ClientExtension,
    Exporter,
    ModelServers,
    RequestReshaper,
    RolloutHooks,
    RouteResolver,
    Runner,
    Store,
    WebApp,
)

PROJECT = "agl"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class ServiceHooks:
    """Hooks of the service and of the controller (entry point group ``agl.plugins``)."""

    @hookspec
    def provide_store(self, clock: Clock) -> Store:
        """Return the store.

        Called:  once, while the service is built.
        Answers: exactly one enabled plugin; none or two stop the start.
        Errors:  raising stops the start.
        Since:   0.1
        """

    @hookspec
    def provide_runner(self, clock: Clock) -> Runner:
        """Return the object that executes attempts.

        Called:  once, while the controller is built; never in the service.
        Answers: exactly one enabled plugin; none or two stop the controller.
        Errors:  raising stops the controller.
        Since:   0.1
        """

    @hookspec
    def provide_route_resolver(self, clock: Clock, servers: ModelServers) -> RouteResolver:
        """Return the object that picks a model server for each proxied request.

        ``servers`` is for what it has to know of servers; to be used once the service serves, and
        never by ``resolve``, which calls wait for.

        Called:  once, while the service is built, in the order of ``plugins.enabled``.
        Answers: one or more; for each request the first resolver that returns a route wins.
        Errors:  raising here stops the start; raising in ``resolve`` fails that request with 502.
        Since:   0.1
        """

    @hookspec
    def provide_request_reshaper(self) -> RequestReshaper:
        """Return an object that changes requests to model servers.

        Called:  once, while the service is built, in the order of ``plugins.enabled``.
        Answers: any number; each sees the agent's request, later ones overrule earlier ones.
        Errors:  raising here stops the start; raising in ``reshape`` fails that request with 502.
        Since:   0.1
        """

    @hookspec
    def provide_capture_sink(self) -> CaptureSink:
        """Return an object that receives every captured event beside the store.

        Called:  once, while the service is built.
        Answers: any number.
        Errors:  raising here stops the start; raising in ``receive`` is logged and counted.
        Since:   0.1
        """

    @hookspec
    def provide_exporter(self) -> list[Exporter]:
        """Return the formats that ``/api/export/{format}`` offers.

        Called:  once, while the service is built.
        Answers: any number; two exporters of one format stop the start.
        Errors:  raising here stops the start; raising in ``encode`` or ``finish`` refuses the
                 export, or breaks its answer off.
        Since:   0.1
        """

    @hookspec
    def provide_rollout_hooks(self) -> RolloutHooks:
        """Return an object that looks at rollouts when they are enqueued and when they end.

        Called:  once, while the service is built, in the order of ``plugins.enabled``.
        Answers: any number; each gets the spec that the one before returned.
        Errors:  raising here stops the start; raising in ``on_enqueue`` refuses the request, in
                 ``on_finished`` it is logged and counted.
        Since:   0.1
        """

    @hookspec
    def provide_asgi_server(self) -> AsgiServer:
        """Return the server that runs the application.

        Called:  once, before ``agl serve`` binds its socket, and by ``agl config check``.
        Answers: exactly one; the plugin that ``server.use`` names is asked and no other.
        Errors:  raising stops the start.
        Since:   0.1
        """

    @hookspec
    def register_routes(self, app: WebApp) -> None:
        """Add blueprints to the web application.

        Called:  once, after the core's own routes.
        Answers: any number; a path that exists already stops the start.
        Errors:  raising stops the start.
        Since:   0.1
        """


class ClientHooks:
    """Hooks of the client (entry point group ``agl.client_plugins``)."""

    @hookspec
    def provide_client_extension(self) -> ClientExtension:
        """Return an object that adds headers or a namespace to the client.

        Called:  once per client, when it is made.
        Answers: any number; two of one name are an error.
        Errors:  raising makes the client's constructor raise ``HookError``.
        Since:   0.1
        """
