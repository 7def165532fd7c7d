"""From a body of ``POST /api/rollouts`` to specs that are ready to be stored."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from agl_core.api.shapes import EnqueueItem
from agl_core.errors import AglError, HookError, Invalid, NotFound
from agl_core.interfaces import RolloutHooks, Store
from agl_core.records import (
    MAX_ENV_INPUT_BYTES,
    MAX_ID_CHARACTERS,
    Group,
    RolloutConfig,
    RolloutSpec,
)
from agl_core.wire import structure, to_json, unknown_key

log = logging.getLogger(__name__)

MAX_ROLLOUTS = 10_000
MAX_ENV_VALUE_BYTES = 65_536
RESERVED_NAMES = frozenset(
    {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"}
)
RESERVED_PREFIX = "AGL_"

_BATCH_KEYS = ("rollouts", "config", "resources_id", "metadata")


@frozen(kw_only=True)
class Asked:
    """What a body asks for."""

    items: tuple[EnqueueItem, ...]
    is_single: bool
    """One item that is no group: the answer is the rollout itself."""


def read_enqueue(body: Any) -> Asked:
    """Read a body: an item, a list of items, or a batch with defaults.

    Raises:
        Invalid: ``details["index"]`` says which item, where there are several.
    """
    if isinstance(body, Mapping) and "rollouts" in body:
        return Asked(items=_read_items(_with_defaults(body)), is_single=False)
    if isinstance(body, list):
        return Asked(items=_read_items(body), is_single=False)
    item = structure(body, EnqueueItem)
    _check_item(item, "")
    return Asked(items=(item,), is_single=item.n is None and item.group_id is None)


def _with_defaults(batch: Mapping[str, Any]) -> list[Any]:
    """Merge a batch's defaults under each item, which wins key by key."""
    for key in batch:
        if key not in _BATCH_KEYS:
            raise Invalid(f"{key}: {unknown_key(str(key), _BATCH_KEYS)}")
    items = batch["rollouts"]
    if not isinstance(items, list):
        raise Invalid("rollouts: must be a list of items")
    config, metadata = batch.get("config", {}), batch.get("metadata", {})
    structure(config, RolloutConfig, "config")
    if not isinstance(metadata, Mapping):
        raise Invalid("metadata: must be an object")
    merged: list[Any] = []
    for item in items:
        if not isinstance(item, Mapping):
            merged.append(item)  # refused with its index later
            continue
        fields = dict(item)
        for name, defaults in (("config", config), ("metadata", metadata)):
            own = fields.get(name, {})
            if defaults and isinstance(own, Mapping):
                fields[name] = {**defaults, **own}
        if "resources_id" in batch:
            fields.setdefault("resources_id", batch["resources_id"])
        merged.append(fields)
    return merged


def _read_items(values: Sequence[Any]) -> tuple[EnqueueItem, ...]:
    if not values:
        raise Invalid("rollouts: the list is empty")
    items: list[EnqueueItem] = []
    for index, value in enumerate(values):
        try:
            where = f"rollouts[{index}]"
            item = structure(value, EnqueueItem, where)
            _check_item(item, f"{where}: ")
        except Invalid as exc:
            exc.details["index"] = index
            raise
        items.append(item)
    return tuple(items)


def _check_item(item: EnqueueItem, where: str) -> None:
    if item.n is None and item.group_id is None:
        return
    for name in ("group", "rollout_id"):
        if getattr(item, name) is not None:
            raise Invalid(
                f"{where}{name!r} and 'n' or 'group_id' exclude each other",
                hint="'n' and 'group_id' make the group and its rollouts' ids",
            )


class Enqueuer:
    """Makes specs of items: expands groups, asks the hooks, checks the result.

    Args:
        store: Where resources are looked up.
        hooks: Each gets the spec that the one before returned.
    """

    def __init__(self, store: Store, hooks: Sequence[RolloutHooks]) -> None:
        self._store = store
        self._hooks = hooks

    async def specs(self, asked: Asked) -> list[tuple[int, RolloutSpec]]:
        """One spec per rollout, each with its id, and the index of the item it comes from.

        Raises:
            Invalid: An item cannot run as it is; nothing has been stored.
            HookError: A hook failed.
        """
        if sum(item.n or 1 for item in asked.items) > MAX_ROLLOUTS:
            raise Invalid(
                f"more than {MAX_ROLLOUTS} rollouts in one request", hint="send several requests"
            )
        known_resources: set[str] = set()
        specs: list[tuple[int, RolloutSpec]] = []
        is_list = len(asked.items) > 1 or not asked.is_single
        for index, item in enumerate(asked.items):
            try:
                for expanded in _expand(item):
                    spec = await self._ask_hooks(expanded)
                    check_spec(spec)
                    await self._check_resources(spec, known_resources)
                    specs.append((index, spec))
            except AglError as exc:
                if is_list:
                    name_item(exc, index)
                raise
        return specs

    async def _ask_hooks(self, spec: RolloutSpec) -> RolloutSpec:
        rollout_id = spec.rollout_id
        for hook in self._hooks:
            try:
                spec = await hook.on_enqueue(spec)
            except AglError:
                raise
            except Exception as exc:
                name = type(hook).__qualname__
                log.exception("on_enqueue of %s failed", name, extra={"rollout_id": rollout_id})
                raise HookError(f"on_enqueue of {name} failed: {exc}") from exc
        # The id is a promise to who asked; a hook that names none has not taken it back.
        return attrs.evolve(spec, rollout_id=rollout_id)

    async def _check_resources(self, spec: RolloutSpec, known: set[str]) -> None:
        if spec.resources_id is None or spec.resources_id in known:
            return
        try:
            await self._store.get_resources(spec.resources_id)
        except NotFound as exc:
            raise Invalid(
                f"resources_id: there are no resources {spec.resources_id!r}",
                hint="POST /api/resources first",
            ) from exc
        known.add(spec.resources_id)


def name_item(exc: AglError, index: int) -> None:
    """Say in an error which item of the request it is about."""
    exc.details["index"] = index
    if not exc.message.startswith("rollouts["):
        exc.message = f"rollouts[{index}]: {exc.message}"


def _expand(item: EnqueueItem) -> list[RolloutSpec]:
    """The rollouts of an item: itself, or a group of siblings."""
    spec = item.spec()
    if item.n is None and item.group_id is None:
        rollout_id = spec.rollout_id or f"r-{secrets.token_hex(8)}"
        return [attrs.evolve(spec, rollout_id=rollout_id)]
    size = item.n or 1
    group_id = item.group_id or f"g-{secrets.token_hex(6)}"
    if len(f"{group_id}-{size - 1}") > MAX_ID_CHARACTERS:
        raise Invalid("group_id: too long to number its rollouts", hint="use a shorter one")
    return [
        attrs.evolve(
            spec,
            rollout_id=f"{group_id}-{index}",
            group=Group(id=group_id, size=size, index=index),
        )
        for index in range(size)
    ]


def check_spec(spec: RolloutSpec) -> None:
    """Refuse what no runner could deliver to an agent.

    Raises:
        Invalid: It says what, and what to do.
    """
    config = spec.config
    if config.input_delivery == "env":
        size_bytes = len(to_json(spec.input))
        if size_bytes > MAX_ENV_INPUT_BYTES:
            raise Invalid(
                f"input: {size_bytes} bytes of JSON, and an environment variable is given at most "
                f"{MAX_ENV_INPUT_BYTES}",
                hint="set config.input_delivery to 'url' or 'file'",
            )
    if spec.group is not None and spec.group.index >= spec.group.size:
        raise Invalid(
            f"group: index {spec.group.index} is outside a group of {spec.group.size}",
            hint="the index counts from 0",
        )
    for name, value in config.env.items():
        _check_variable(name, value)


def _check_variable(name: str, value: str) -> None:
    where = f"config.env.{name}"
    if not name or "=" in name or "\0" in name or "\0" in value:
        raise Invalid(f"{where}: no environment variable can be set so")
    if name in RESERVED_NAMES or name.startswith(RESERVED_PREFIX):
        raise Invalid(
            f"{where}: the name is reserved, agl-lite sets it itself",
            hint="choose a name of your own for what the agent reads",
        )
    size_bytes = len(value.encode())
    if size_bytes > MAX_ENV_VALUE_BYTES:
        raise Invalid(
            f"{where}: {size_bytes} bytes, and at most {MAX_ENV_VALUE_BYTES} are allowed",
            hint="put it into the input, which can be fetched by URL",
        )
