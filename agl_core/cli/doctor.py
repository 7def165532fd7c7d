"""``agl doctor``: is all there that the first rollout will need?"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import click

from agl_core.cli.options import (
    config_option,
    config_path_of,
    json_option,
    print_json,
    service_options,
    set_up_logging,
)
from agl_core.errors import AglError, ApiError

if TYPE_CHECKING:
    from agl_core.client import AsyncAglLiteClient
    from agl_core.interfaces import Finding

_SECONDS = 10.0
_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": None}
_PROBE_TOKEN = "a-token-that-opens-nothing"


@click.command()
@config_option
@service_options
@click.option("--image", help="Try this image instead of the configured one.")
@click.option("--resources", "resources_id", help="Try the job_defaults of these resources.")
@click.option("--no-probe", is_flag=True, help="Start nothing.")
@click.option(
    "--timeout",
    "timeout_seconds",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a probe may take.",
)
@json_option
def doctor(
    config_path: str | None,
    url: str | None,
    key: str | None,
    image: str | None,
    resources_id: str | None,
    no_probe: bool,
    timeout_seconds: float,
    as_json: bool,
) -> None:
    """Look whether rollouts could run: the service, its model servers, and where agents run.

    Run it where the controller runs, with its configuration. A line says what was looked at and
    how it is, the one below what to do. The status is 1 where something failed.
    """
    from agl_core import app
    from agl_core.config import read_config

    set_up_logging("warning")
    given: dict[tuple[str, ...], tuple[str, str]] = {}
    if url is not None:
        given["controller", "url"] = ("--url", url)
    loaded = app.load(read_config(config_path_of(config_path), options=given))
    counts: Counter[str] = Counter()

    async def look() -> None:
        findings = examine(
            loaded,
            key,
            image=image,
            resources_id=resources_id,
            with_probe=not no_probe,
            timeout_seconds=timeout_seconds,
        )
        async for finding in findings:
            counts[finding.status] += 1
            if as_json:
                print_json(finding)
            else:
                _tell(finding)

    asyncio.run(look())
    if not as_json:
        told = ", ".join(f"{counts[status]} {status}" for status in _COLOURS if counts[status])
        click.echo(f"\n{counts.total()} checks: {told}")
    if counts["failed"]:
        raise click.exceptions.Exit(1)


async def examine(
    loaded: Any,
    key: str | None,
    *,
    image: str | None,
    resources_id: str | None,
    with_probe: bool,
    timeout_seconds: float,
) -> AsyncIterator[Finding]:
    """Everything, in the order in which a rollout needs it."""
    from agl_core.client import AsyncAglLiteClient
    from agl_core.clock import SystemClock
    from agl_core.interfaces import Finding, Work
    from agl_core.records import Rollout, RolloutConfig

    settings, auth = loaded.settings.controller, loaded.settings.auth
    secret = settings.key or auth.controller_key or auth.algorithm_key
    if key is None and secret is not None:
        key = secret.reveal()
    yield Finding(
        subject="configuration",
        status="ok",
        message=f"plugins {', '.join(loaded.settings.plugins.enabled)}",
    )
    defaults: Any = {}
    async with AsyncAglLiteClient(settings.url, key, retries=0, timeout_seconds=_SECONDS) as client:
        async for finding in _look_at_service(client, settings.url):
            yield finding
        if resources_id is not None:
            try:
                defaults = (await client.resources(resources_id)).data.get("job_defaults", {})
            except ApiError as exc:
                yield _failed("resources", exc)
    try:
        runner = loaded.plugins.provide_runner(SystemClock())
    except AglError as exc:
        yield _failed("runner", exc)
        return
    rollout = Rollout(
        rollout_id=f"doctor-{uuid.uuid4().hex[:8]}",
        input=None,
        config=RolloutConfig(
            image=image, command=("sh", "-c", "exit 0"), timeout_seconds=timeout_seconds
        ),
    )
    agent_url = (settings.agent_url or settings.url).rstrip("/")
    work = Work(rollout=rollout, agent_url=agent_url, token=_PROBE_TOKEN, job_defaults=defaults)
    async for finding in runner.examine(work, with_probe=with_probe):
        yield finding


async def _look_at_service(client: AsyncAglLiteClient, url: str) -> AsyncIterator[Finding]:
    from agl_core.interfaces import Finding

    try:
        health = await client.health()
    except AglError as exc:
        yield Finding(
            subject="service",
            status="failed",
            message=f"{url} does not answer: {exc.message}",
            hint="start it with 'agl serve', or correct controller.url",
        )
        for subject in ("key", "model servers"):
            yield Finding(subject=subject, status="skipped", message="there is no service to ask")
        return
    yield Finding(
        subject="service", status="ok", message=f"{url} answers, version {health.version}"
    )
    try:
        await _try_to_mint(client)
        servers = await client.models()
        ready = await client.ready()
    except AglError as exc:
        yield Finding(
            subject="key",
            status="failed",
            message=exc.message,
            hint="set controller.key to the value that the service has for auth.controller_key",
        )
        yield Finding(subject="model servers", status="skipped", message="we may not look at them")
        return
    yield Finding(subject="key", status="ok", message="the service takes it")
    if not servers:
        yield Finding(
            subject="model servers",
            status="warning",
            message="none is registered: agents' calls would wait",
            hint="agl models add MODEL http://HOST:PORT/v1",
        )
    reasons = {str(reason.get("server")): reason for reason in ready.reasons}
    for view in servers:
        yield _judge_server(view, reasons.get(view.server.endpoint))


async def _try_to_mint(client: AsyncAglLiteClient) -> None:
    """Ask for what the controller alone may have; a viewer's key would do for all the rest.

    Raises:
        AglError: The key is none, or one of another role.
    """
    try:
        await client.mint_token(f"doctor-{uuid.uuid4().hex}")
    except ApiError as exc:
        if exc.status != 404:  # the rollout does not exist, and we were let in to hear that
            raise


def _judge_server(view: Any, reason: Any) -> Finding:
    from agl_core.interfaces import Finding

    server = view.server
    name = f"{server.model} at {server.endpoint}"
    if reason is not None:
        return Finding(
            subject="model server",
            status="failed",
            message=f"{name} is not fit for training: {reason.get('field')}",
            hint="let it be a vLLM that agents' calls reach without a router that drops fields",
        )
    if not view.healthy:
        return Finding(
            subject="model server",
            status="failed",
            message=f"{name} does not answer",
            hint="look at its log, and whether the service reaches it",
        )
    told = "returns token ids and logprobs" if server.trained else "answers; it is not trained"
    return Finding(
        subject="model server", status="ok", message=f"{name}, version {server.version}: {told}"
    )


def _failed(subject: str, error: AglError) -> Finding:
    from agl_core.interfaces import Finding

    return Finding(subject=subject, status="failed", message=error.message, hint=error.hint)


def _tell(finding: Finding) -> None:
    status = finding.status.upper() if finding.status == "failed" else finding.status
    mark = click.style(status.ljust(8), fg=_COLOURS[finding.status], bold=status == "FAILED")
    click.echo(f"{mark} {finding.subject}: {_one_line(finding.message)}")
    if finding.hint and finding.status != "ok":
        click.echo(f"{'':8} -> {_one_line(finding.hint)}")


def _one_line(text: str) -> str:
    """A message from outside must not steer the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)
