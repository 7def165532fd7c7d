from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest

from agl_core.errors import Invalid
from agl_core.interfaces import RolloutQuery
from agl_core.records import RolloutConfig, RolloutSpec


async def post(service: Any, body: Any) -> Any:
    return await service.ask("POST", "/api/rollouts", json=body)


async def stored(service: Any) -> int:
    page = await service.store.list_rollouts(RolloutQuery())
    return len(page.items)


async def test_one_item_answers_with_the_rollout(service: Any) -> None:
    answer = await post(service, {"input": {"q": 1}, "metadata": {"a": 2}})
    rollout = answer.json()
    assert answer.status_code == 201
    assert rollout["rollout_id"].startswith("r-")
    assert len(rollout["rollout_id"]) == 18
    assert (rollout["status"], rollout["version"]) == ("queuing", 1)
    assert rollout["input"] == {"q": 1}
    assert rollout["attempts"] == []
    assert rollout["config"]["input_delivery"] == "env"


async def test_list_and_batch_answer_with_items_in_order(service: Any) -> None:
    items = [{"input": 0, "rollout_id": "a"}, {"input": 1, "rollout_id": "b"}]
    for body in (items, {"rollouts": items}):
        answer = await post(service, body)
        assert [item["rollout_id"] for item in answer.json()["items"]] == ["a", "b"]
    one = await post(service, {"rollouts": [{"input": 2}]})
    assert len(one.json()["items"]) == 1


async def test_batch_defaults_are_merged_key_by_key_and_the_item_wins(service: Any) -> None:
    bundle = await service.ask("POST", "/api/resources", json={"data": {}})
    resources_id = bundle.json()["resources_id"]
    answer = await post(
        service,
        {
            "config": {"image": "default", "max_retries": 2},
            "metadata": {"run": 7, "kind": "default"},
            "resources_id": resources_id,
            "rollouts": [
                {"config": {"image": "own"}, "metadata": {"kind": "own"}},
                {"resources_id": None},
            ],
        },
    )
    first, second = answer.json()["items"]
    assert (first["config"]["image"], first["config"]["max_retries"]) == ("own", 2)
    assert first["metadata"] == {"run": 7, "kind": "own"}
    assert first["resources_id"] == resources_id
    assert second["config"]["image"] == "default"
    assert second["resources_id"] is None


async def test_n_makes_a_group_of_numbered_siblings(service: Any) -> None:
    answer = await post(service, {"input": 1, "n": 3.0, "group_id": "g/1"})
    items = answer.json()["items"]
    assert [item["rollout_id"] for item in items] == ["g/1-0", "g/1-1", "g/1-2"]
    assert [item["group"] for item in items] == [
        {"id": "g/1", "size": 3, "index": index} for index in range(3)
    ]


async def test_n_without_a_name_and_a_name_without_n(service: Any) -> None:
    unnamed = (await post(service, {"n": 2})).json()["items"]
    group_id = unnamed[0]["group"]["id"]
    assert group_id.startswith("g-")
    assert unnamed[1]["rollout_id"] == f"{group_id}-1"
    (alone,) = (await post(service, {"group_id": "solo"})).json()["items"]
    assert alone["group"] == {"id": "solo", "size": 1, "index": 0}


async def test_same_id_and_spec_again_is_200_with_what_exists(service: Any) -> None:
    body = {"rollout_id": "a", "input": 1}
    assert (await post(service, body)).status_code == 201
    await service.patch("a", status="running")
    again = await post(service, body)
    assert again.status_code == 200
    assert (again.json()["status"], again.json()["version"]) == ("running", 2)
    mixed = await post(service, [body, {"rollout_id": "b"}])
    assert mixed.status_code == 201
    group = {"n": 2, "group_id": "g"}
    assert (await post(service, group)).status_code == 201
    assert (await post(service, group)).status_code == 200


async def test_same_id_with_another_spec_is_409_and_nothing_is_added(service: Any) -> None:
    await post(service, {"rollout_id": "a", "input": 1})
    answer = await post(service, {"rollout_id": "a", "input": 2})
    assert (answer.status_code, answer.json()["code"]) == (409, "rollout_exists")
    assert "index" not in answer.json()["details"]
    # The index is that of the item, not that of the sibling.
    answer = await post(service, [{"n": 5}, {"rollout_id": "b"}, {"rollout_id": "a", "input": 2}])
    assert answer.status_code == 409
    assert answer.json()["details"]["index"] == 2
    assert answer.json()["detail"].startswith("rollouts[2]: ")
    assert await stored(service) == 1


async def test_fault_in_one_item_names_it_and_adds_nothing(service: Any) -> None:
    items: list[Any] = [{"input": index} for index in range(5)]
    items[3] = {"inptu": 1}
    answer = await post(service, items)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, "invalid")
    assert problem["details"]["index"] == 3
    assert problem["detail"].startswith("rollouts[3]")
    assert "did you mean 'input'?" in problem["detail"]
    assert await stored(service) == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([], "empty"),
        ({"rollouts": []}, "empty"),
        ({"rollouts": {}}, "list"),
        (7, "object"),
        ([7], "rollouts[0]"),
        ({"rollouts": [7]}, "rollouts[0]"),
        ({"rollouts": [{}], "metdata": {}}, "did you mean 'metadata'?"),
        ({"rollouts": [{}], "config": {"imag": "x"}}, "config.imag"),
        ({"rollouts": [{}], "metadata": 3}, "metadata"),
        ({"mode": "test"}, "'train', 'val'"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "whole number"),
        ({"n": True}, "whole number"),
        ({"n": 10_001}, "n"),
        ([{"n": 6000}, {"n": 6000}], "10000"),
        ({"n": 2, "rollout_id": "a"}, "exclude each other"),
        ({"group_id": "g", "group": {"id": "g", "size": 1, "index": 0}}, "exclude each other"),
        ({"group_id": "x" * 256}, "shorter"),
        ({"group": {"id": "g", "size": 2, "index": 2}}, "outside"),
        ({"rollout_id": ".."}, "rollout_id"),
        ({"rollout_id": "a\nb"}, "rollout_id"),
        ({"rollout_id": "x" * 257}, "256"),
        ({"input": "x" * 65_535}, "'url' or 'file'"),
        ({"config": {"env": {"A": "x" * 65_537}}}, "65536"),
        ({"config": {"env": {"OPENAI_API_KEY": "x"}}}, "reserved"),
        ({"config": {"env": {"AGL_ANYTHING": "x"}}}, "reserved"),
        ({"config": {"env": {"A=B": "x"}}}, "environment variable"),
        ({"config": {"env": {"A": 1}}}, "string"),
        ({"resources_id": "none-such"}, "none-such"),
        ({"grade": "done"}, "'none', 'pending'"),
    ],
)
async def test_what_cannot_run_is_refused(service: Any, body: Any, says: str) -> None:
    answer = await post(service, body)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, "invalid"), answer.text
    assert says in problem["detail"] + str(problem.get("hint"))
    assert await stored(service) == 0


async def test_large_input_is_accepted_for_delivery_by_url(service: Any) -> None:
    body = {"input": "x" * 300_000, "config": {"input_delivery": "url"}}
    assert (await post(service, body)).status_code == 201
    assert (await post(service, {"input": "x" * 65_534})).status_code == 201


class Rewriter:
    """Gives each rollout an image of its own."""

    async def on_enqueue(self, spec: RolloutSpec) -> RolloutSpec:
        if spec.input == "refuse":
            raise Invalid("no such task")
        if spec.input == "crash":
            raise RuntimeError("oops")
        image = f"{spec.config.image}+{spec.input}"
        return attrs.evolve(spec, rollout_id=None, config=RolloutConfig(image=image))

    async def on_finished(self, rollout: Any, events: Any) -> list[Any]:
        return []


async def test_hooks_see_each_rollout_in_order_and_may_replace_it(start: Any) -> None:
    service = await start(hooks=[Rewriter(), Rewriter()])
    answer = await post(service, {"input": "t", "n": 2, "group_id": "g"})
    assert answer.status_code == 201
    assert {item["config"]["image"] for item in answer.json()["items"]} == {"None+t+t"}
    assert [item["rollout_id"] for item in answer.json()["items"]] == ["g-0", "g-1"]


async def test_hook_that_refuses_or_fails_refuses_the_whole_request(start: Any) -> None:
    service = await start(hooks=[Rewriter()])
    answer = await post(service, [{"input": "t"}, {"input": "refuse"}])
    assert (answer.status_code, answer.json()["details"]["index"]) == (422, 1)
    assert answer.json()["detail"] == "rollouts[1]: no such task"
    answer = await post(service, [{"input": "t"}, {"input": "crash"}])
    assert (answer.status_code, answer.json()["code"]) == (500, "hook_error")
    assert "Rewriter" in answer.json()["detail"]
    assert await stored(service) == 0


async def test_concurrent_repeats_make_one_rollout(service: Any) -> None:
    body = {"rollout_id": "a", "input": 1}
    answers = await asyncio.gather(*(post(service, body) for _ in range(20)))
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
    assert await stored(service) == 1
