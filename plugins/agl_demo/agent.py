"""The demo's agent: a plain script, as yours would be. It imports nothing of agl-lite.

It brings a robot to its charger on a 5 x 5 grid by asking a model for one direction after the
other. Which model answers, and who is listening, it does not know: it reads environment
variables, calls an OpenAI-compatible URL and posts what each answer was worth.
"""

from __future__ import annotations

import gc
import json
import os
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import OpenAI

SIZE = 5
MODEL = "demo-policy"
DIRECTIONS = {
    **dict.fromkeys(("north", "up"), (0, 1)),
    **dict.fromkeys(("south", "down"), (0, -1)),
    **dict.fromkeys(("east", "right"), (1, 0)),
    **dict.fromkeys(("west", "left"), (-1, 0)),
}
PROMPT = "bring the robot to its charger answer with one direction"


class Walk:
    """The grid, the robot on it, and what its moves were worth."""

    def __init__(self, robot: tuple[int, int], charger: tuple[int, int]) -> None:
        self.robot = robot
        self.charger = charger
        self.fewest_moves = self.distance
        self.moves = 0

    @property
    def offset(self) -> tuple[int, int]:
        """Cells to the charger, eastwards and northwards."""
        return self.charger[0] - self.robot[0], self.charger[1] - self.robot[1]

    @property
    def distance(self) -> int:
        """Moves that the shortest way takes."""
        return abs(self.offset[0]) + abs(self.offset[1])

    def describe(self) -> str:
        """The offset in words: ``the charger is 2 east 0 level``."""
        east, north = self.offset
        across = "level" if east == 0 else "east" if east > 0 else "west"
        along = "level" if north == 0 else "north" if north > 0 else "south"
        return f"the charger is {abs(east)} {across} {abs(north)} {along}"

    def move(self, answer: str) -> tuple[float, bool]:
        """Do what the model said; returns the reward of the answer and whether the robot moved.

        1 for a step towards the charger, 0 for all else.
        """
        self.moves += 1
        step = DIRECTIONS.get(answer.strip(), (0, 0))
        wanted = (self.robot[0] + step[0], self.robot[1] + step[1])
        if step == (0, 0) or not all(0 <= place < SIZE for place in wanted):
            return 0.0, False
        before = self.distance
        self.robot = wanted
        return float(self.distance < before), True

    def reward(self) -> float:
        """Of the whole walk: 1 for a shortest way, 0 where the charger was not reached."""
        return self.fewest_moves / self.moves if self.distance == 0 and self.moves else 0.0


def ask(
    client: OpenAI, messages: list[dict[str, Any]], user: str, *, stream: bool
) -> tuple[str, str]:
    """One model call; returns the answer's text and the call's id."""
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 2,
        "user": user,
        "stream": stream,
    }
    raw = client.chat.completions.with_raw_response.create(**request)
    call_id = raw.headers["x-request-id"]
    answer: Any = raw.parse()
    if not stream:
        return answer.choices[0].message.content or "", call_id
    parts = [
        choice.delta.content or "" for chunk in answer for choice in chunk.choices if choice.delta
    ]
    return "".join(parts), call_id


def post(events: list[dict[str, Any]]) -> None:
    """Tell the service; a program without an HTTP library can do it too."""
    request = urllib.request.Request(
        os.environ["AGL_EVENT_URL"],
        data=json.dumps(events).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def main() -> None:
    """Walk until the charger is reached or the calls are used up, then post the rewards."""
    # Most of this short life is the import, which is a quarter quicker without the collector.
    gc.disable()
    from openai import OpenAI

    task = json.loads(os.environ["AGL_TASK_INPUT"])
    # The siblings of a group share the input; the number that ends the id tells them apart.
    sibling = os.environ["AGL_ROLLOUT_ID"].rpartition("-")[2]
    walk = Walk(tuple(task["robot"]), tuple(task["charger"]))
    messages: list[dict[str, Any]] = [{"role": "system", "content": PROMPT}]
    events: list[dict[str, Any]] = []
    news = ""
    with OpenAI() as client:
        while walk.distance and walk.moves < task["max_calls"]:
            messages.append({"role": "user", "content": f"{news} {walk.describe()}".strip()})
            user = f"{task['key']}/{sibling}:{walk.moves}"
            answer, call_id = ask(client, messages, user, stream=walk.moves % 2 == 1)
            messages.append({"role": "assistant", "content": answer})
            value, has_moved = walk.move(answer)
            news = "moved" if has_moved else "stayed"
            events.append({"event_type": "reward", "data": {"value": value, "call_id": call_id}})
    events.append(
        {
            "event_type": "reward",
            "data": {"value": walk.reward(), "metrics": {"moves": walk.moves}},
        }
    )
    # All at once: either every reward of the walk is recorded or none.
    post(events)


if __name__ == "__main__":
    main()
