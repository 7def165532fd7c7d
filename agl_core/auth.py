"""Who sends a request: role keys, and tokens signed for one rollout.

A token is ``agl1.<key id>.<base64url rollout id>.<expiry>.<base64url HMAC-SHA256 of all before>``.
It is checked without the store; a rollout's state revokes it, which whoever admits a request reads
anyway. The expiry bounds what a leaked token is good for.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import math
import secrets
from collections.abc import Iterable, Sequence
from typing import Literal

from attrs import frozen

from agl_core.clock import Clock
from agl_core.errors import BadToken, Forbidden
from agl_core.settings import AuthSettings

Role = Literal["agent", "controller", "algorithm", "viewer"]

TOKEN_PREFIX = b"agl1."
MAX_TOKEN_BYTES = 2048
LEEWAY_SECONDS = 60.0
"""Replicas of the service need not agree on the second."""

_LOCAL_NAMES = frozenset({b"localhost", b"127.0.0.1", b"[::1]"})


@frozen
class Identity:
    """A role, and for an agent the one rollout that its token is good for."""

    role: Role
    rollout_id: str | None = None


def make_token_key() -> bytes:
    """A key for signing tokens, as text that fits into a file."""
    return secrets.token_urlsafe(32).encode()


class Authority:
    """Knows the keys: says who sends a request, and mints tokens.

    Args:
        settings: Role keys, and the keys that sign tokens.
        clock: Decides whether a token has expired.
        is_open: Without role keys, everybody counts as ``algorithm``, not only who is on loopback.
        token_keys: Used where the settings have none; the first signs, all verify. None: one is
            made, and tokens end with this process.
    """

    def __init__(
        self,
        settings: AuthSettings,
        clock: Clock,
        *,
        is_open: bool = False,
        token_keys: Sequence[bytes] | None = None,
    ) -> None:
        self._settings = settings
        self._is_open = is_open
        self._clock = clock
        keys = [key.reveal().encode() for key in settings.token_keys]
        keys = keys or list(token_keys or ()) or [make_token_key()]
        self._token_keys = {_key_id(key): key for key in keys}
        self._signing_id = _key_id(keys[0])
        roles: list[tuple[Role, bytes]] = []
        for role, secret in (
            ("algorithm", settings.algorithm_key),
            ("controller", settings.controller_key),
            ("viewer", settings.viewer_key),
        ):
            if secret is not None:
                roles.append((role, secret.reveal().encode()))  # type: ignore[arg-type]
        self._role_keys = tuple(roles)

    @property
    def has_role_keys(self) -> bool:
        """Whether any role has a key, so that being on loopback counts for nothing."""
        return bool(self._role_keys)

    def identify(
        self, headers: Iterable[tuple[bytes, bytes]], client: tuple[str, int] | None
    ) -> Identity:
        """Say who sends a request.

        A valid token makes an agent, whatever else is sent with it. Without role keys, what comes
        from this machine counts as ``algorithm``.

        Args:
            headers: Names in lower case, as ASGI has them.
            client: The peer's address; None for a Unix socket.

        Raises:
            BadToken: No key or token, or one that is forged, expired or unknown.
        """
        shown: list[bytes] = []
        host = origin = b""
        for name, value in headers:
            if name == b"authorization":
                scheme, _, credential = value.partition(b" ")
                if scheme.lower() == b"bearer":
                    shown.append(credential.strip())
            elif name in (b"x-api-key", b"api-key"):
                shown.append(value.strip())
            elif name == b"host":
                host = value
            elif name == b"origin":
                origin = value
        tokens = [credential for credential in shown if credential.startswith(TOKEN_PREFIX)]
        if tokens:
            return Identity("agent", self._verify_any(tokens))
        for credential in shown:
            role = self._role_of(credential)
            if role is not None:
                return Identity(role)
        if not self._role_keys:
            if self._is_open:
                return Identity("algorithm")
            if _is_local(client):
                if client is not None:
                    _refuse_foreign_pages(host, origin)
                return Identity("algorithm")
        if any(shown):
            raise BadToken("the key is not one of this service's")
        raise BadToken(
            "the request has no key", hint="send 'Authorization: Bearer <key>' or 'x-api-key'"
        )

    def mint(self, rollout_id: str, seconds: float | None = None) -> tuple[str, float]:
        """Make a token for one rollout.

        Args:
            rollout_id: What it is good for.
            seconds: Its life; None: as the settings say.

        Returns:
            The token, and when it expires (seconds since the epoch).
        """
        life = self._settings.token_seconds if seconds is None else seconds
        expires_at = math.ceil(self._clock.now() + life)
        part = base64.urlsafe_b64encode(rollout_id.encode()).rstrip(b"=")
        signed = b"agl1.%s.%s.%d" % (self._signing_id, part, expires_at)
        signature = _sign(self._token_keys[self._signing_id], signed)
        return (signed + b"." + signature).decode(), float(expires_at)

    def _verify_any(self, tokens: Sequence[bytes]) -> str:
        for token in tokens[:-1]:
            try:
                return self._verify(token)
            except BadToken:
                continue  # SDKs may send a stale token in one header and a good one in another
        return self._verify(tokens[-1])

    def _verify(self, token: bytes) -> str:
        """The rollout id that a token is good for.

        The encoded signature is compared: base64 has several spellings of the same bytes.
        """
        signed, _, signature = token.rpartition(b".")
        parts = signed.split(b".")
        if len(token) > MAX_TOKEN_BYTES or len(parts) != 4:
            raise BadToken("the token is malformed")
        key = self._token_keys.get(parts[1])
        if key is None:
            raise BadToken("the token is signed with a key that this service does not have")
        if not hmac.compare_digest(_sign(key, signed), signature):
            raise BadToken("the token's signature is wrong")
        if int(parts[3]) + LEEWAY_SECONDS < self._clock.now():
            raise BadToken("the token has expired", hint="mint another for the rollout")
        try:
            return base64.urlsafe_b64decode(parts[2] + b"=" * (-len(parts[2]) % 4)).decode()
        except (binascii.Error, UnicodeDecodeError) as exc:
            raise BadToken("the token names no rollout") from exc

    def _role_of(self, credential: bytes) -> Role | None:
        found: Role | None = None
        for role, key in self._role_keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(key, credential) and found is None:
                found = role
        return found


def require(identity: Identity, *roles: Role, to: str) -> None:
    """Let ``algorithm`` and the roles named pass.

    Args:
        identity: Who asks.
        *roles: Who else may.
        to: What is asked for, as "post events".

    Raises:
        Forbidden: Everybody else.
    """
    if identity.role != "algorithm" and identity.role not in roles:
        allowed = ", ".join(sorted({"algorithm", *roles}))
        raise Forbidden(f"the role {identity.role!r} may not {to}", hint=f"it takes {allowed}")


def require_own(identity: Identity, rollout_id: str) -> None:
    """Keep an agent to its own rollout.

    Raises:
        Forbidden: The token is good for another one.
    """
    if identity.role == "agent" and identity.rollout_id != rollout_id:
        raise Forbidden(
            f"the token is good for another rollout than {rollout_id!r}",
            hint="use the URL and the token that this attempt was started with",
        )


def _key_id(key: bytes) -> bytes:
    return hashlib.sha256(b"agl token key id:" + key).hexdigest()[:8].encode()


def _sign(key: bytes, signed: bytes) -> bytes:
    return base64.urlsafe_b64encode(hmac.digest(key, signed, "sha256")).rstrip(b"=")


def _is_local(client: tuple[str, int] | None) -> bool:
    if client is None:  # a Unix socket: its file's mode says who may connect
        return True
    host = client[0]
    if host in ("127.0.0.1", "::1"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _refuse_foreign_pages(host: bytes, origin: bytes) -> None:
    """Keep web pages out of a service without keys.

    A browser on this machine reaches loopback for any page it shows: the page's own origin is then
    in ``Origin``, or, where its name was rebound to 127.0.0.1, in ``Host``.
    """
    if not host:
        return
    name = host.rpartition(b":")[0] if not host.endswith(b"]") and b":" in host else host
    if name.lower() not in _LOCAL_NAMES and not name.startswith(b"127."):
        raise BadToken(
            f"without keys the service answers to localhost only, not to {name.decode('latin1')!r}",
            hint="set [auth] keys, or use http://127.0.0.1",
        )
    if origin and origin.partition(b"://")[2] != host:
        raise BadToken(
            "a web page of another origin may not use a service without keys",
            hint="set [auth] keys",
        )
