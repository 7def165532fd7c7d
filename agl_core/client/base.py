"""What both clients have in common: settings, extensions, pickling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import httpx

from agl_core.client.calls import ApiRequest
from agl_core.client.connection import ClientSettings, make_settings, message_options
from agl_core.client.plugins import Extensions
from agl_core.clock import SystemClock
from agl_core.errors import PluginNotFound
from agl_core.interfaces import ClientExtension


class ClientBase:
    """Keeps settings only; what is open is made when it is needed and never pickled."""

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout_seconds: float = 60,
        retries: int = 4,
        extensions: Sequence[str | ClientExtension] | None = None,
    ) -> None:
        """Nothing is connected before the first call.

        Args:
            url: Of the service; by default ``AGL_URL``, else http://127.0.0.1:8080.
            key: For the service; by default ``AGL_KEY``, else none.
            timeout_seconds: For one answer, what the service was told to wait not counted.
            retries: Repeats of a call that may be repeated, while the service is away or busy.
            extensions: Client plugins by name, or objects, whose headers go with each request.
                Namespaces of installed plugins (``client.verl``) need not be named here.
        """
        settings = make_settings(url, key, timeout_seconds, retries)
        self._start(settings, tuple(extensions or ()))

    def _start(self, settings: ClientSettings, given: tuple[str | ClientExtension, ...]) -> None:
        self._settings = settings
        self._given = given
        self._extensions = Extensions(given, type(self))
        self._clock = SystemClock()

    @property
    def url(self) -> str:
        """Of the service, without a slash at the end."""
        return self._settings.url

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self._settings, "given": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(state["settings"], state["given"])

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.__setstate__(self.__getstate__())
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.url!r})"

    def __getattr__(self, name: str) -> Any:
        """The namespace of a client plugin."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return self._extensions.namespace(name, self)
        except PluginNotFound as exc:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, and {exc}"
            ) from exc

    def _message(
        self, http: httpx.Client | httpx.AsyncClient, request: ApiRequest
    ) -> httpx.Request:
        options = message_options(request, self._settings, self._extensions.headers())
        return http.build_request(**options)
