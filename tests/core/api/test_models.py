from __future__ import annotations

from typing import Any

import pytest

from agl_core.settings import GatewaySettings, Secret

PATH = "/api/models"
ENDPOINT = "http://10.0.0.7:8000/v1"


def server(model: str = "m", endpoint: str = ENDPOINT, **more: Any) -> dict[str, Any]:
    return {"model": model, "endpoint": endpoint, **more}


async def registry(service: Any) -> list[tuple[str, str, int]]:
    answer = await service.ask("GET", PATH)
    return [(one["model"], one["endpoint"], one["version"]) for one in answer.json()["items"]]


async def test_registering_is_201_and_again_200(service: Any) -> None:
    answer = await service.ask("POST", PATH, json=server(endpoint=ENDPOINT + "/"))
    assert answer.status_code == 201
    assert answer.json() == {
        "model": "m",
        "endpoint": ENDPOINT,
        "version": 0,
        "policy": "m",
        "trained": True,
        "served_model": None,
        "aliases": [],
        "logprobs_mode": "unknown",
        "credential": None,
        "salt": False,
        "native": [],
        "healthy": True,
        "inflight": 0,
    }
    again = await service.ask("POST", PATH, json=server(version=8))
    assert (again.status_code, again.json()["version"]) == (200, 8)
    assert await registry(service) == [("m", ENDPOINT, 8)]
    assert service.gateway.registry_reads == 2


async def test_list_of_servers_is_registered_as_a_whole(service: Any) -> None:
    other = "http://10.0.0.8:8000/v1"
    answer = await service.ask("POST", PATH, json=[server(), server(endpoint=other)])
    assert [one["endpoint"] for one in answer.json()["items"]] == [ENDPOINT, other]
    bad = [server(version=3), server("n", "ftp://x/v1")]
    assert (await service.ask("POST", PATH, json=bad)).status_code == 422
    assert await registry(service) == [("m", ENDPOINT, 0), ("m", other, 0)]


async def test_lower_version_than_registered_is_409(service: Any) -> None:
    await service.ask("POST", PATH, json=server(version=5))
    for method, body in (("POST", server(version=4)), ("PUT", {"items": [server(version=4)]})):
        answer = await service.ask(method, PATH, json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, "version_conflict")
        assert answer.json()["details"]["version"] == 5
    assert await registry(service) == [("m", ENDPOINT, 5)]
    assert service.gateway.registry_reads == 1


async def test_put_replaces_the_set_at_once(service: Any) -> None:
    await service.ask("POST", PATH, json=server())
    answer = await service.ask("PUT", PATH, json={"items": [server("n", version=2)]})
    assert answer.status_code == 200
    assert await registry(service) == [("n", ENDPOINT, 2)]
    twice = {"items": [server(), server(endpoint=ENDPOINT + "/")]}
    assert (await service.ask("PUT", PATH, json=twice)).status_code == 422
    await service.ask("PUT", PATH, json={"items": []})
    assert await registry(service) == []


async def test_put_may_resume_or_pause_in_the_same_step(service: Any) -> None:
    await service.ask("POST", "/api/gateway/pause", json={})
    body = {"items": [server(version=2)], "resume": True}
    assert (await service.ask("PUT", PATH, json=body)).json()["items"][0]["version"] == 2
    assert await registry(service) == [("m", ENDPOINT, 2)]
    assert service.gateway.paused == {}
    pause = {"policy": "m", "mode": "keep", "reason": "weights", "drain_seconds": 3}
    await service.ask("PUT", PATH, json={"items": [server(version=3)], "pause": pause})
    assert await registry(service) == [("m", ENDPOINT, 3)]
    assert service.gateway.pause_calls[1:] == [("m", "keep", "weights", 3.0)]
    both = {"items": [], "resume": True, "pause": pause}
    refused = await service.ask("PUT", PATH, json=both)
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid")
    assert await registry(service) == [("m", ENDPOINT, 3)]


async def test_delete_removes_a_models_servers_or_one_of_them(service: Any) -> None:
    others = [f"http://10.0.0.{n}/v1" for n in (1, 2, 3)]
    await service.ask("POST", PATH, json=[server(endpoint=endpoint) for endpoint in others])
    params = {"model": "m", "endpoint": others[0] + "/"}
    answer = await service.ask("DELETE", PATH, params=params)
    assert [one["endpoint"] for one in answer.json()["items"]] == [others[0]]
    answer = await service.ask("DELETE", PATH, params={"model": "m"})
    assert [one["endpoint"] for one in answer.json()["items"]] == others[1:]
    assert (await service.ask("DELETE", PATH, params={"model": "m"})).status_code == 404
    assert (await service.ask("DELETE", PATH)).status_code == 422


@pytest.mark.parametrize(
    "others",
    [
        [server("n", aliases=["claude-*"], policy="p"), server("o", aliases=["claude-*"])],
        [server("n", policy="m")],
        [server("n", aliases=["m"], policy="p")],
        [server("m", "http://other/v1", policy="p")],
    ],
)
async def test_name_of_two_policies_is_409(service: Any, others: list[Any]) -> None:
    mine = server("m", policy="mine")
    answer = await service.ask("POST", PATH, json=[mine, *others])
    assert (answer.status_code, answer.json()["code"]) == (409, "alias_conflict")
    assert await registry(service) == []


async def test_one_policy_may_have_many_names_and_servers(service: Any) -> None:
    servers = [
        server("base", policy="p", aliases=["claude-*"]),
        server("base", "http://other/v1", policy="p", aliases=["claude-*"]),
        server("lora", policy="p", served_model="base-lora"),
    ]
    assert (await service.ask("POST", PATH, json=servers)).status_code == 201


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (server(endpoint="http://10.0.0.7:8000"), "/v1?"),
        (server(endpoint="10.0.0.7:8000/v1"), "http or https"),
        (server(endpoint="ftp://x/v1"), "http or https"),
        (server(endpoint="http:///v1"), "http or https"),
        (server(endpoint="http://x:99999/v1"), "http or https"),
        (server(endpoint="http://x/v1?a=b"), "http or https"),
        (server(endpoint="http://u:p@x/v1"), "credential"),
        (server(version=-1), "version"),
        (server(version="3"), "whole number"),
        (server(credential="unknown"), "openai"),
        (server(verison=3), "did you mean 'version'?"),
        ({"model": "m"}, "'endpoint' is missing"),
    ],
)
async def test_entry_that_cannot_serve_is_422(start: Any, entry: Any, says: str) -> None:
    service = await start(gateway_settings=GatewaySettings(credentials={"openai": Secret("sk")}))
    answer = await service.ask("POST", PATH, json=entry)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert says in answer.json()["detail"] + str(answer.json().get("hint"))


async def test_credential_is_shown_by_name_only(start: Any) -> None:
    service = await start(gateway_settings=GatewaySettings(credentials={"openai": Secret("sk-1")}))
    await service.ask("POST", PATH, json=server(credential="openai", trained=False, version=3.0))
    shown = (await service.ask("GET", PATH)).text
    assert '"openai"' in shown
    assert "sk-1" not in shown


# --- pause and resources -------------------------------------------------------------------------


async def test_pause_and_resume_answer_with_the_state(service: Any) -> None:
    body = {"policy": "p", "mode": "keep", "reason": "weights", "drain_seconds": 3}
    answer = await service.ask("POST", "/api/gateway/pause", json=body)
    assert answer.json()["policies"]["p"]["mode"] == "keep"
    await service.ask("POST", "/api/gateway/pause", json={})
    await service.ask("POST", "/api/gateway/pause")
    assert service.gateway.pause_calls == [
        ("p", "keep", "weights", 3.0),
        (None, "drain", None, None),
        (None, "drain", None, None),
    ]
    assert set((await service.ask("GET", "/api/gateway/state")).json()["policies"]) == {"p", "all"}
    answer = await service.ask("POST", "/api/gateway/resume", json={"policy": "p"})
    assert set(answer.json()["policies"]) == {"all"}
    assert (await service.ask("POST", "/api/gateway/resume")).json() == {"policies": {}}


async def test_bad_pause_is_refused(service: Any) -> None:
    for body, status in (
        ({"mode": "stop"}, 422),
        ({"drain_seconds": -1}, 422),
        ({"polcy": "p"}, 422),
        ({"policy": "nobody"}, 404),
    ):
        answer = await service.ask("POST", "/api/gateway/pause", json=body)
        assert answer.status_code == status
    assert service.gateway.pause_calls == []


async def test_resources_are_numbered_and_never_change(service: Any) -> None:
    path = "/api/resources"
    assert (await service.ask("GET", f"{path}/latest")).status_code == 404
    first = await service.ask("POST", path, json={"data": {"prompt": "a"}})
    second = await service.ask("POST", path, json={"data": {"prompt": "b"}})
    assert (first.status_code, first.json()["version"], second.json()["version"]) == (201, 1, 2)
    assert (await service.ask("GET", f"{path}/latest")).json() == second.json()
    read = await service.ask("GET", f"{path}/{first.json()['resources_id']}")
    assert read.json() == first.json()
    assert (await service.ask("GET", f"{path}/none")).status_code == 404
    for body in ({}, {"data": 3}, {"data": {}, "more": 1}):
        assert (await service.ask("POST", path, json=body)).status_code == 422
