"""Where the API server is and who we are: kubeconfig or service account, and fresh tokens."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from attrs import frozen

from agl_core.clock import Clock
from agl_core.errors import ConfigError

if TYPE_CHECKING:
    from kubernetes.aio.client import Configuration

    from agl_k8s.config import K8sConfig

log = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_KUBECONFIG = Path("~/.kube/config")
DEFAULT_NAMESPACE = "default"

# A credential plugin is a program: one that hands out bad tokens is not run for each request.
RELOAD_SECONDS = 5.0
# Tokens of credential plugins are renewed before they end, as long as the plugin says when.
EARLY_SECONDS = 60.0


@frozen
class Access:
    """How to reach the API server."""

    configuration: Configuration
    namespace: str
    credentials: Credentials


async def load_access(
    config: K8sConfig, clock: Clock, *, service_account: Path = SERVICE_ACCOUNT
) -> Access:
    """Find the cluster: the settings' kubeconfig, else KUBECONFIG's, ~/.kube/config, or the pod's.

    Raises:
        ConfigError: There is none, or it cannot be used; the message says what to do.
    """
    paths = _kubeconfig_paths(config)
    if paths is not None:
        return await _from_kubeconfig(config, clock, paths)
    if config.context is not None:
        raise ConfigError(
            f"plugins.k8s.context is {config.context!r}, but there is no kubeconfig to look in",
            hint="set plugins.k8s.kubeconfig or KUBECONFIG",
        )
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        raise ConfigError(
            f"no cluster is known: {DEFAULT_KUBECONFIG} does not exist and this is no pod",
            hint="set plugins.k8s.kubeconfig or the environment variable KUBECONFIG",
        )
    return _from_service_account(config, clock, service_account)


def _kubeconfig_paths(config: K8sConfig) -> str | None:
    """Paths as KUBECONFIG has them, at least one of which exists; None: use the service account."""
    named = {
        "plugins.k8s.kubeconfig": config.kubeconfig,
        "KUBECONFIG": os.environ.get("KUBECONFIG"),
    }
    for source, paths in named.items():
        if paths:
            expanded = [str(Path(p).expanduser()) for p in paths.split(os.pathsep) if p]
            if not any(Path(p).is_file() for p in expanded):
                raise ConfigError(
                    f"{source} is {paths!r}, which does not exist", hint="correct it, or unset it"
                )
            return os.pathsep.join(expanded)
    default = DEFAULT_KUBECONFIG.expanduser()
    return str(default) if default.is_file() else None


async def _from_kubeconfig(config: K8sConfig, clock: Clock, paths: str) -> Access:
    source = _Kubeconfig(paths, config.context)
    loaded = await source.load()
    if loaded.is_exec and not loaded.is_known:
        raise ConfigError(
            f"the credential plugin that kubeconfig {paths} names gave no credentials",
            hint="run 'kubectl get jobs' with it and mend what that says",
        )
    namespace = config.namespace or loaded.namespace or DEFAULT_NAMESPACE
    credentials = Credentials(
        loaded.token,
        clock,
        token_file=loaded.token_file,
        source=source,
        renew_at=loaded.due(clock),
    )
    return Access(loaded.configuration, namespace, credentials)


def _from_service_account(config: K8sConfig, clock: Clock, folder: Path) -> Access:
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import ConfigException
    from kubernetes.aio.config.incluster_config import InClusterConfigLoader

    configuration = Configuration()
    token_file = folder / "token"
    loader = InClusterConfigLoader(
        token_filename=str(token_file),
        cert_filename=str(folder / "ca.crt"),
        try_refresh_token=False,
    )
    try:
        loader.load_and_set(configuration)
    except (ConfigException, OSError) as exc:
        raise ConfigError(
            f"the pod's service account cannot be used: {exc}",
            hint="set automountServiceAccountToken: true in this pod, or plugins.k8s.kubeconfig",
        ) from exc
    own = folder / "namespace"
    namespace = config.namespace or (own.read_text().strip() if own.is_file() else "")
    credentials = Credentials(None, clock, token_file=token_file)
    return Access(configuration, namespace or DEFAULT_NAMESPACE, credentials)


@frozen
class _Loaded:
    """What a kubeconfig said."""

    configuration: Configuration
    namespace: str | None
    token: str | None
    token_file: Path | None
    is_exec: bool
    expires_at: float | None

    @property
    def is_known(self) -> bool:
        return self.token is not None or self.configuration.cert_file is not None

    def due(self, clock: Clock) -> float:
        """When to load again, by the monotonic clock."""
        if self.expires_at is None:
            return float("inf")
        left = self.expires_at - clock.now()
        return clock.monotonic() + max(left - EARLY_SECONDS, left / 2, RELOAD_SECONDS)


@frozen
class _Kubeconfig:
    """Reads kubeconfig files, with the client's own loader, as often as asked."""

    paths: str
    context: str | None

    async def load(self) -> _Loaded:
        import yaml
        from kubernetes.aio.config import ConfigException

        try:
            return await self._load()
        except (ConfigException, yaml.YAMLError, OSError) as exc:
            problem = str(exc)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            # The loader trusts the file's form.
            problem = f"it is no kubeconfig ({exc})"
        named = f", context {self.context!r}," if self.context else ""
        raise ConfigError(
            f"kubeconfig {self.paths}{named} cannot be used: {problem}",
            hint="'kubectl config view' and 'kubectl config get-contexts' show what it has",
        )

    async def _load(self) -> _Loaded:
        from kubernetes.aio.client import Configuration
        from kubernetes.aio.config.kube_config import KubeConfigLoader, KubeConfigMerger

        merged = KubeConfigMerger(self.paths).config
        loader = KubeConfigLoader(
            config_dict=merged, config_base_path=None, active_context=self.context
        )
        context = loader.current_context["context"]
        named = merged["users"].get_with_name(context.get("user"), safe=True)
        user = named["user"] if named is not None and named.value.get("user") else None
        configuration = Configuration()
        await loader.load_and_set(configuration)
        token = configuration.api_key.get("BearerToken")
        file = user.value.get("tokenFile") if user is not None else None
        expiry = getattr(loader, "exec_plugin_expiry", None)
        return _Loaded(
            configuration=configuration,
            namespace=context.get("namespace"),
            token=token.strip() if token else None,
            # The path may be relative to the file that names it.
            token_file=Path(user.path).parent / file if user and file else None,
            is_exec=user is not None and "exec" in user,
            expires_at=expiry.timestamp() if expiry is not None else None,
        )


class Credentials:
    """The Authorization header, current at every request.

    A token file is read again when it has changed, the kubeconfig (with its credential plugin) when
    its token is about to end or was refused.
    """

    def __init__(
        self,
        header: str | None,
        clock: Clock,
        *,
        token_file: Path | None = None,
        source: _Kubeconfig | None = None,
        renew_at: float = float("inf"),
    ) -> None:
        self._header = header
        self._clock = clock
        self._token_file = token_file
        self._source = source
        self._renew_at = renew_at
        self._seen: tuple[int, ...] | None = None
        self._loaded_at = float("-inf")
        self._lock = asyncio.Lock()

    async def header(self) -> str | None:
        """The value for the next request; None where there is none."""
        if self._token_file is not None:
            self._read_file(self._token_file)
        elif self._source is not None and self._clock.monotonic() >= self._renew_at:
            await self._reload(self._source, self._header)
        return self._header

    async def renewed(self, refused: str | None) -> bool:
        """Whether there is now another value than the one that was refused."""
        if self._token_file is not None:
            self._seen = None
            self._read_file(self._token_file)
        elif self._source is not None:
            await self._reload(self._source, refused)
        return self._header != refused

    def _read_file(self, path: Path) -> None:
        try:
            found = path.stat()
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen == self._seen:
                return
            token = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as exc:
            log.warning("a token file cannot be read", extra={"path": path, "problem": str(exc)})
            return
        if token:  # an empty file is one that is being written
            self._seen, self._header = seen, f"Bearer {token}"

    async def _reload(self, source: _Kubeconfig, old: str | None) -> None:
        async with self._lock:
            now = self._clock.monotonic()
            if self._header != old or now - self._loaded_at < RELOAD_SECONDS:
                return  # another request has just done it
            self._loaded_at = now
            try:
                loaded = await source.load()
            except ConfigError as exc:
                log.warning("credentials could not be renewed", extra={"problem": exc.message})
                return
            if loaded.token is not None:
                self._header = loaded.token
                self._renew_at = loaded.due(self._clock)


def is_loopback(url: str) -> bool:
    """Whether a URL leads to this machine, where no proxy leads."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
