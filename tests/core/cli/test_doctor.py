"""``agl doctor`` on one machine, against a real service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agl_core.client import AglLiteClient


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL__PLUGINS__LOCAL__STATE_DIR", str(tmp_path / "state"))


def findings(agl: Any, *arguments: str) -> dict[str, dict[str, Any]]:
    """By subject; of several of one subject the last."""
    ran = agl("doctor", "--json", *arguments)
    found = {told["subject"]: told for told in map(json.loads, ran.out.splitlines())}
    assert (ran.status == 1) == ("failed" in {told["status"] for told in found.values()})
    return found


def test_lines_say_what_was_looked_at_and_what_to_do(agl: Any, service: AglLiteClient) -> None:
    ran = agl("doctor")
    assert ran.status == 0, ran.out
    lines = ran.out.splitlines()
    assert lines[0].startswith("ok       configuration: plugins memory, vllm, local")
    assert any(line.startswith("ok       service: http://127.0.0.1:") for line in lines)
    at = lines.index("warning  model servers: none is registered: agents' calls would wait")
    assert lines[at + 1] == "         -> agl models add MODEL http://HOST:PORT/v1"
    assert any("state directory" in line and "no controller works" in line for line in lines)
    assert lines[-1] == "5 checks: 4 ok, 1 warning"


def test_service_that_is_away_fails_and_what_needs_it_is_skipped(agl: Any) -> None:
    found = findings(agl, "--url", "http://127.0.0.1:9")
    assert found["service"]["status"] == "failed"
    assert "agl serve" in found["service"]["hint"]
    assert found["key"]["status"] == found["model servers"]["status"] == "skipped"
    assert found["state directory"]["status"] == "ok"


def test_wrong_key_is_told_from_a_service_that_is_away(agl: Any, serve: Any) -> None:
    started = serve(environ={"AGL__AUTH__ALGORITHM_KEY": "right"})
    found = findings(agl, "--url", started.url, "--key", "wrong")
    assert found["service"]["status"] == "ok"
    assert found["key"]["status"] == "failed"
    assert "wrong" not in found["key"]["message"]
    assert findings(agl, "--url", started.url, "--key", "right")["key"]["status"] == "ok"


def test_viewers_key_is_not_enough(agl: Any, serve: Any) -> None:
    started = serve(
        environ={"AGL__AUTH__ALGORITHM_KEY": "right", "AGL__AUTH__VIEWER_KEY": "only-looks"}
    )
    found = findings(agl, "--url", started.url, "--key", "only-looks")
    assert found["key"]["status"] == "failed"
    assert found["model servers"]["status"] == "skipped"


def test_model_server_that_would_train_nobody_is_named(agl: Any, serve: Any) -> None:
    started = serve()
    with AglLiteClient(started.url) as client:
        client.register_model(model="m", endpoint="http://127.0.0.1:9/v1")
    found = findings(agl, "--url", started.url)
    assert found["model server"]["status"] == "failed"
    assert "m at http://127.0.0.1:9/v1 is not fit for training" in found["model server"]["message"]


def test_state_directory_that_cannot_be_made_fails(
    agl: Any, service: AglLiteClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AGL__PLUGINS__LOCAL__STATE_DIR", str(tmp_path / "file" / "state"))
    monkeypatch.setenv("AGL__PLUGINS__LOCAL__COMMAND", '["no-such-program"]')
    found = findings(agl)
    assert found["state directory"]["status"] == "failed"
    assert "plugins.local.state_dir" in found["state directory"]["hint"]
    assert found["command"]["status"] == "failed"


def test_working_controller_is_seen_and_not_disturbed(agl: Any, serve: Any) -> None:
    started = serve("--with-runner")
    with AglLiteClient(started.url) as client:
        config = {"command": ["sh", "-c", "exit 0"]}
        [made] = client.enqueue({"config": config})
        client.wait([made.rollout_id], timeout=40)
        found = findings(agl, "--url", started.url)
        assert "a controller works on it" in found["state directory"]["message"]
        [made] = client.enqueue({"config": config})
        [ended] = client.wait([made.rollout_id], timeout=40)
    assert ended.status == "succeeded"


def test_without_a_runner_the_rest_is_looked_at(
    agl: Any, service: AglLiteClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL__PLUGINS__ENABLED", '["memory", "vllm"]')
    found = findings(agl)
    assert found["service"]["status"] == "ok"
    assert found["runner"]["status"] == "failed"


def test_unknown_resources_are_told(agl: Any, service: AglLiteClient) -> None:
    assert findings(agl, "--resources", "nobody")["resources"]["status"] == "failed"
