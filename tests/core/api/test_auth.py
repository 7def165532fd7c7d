from __future__ import annotations

import base64
import hashlib
import hmac

import pytest

from agl_core.auth import Authority, Identity, require, require_own
from agl_core.errors import BadToken, Forbidden
from agl_core.settings import AuthSettings, Secret
from agl_core.testing.clock import FakeClock

LOOPBACK = ("127.0.0.1", 5000)
REMOTE = ("10.1.2.3", 5000)
KEYED = AuthSettings(
    algorithm_key=Secret("algo"),
    controller_key=Secret("ctrl"),
    viewer_key=Secret("view"),
    token_keys=(Secret("first"),),
)


def authority(settings: AuthSettings = KEYED, clock: FakeClock | None = None) -> Authority:
    return Authority(settings, clock or FakeClock())


def bearer(credential: str | bytes) -> list[tuple[bytes, bytes]]:
    value = credential.encode() if isinstance(credential, str) else credential
    return [(b"authorization", b"Bearer " + value)]


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer ctrl")],
        [(b"authorization", b"bearer  ctrl ")],
        [(b"x-api-key", b"ctrl")],
        [(b"api-key", b"ctrl")],
        [(b"x-api-key", b"unknown"), (b"authorization", b"Bearer ctrl")],
    ],
)
def test_role_key_is_found_in_each_header_that_sdks_use(headers: list[tuple[bytes, bytes]]) -> None:
    assert authority().identify(headers, REMOTE) == Identity("controller")


@pytest.mark.parametrize(
    ("key", "role"), [("algo", "algorithm"), ("ctrl", "controller"), ("view", "viewer")]
)
def test_each_role_has_its_key(key: str, role: str) -> None:
    assert authority().identify(bearer(key), REMOTE).role == role


@pytest.mark.parametrize("headers", [[], bearer("nobody"), [(b"authorization", b"Basic YTpi")]])
def test_with_role_keys_loopback_counts_for_nothing(headers: list[tuple[bytes, bytes]]) -> None:
    for client in (LOOPBACK, None, REMOTE):
        with pytest.raises(BadToken):
            authority().identify(headers, client)


@pytest.mark.parametrize(
    "client", [LOOPBACK, ("127.8.9.1", 1), ("::1", 1), ("::ffff:127.0.0.1", 1), None]
)
def test_without_role_keys_this_machine_is_the_algorithm(client: tuple[str, int] | None) -> None:
    lone = authority(AuthSettings())
    assert lone.identify([], client) == Identity("algorithm")
    assert lone.identify(bearer("sk-anything"), client) == Identity("algorithm")


@pytest.mark.parametrize("host", ["10.1.2.3", "::ffff:10.1.2.3", "2001:db8::1", "unknown"])
def test_without_role_keys_another_machine_is_nobody(host: str) -> None:
    with pytest.raises(BadToken):
        authority(AuthSettings()).identify([], (host, 1))


@pytest.mark.parametrize(
    "headers",
    [
        [(b"host", b"evil.example:8080")],
        [(b"host", b"127.0.0.1:8080"), (b"origin", b"https://evil.example")],
        [(b"host", b"localhost:8080"), (b"origin", b"http://localhost:3000")],
        [(b"host", b"localhost:8080"), (b"origin", b"null")],
    ],
)
def test_a_web_page_cannot_use_a_service_without_keys(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(BadToken):
        authority(AuthSettings()).identify(headers, LOOPBACK)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"host", b"localhost:8080"), (b"origin", b"http://localhost:8080")],
        [(b"host", b"127.0.0.1")],
        [(b"host", b"[::1]:8080")],
    ],
)
def test_the_services_own_pages_may_use_it(headers: list[tuple[bytes, bytes]]) -> None:
    assert authority(AuthSettings()).identify(headers, LOOPBACK).role == "algorithm"


@pytest.mark.parametrize("rollout_id", ["r-1", "a/b", "日本.😀", "x" * 256])
def test_minted_token_names_its_rollout(rollout_id: str) -> None:
    token, _ = authority().mint(rollout_id)
    assert token.startswith("agl1.")
    assert authority().identify(bearer(token), REMOTE) == Identity("agent", rollout_id)


def test_token_has_the_documented_form() -> None:
    clock = FakeClock(start=1000.0)
    token, expires_at = authority(clock=clock).mint("r-1", seconds=60)
    name, _key_id, rollout, expiry, signature = token.split(".")
    assert (name, expiry, expires_at) == ("agl1", "1060", 1060.0)
    assert base64.urlsafe_b64decode(rollout + "==") == b"r-1"
    signed = token.rpartition(".")[0].encode()
    wanted = base64.urlsafe_b64encode(hmac.digest(b"first", signed, "sha256")).rstrip(b"=")
    assert signature == wanted.decode()


def test_valid_token_is_an_agent_even_on_loopback_and_beside_a_role_key() -> None:
    lone = authority(AuthSettings())
    token, _ = lone.mint("r-1")
    assert lone.identify(bearer(token), LOOPBACK) == Identity("agent", "r-1")
    keyed = authority()
    token, _ = keyed.mint("r-1")
    headers = [(b"x-api-key", b"algo"), *bearer(token)]
    assert keyed.identify(headers, LOOPBACK) == Identity("agent", "r-1")


def test_token_expires_after_its_leeway() -> None:
    clock = FakeClock()
    keyed = authority(clock=clock)
    token, _ = keyed.mint("r-1", seconds=100)
    clock.advance(159)
    assert keyed.identify(bearer(token), REMOTE).role == "agent"
    clock.advance(3)
    with pytest.raises(BadToken, match="expired"):
        keyed.identify(bearer(token), REMOTE)


def forgeries() -> list[bytes]:
    token = authority().mint("r-1")[0].encode()
    name, key_id, rollout, expiry, signature = token.split(b".")
    other = base64.urlsafe_b64encode(b"r-2").rstrip(b"=")
    last = signature[-1:]
    alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    # 43 characters hold 258 bits: the last one has two that decoding ignores.
    twin = alphabet[alphabet.index(last) ^ 1 : (alphabet.index(last) ^ 1) + 1]
    by_other_key = Authority(AuthSettings(token_keys=(Secret("else"),)), FakeClock()).mint("r-1")
    return [
        b".".join([name, key_id, other, expiry, signature]),
        b".".join([name, key_id, rollout, b"9999999999", signature]),
        b".".join([name, key_id, rollout, expiry, signature[:-1] + twin]),
        token + b"=",
        token + b".",
        token + b"\xff",
        token[:-1],
        b".".join([name, key_id, rollout, expiry, b""]),
        b".".join([name, b"00000000", rollout, expiry, signature]),
        by_other_key[0].encode(),
        b"agl1.",
        b"agl1....",
        b"agl1." + b"a" * 10_000,
        "agl1.ä.ö.ü.ß".encode(),
    ]


@pytest.mark.parametrize("forged", forgeries())
def test_forged_token_is_refused_also_on_loopback(forged: bytes) -> None:
    for settings in (KEYED, AuthSettings(token_keys=KEYED.token_keys)):
        with pytest.raises(BadToken):
            authority(settings).identify(bearer(forged), LOOPBACK)


def test_non_ascii_key_is_refused_without_an_exception_of_another_kind() -> None:
    with pytest.raises(BadToken):
        authority().identify(bearer("schlüssel"), REMOTE)


def test_second_token_key_still_verifies_after_a_rotation() -> None:
    token, _ = authority().mint("r-1")
    rotated = AuthSettings(token_keys=(Secret("second"), Secret("first")))
    assert authority(rotated).identify(bearer(token), REMOTE).rollout_id == "r-1"
    fresh, _ = authority(rotated).mint("r-1")
    with pytest.raises(BadToken):
        authority().identify(bearer(fresh), REMOTE)


def test_made_key_ends_with_the_authority_unless_the_caller_keeps_one() -> None:
    token, _ = authority(AuthSettings()).mint("r-1")
    with pytest.raises(BadToken):
        authority(AuthSettings()).identify(bearer(token), LOOPBACK)
    kept = [b"kept beside the store"]
    token, _ = Authority(AuthSettings(), FakeClock(), token_keys=kept).mint("r-1")
    again = Authority(AuthSettings(), FakeClock(), token_keys=kept)
    assert again.identify(bearer(token), REMOTE).rollout_id == "r-1"


def test_key_id_tells_nothing_of_the_key() -> None:
    key_id = authority().mint("r-1")[0].split(".")[1]
    assert key_id != hashlib.sha256(b"first").hexdigest()[:8]
    assert "first" not in key_id


def test_require_lets_the_algorithm_and_the_named_pass() -> None:
    for role in ("algorithm", "controller"):
        require(Identity(role), "controller", to="do it")
    with pytest.raises(Forbidden, match="may not do it"):
        require(Identity("viewer"), "controller", to="do it")


def test_require_own_keeps_an_agent_to_its_rollout() -> None:
    require_own(Identity("agent", "a"), "a")
    require_own(Identity("controller"), "a")
    with pytest.raises(Forbidden):
        require_own(Identity("agent", "a"), "b")


def test_an_open_service_lets_everybody_in_until_a_key_is_set() -> None:
    without_keys = Authority(AuthSettings(), FakeClock(), is_open=True)
    assert without_keys.identify([], REMOTE) == Identity("algorithm")

    with pytest.raises(BadToken):
        Authority(KEYED, FakeClock(), is_open=True).identify([], REMOTE)
