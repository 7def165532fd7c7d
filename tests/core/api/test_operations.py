from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from quart import Blueprint, Quart

from agl_core import errors


async def test_health_names_version_and_plugins(keyed: Any) -> None:
    answer = await keyed.ask("GET", "/healthz")
    assert answer.json()["status"] == "ok"
    assert answer.json()["plugins"] == [{"name": "memory"}]


async def test_ready_says_why_not(keyed: Any) -> None:
    assert (await keyed.ask("GET", "/readyz")).json() == {"ready": True}
    keyed.gateway.reasons = [{"server": "s", "message": "no ids"}]
    answer = await keyed.ask("GET", "/readyz")
    assert (answer.status_code, answer.json()["ready"]) == (503, False)
    assert answer.json()["reasons"] == keyed.gateway.reasons
    assert "Retry-After" in answer.headers


async def test_metrics_need_a_reader_where_keys_are_set(keyed: Any, service: Any) -> None:
    assert (await keyed.ask("GET", "/metrics")).status_code == 401
    answer = await keyed.ask("GET", "/metrics", key="viewer-key")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert (await service.ask("GET", "/metrics")).status_code == 200


async def test_c89_metrics_have_the_same_series_after_many_ids(service: Any) -> None:
    async def series() -> set[str]:
        text = (await service.ask("GET", "/metrics")).text
        return {re.sub(r" \S+$", "", line) for line in text.splitlines() if line[0] != "#"}

    async def touch(name: str) -> None:
        await service.ask("GET", f"/api/rollouts/{name}")
        await service.ask("GET", f"/{name}")
        await service.ask("POST", f"/rollout/{name}/attempt/{name}/events", json={})

    await touch("first")
    await series()
    before = await series()
    for number in range(20):
        await touch(f"id-{number}")
    assert await series() == before
    text = (await service.ask("GET", "/metrics")).text
    wanted = 'method="GET",route="/api/rollouts/{rollout_id}",status="404"'
    assert f"agl_api_requests_total{{{wanted}}} 21" in text
    assert "# TYPE agl_api_requests_total counter" in text
    assert text.count("# TYPE agl_api_requests_total") == 1
    assert r'agl_calls_total{policy="a\"b",status="ok"} 3' in text
    assert "agl_api_waiters 0" in text


async def document(service: Any) -> dict[str, Any]:
    answer = await service.ask("GET", "/openapi.json")
    assert answer.status_code == 200
    described: dict[str, Any] = answer.json()
    return described


async def test_openapi_describes_every_route_and_no_other(keyed: Any) -> None:
    described = {
        (method.upper(), path)
        for path, item in (await document(keyed))["paths"].items()
        for method in item
        if "/v1/" not in path
    }
    served = {
        (method, re.sub(r"<(?:id:)?(\w+)>", r"{\1}", rule.rule))
        for rule in keyed.app.url_map.iter_rules()
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    assert described == served


def schemas_of(node: Any) -> list[Any]:
    """Every schema that stands outside the components."""
    if isinstance(node, list):
        return [schema for item in node for schema in schemas_of(item)]
    if not isinstance(node, dict):
        return []
    found = [node["schema"]] if "schema" in node else []
    return found + [schema for value in node.values() for schema in schemas_of(value)]


async def test_openapi_has_valid_schemas_and_no_dangling_reference(service: Any) -> None:
    described = await document(service)
    assert described["openapi"] == "3.1.0"
    components = described["components"]["schemas"]
    for schema in [*components.values(), *schemas_of(described["paths"])]:
        jsonschema.Draft202012Validator.check_schema(schema)
    references = set(
        re.findall(
            r'"\$ref":"#/components/(\w+)/(\w+)"', json.dumps(described, separators=(",", ":"))
        )
    )
    assert references
    for kind, name in references:
        assert name in described["components"][kind], name
    ids = [one["operationId"] for item in described["paths"].values() for one in item.values()]
    assert len(ids) == len(set(ids))
    for path, item in described["paths"].items():
        for operation in item.values():
            named = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))


def validator(described: dict[str, Any], name: str) -> jsonschema.Draft202012Validator:
    root = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
    return jsonschema.Draft202012Validator(root)


async def test_openapi_fits_what_is_taken_and_given(service: Any) -> None:
    described = await document(service)
    item = validator(described, "EnqueueItemRequest")
    for good in ({}, {"n": 3.0, "input": None}, {"config": {"limits": {"calls": 1}}}):
        assert item.is_valid(good)
        assert (await service.ask("POST", "/api/rollouts", json=good)).status_code == 201
    for bad in ({"n": 0}, {"inptu": 1}, {"mode": "test"}, {"config": {"max_retries": -1}}):
        assert not item.is_valid(bad)
        assert (await service.ask("POST", "/api/rollouts", json=bad)).status_code == 422
    listed = (await service.ask("GET", "/api/rollouts")).json()
    validator(described, "RolloutList").validate(listed)
    problem = (await service.ask("GET", "/api/rollouts/none")).json()
    validator(described, "ProblemDocument").validate(problem)
    model = await service.ask("POST", "/api/models", json={"model": "m", "endpoint": "http://x/v1"})
    validator(described, "ModelServerView").validate(model.json())
    (limit,) = [
        one
        for one in described["paths"]["/api/rollouts"]["get"]["parameters"]
        if one["name"] == "limit"
    ]
    assert limit["schema"] == {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}


# --- roles ---------------------------------------------------------------------------------------

KEYS = ("viewer-key", "controller-key", "algorithm-key")
READ = (True, True, True)
CONTROL = (False, True, True)
ALL = (False, False, True)
MATRIX = [
    ("GET", "/api/rollouts", READ),
    ("GET", "/api/rollouts/a", READ),
    ("GET", "/api/events?rollout_id=a", READ),
    ("GET", "/api/models", READ),
    ("GET", "/api/gateway/state", READ),
    ("GET", "/api/resources/latest", READ),
    ("GET", "/api/resources/x", READ),
    ("GET", "/api/export/lines", READ),
    ("GET", "/metrics", READ),
    ("PATCH", "/api/rollouts/a", CONTROL),
    ("POST", "/api/rollouts/a/cancel", CONTROL),
    ("POST", "/api/rollouts/cancel", CONTROL),
    ("POST", "/api/rollouts/a/token", CONTROL),
    ("POST", "/rollout/a/attempt/1/events", CONTROL),
    ("GET", "/rollout/a/attempt/1/input", CONTROL),
    ("POST", "/api/rollouts", ALL),
    ("DELETE", "/api/rollouts/a", ALL),
    ("POST", "/api/models", ALL),
    ("PUT", "/api/models", ALL),
    ("DELETE", "/api/models?model=m", ALL),
    ("POST", "/api/gateway/pause", ALL),
    ("POST", "/api/gateway/resume", ALL),
    ("POST", "/api/resources", ALL),
    ("POST", "/api/export/lines", ALL),
]
OPEN = ["/healthz", "/readyz", "/openapi.json"]


async def test_roles_matrix(keyed: Any) -> None:
    await keyed.enqueue(rollout_id="a")
    for method, path, allowed in MATRIX:
        for key, is_allowed in zip(KEYS, allowed, strict=True):
            answer = await keyed.ask(method, path, key=key)
            assert (answer.status_code != 403) is is_allowed, (method, path, key)
            assert answer.status_code not in (401, 405, 500), (method, path, key)
            if method == "DELETE" and path.endswith("/a"):
                await keyed.ask(
                    "POST", "/api/rollouts", json={"rollout_id": "a"}, key="algorithm-key"
                )
        assert (await keyed.ask(method, path)).status_code == 401, path
        agent = await keyed.ask(method, path, key=keyed.token("a"))
        is_own = path.startswith("/rollout/a/")
        assert (agent.status_code == 403) is not is_own, path
        other = await keyed.ask(method, path, key=keyed.token("b"))
        assert (other.status_code, other.json()["code"]) == (403, "forbidden"), path


async def test_matrix_has_every_route(keyed: Any) -> None:
    described = {
        (method.upper(), path)
        for path, item in (await document(keyed))["paths"].items()
        for method in item
        if "/v1/" not in path
    }
    named = {"/a": "/{rollout_id}", "/x": "/{resources_id}", "/lines": "/{format}"}
    covered = {("GET", path) for path in OPEN}
    for method, path, _ in MATRIX:
        bare = path.partition("?")[0].replace("/attempt/1", "/attempt/{attempt_id}")
        for value, name in named.items():
            bare = re.sub(rf"{value}(?=/|$)", name, bare)
        covered.add((method, bare))
    assert covered == described


async def test_routes_that_plugins_add_below_api_need_a_key(start: Any, keys: Any) -> None:
    def add(app: Quart) -> None:
        blueprint = Blueprint("added", __name__)

        @blueprint.route("/api/added", methods=["GET", "POST"])
        async def added() -> str:
            return "added"

        @blueprint.get("/page")
        async def page() -> str:
            return "page"

        app.register_blueprint(blueprint)

    service = await start(auth=keys, change_app=add)
    for method, key, status in (
        ("GET", None, 401),
        ("GET", "viewer-key", 200),
        ("POST", "viewer-key", 403),
        ("POST", "algorithm-key", 200),
        ("GET", service.token("a"), 403),
    ):
        answer = await service.ask(method, "/api/added", key=key)
        assert answer.status_code == status
    assert (await service.ask("GET", "/page")).text == "page"


@pytest.mark.parametrize(
    "code",
    [
        "bad_json",
        "invalid",
        "not_found",
        "illegal_transition",
        "version_conflict",
        "stale_attempt",
        "rollout_ended",
        "rollout_exists",
        "bad_token",
        "forbidden",
        "cursor_expired",
    ],
)
def test_codes_of_the_contract_are_codes_of_errors(code: str) -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert code in {getattr(kind, "default_code", None) for kind in kinds}
