"""``agl rollouts`` and ``agl events``: look at what the store has, and cancel."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import click

from agl_core.cli.options import (
    age,
    json_option,
    make_client,
    print_json,
    print_table,
    service_options,
)
from agl_core.records import Event, Rollout

_STATUSES = ("queuing", "running", "succeeded", "failed", "cancelled")


@click.group()
def rollouts() -> None:
    """List, show and cancel rollouts."""


@rollouts.command("list")
@service_options
@json_option
@click.option("--status", multiple=True, type=click.Choice(_STATUSES), help="Only these.")
@click.option("--group", "group_id", help="Only those of one group.")
@click.option("--mode", type=click.Choice(["train", "val"]), help="Only those of one mode.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most.")
def list_(
    url: str | None,
    key: str | None,
    as_json: bool,
    status: tuple[Any, ...],
    group_id: str | None,
    mode: Any,
    limit: int,
) -> None:
    """List rollouts in the order of their last change."""
    with make_client(url, key) as client:
        found = list(
            islice(client.iter_rollouts(status=status or None, group_id=group_id, mode=mode), limit)
        )
    if as_json:
        print_json({"items": found})
        return
    print_table(
        ("rollout", "status", "mode", "group", "attempts", "age", "error"),
        [
            (
                rollout.rollout_id,
                _status(rollout),
                rollout.mode,
                f"{rollout.group.id}[{rollout.group.index}]" if rollout.group else None,
                len(rollout.attempts),
                age(rollout.created_at),
                rollout.error.code if rollout.error else None,
            )
            for rollout in found
        ],
    )


def _status(rollout: Rollout) -> str:
    if rollout.cancel_requested and not rollout.is_terminal:
        return f"{rollout.status} (cancelling)"
    return rollout.status


@rollouts.command()
@click.argument("rollout_id")
@service_options
@json_option
def show(rollout_id: str, url: str | None, key: str | None, as_json: bool) -> None:
    """Show one rollout with its attempts."""
    with make_client(url, key) as client:
        rollout = client.rollout(rollout_id)
    if as_json:
        print_json(rollout)
        return
    facts = [
        ("rollout", rollout.rollout_id),
        ("status", _status(rollout)),
        ("mode", rollout.mode),
        ("group", rollout.group.id if rollout.group else None),
        ("grade", rollout.grade),
        ("created", f"{age(rollout.created_at)} ago"),
        ("input", _short(rollout.input)),
        ("succeeded attempt", rollout.succeeded_attempt_id),
    ]
    if rollout.error:
        facts.append(("error", f"{rollout.error.code}: {rollout.error.message}".rstrip(": ")))
    print_table(("field", "value"), facts)
    click.echo()
    print_table(
        ("attempt", "phase", "reason", "exit", "node", "seconds"),
        [
            (
                attempt.attempt_id,
                attempt.phase,
                attempt.reason,
                attempt.exit_code,
                attempt.node,
                f"{attempt.finished_at - attempt.started_at:.1f}"
                if attempt.finished_at and attempt.started_at
                else None,
            )
            for attempt in rollout.attempts
        ],
    )


@rollouts.command()
@click.argument("rollout_ids", nargs=-1)
@click.option("--group", "group_id", help="Cancel a whole group.")
@service_options
@json_option
def cancel(
    rollout_ids: tuple[str, ...],
    group_id: str | None,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Ask for the end of rollouts; the status is 1 where one could not be cancelled."""
    if bool(rollout_ids) == bool(group_id):
        raise click.UsageError("name rollouts, or --group, but not both")
    with make_client(url, key) as client:
        result = client.cancel_many(ids=list(rollout_ids) or None, group_id=group_id)
    if as_json:
        print_json(result)
    else:
        for rollout in result.items:
            click.echo(f"{rollout.rollout_id}: {_status(rollout)}")
        for refusal in result.refused:
            click.echo(f"{refusal.rollout_id}: {refusal.message or refusal.code}", err=True)
    if result.refused:
        raise click.exceptions.Exit(1)


@click.command()
@click.argument("rollout_id")
@click.option("--attempt", "attempt_id", help="Of this attempt  [default: the one that counts]")
@click.option("--all-attempts", is_flag=True, help="Of every attempt.")
@click.option("--type", "event_type", help="Only events of this type.")
@service_options
@json_option
def events(
    rollout_id: str,
    attempt_id: str | None,
    all_attempts: bool,
    event_type: str | None,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Show a rollout's events in order; with --json one line each, whole."""
    with make_client(url, key) as client:
        found = client.events(rollout_id, attempt_id, event_type, all_attempts)
    if as_json:
        for event in found:
            print_json(event)
        return
    print_table(("seq", "type", "attempt", "what"), _event_rows(found))


def _event_rows(found: list[Event]) -> Iterator[tuple[Any, ...]]:
    for event in found:
        yield event.seq, event.event_type, event.attempt_id[:12], _summary(event)


def _summary(event: Event) -> str:
    data = event.data
    if event.event_type == "model_request":
        usage = data.get("usage") or {}
        kinds = sorted({choice.get("tokens", "?") for choice in data.get("choices") or []})
        return (
            f"{data.get('api')} {data.get('status')} {data.get('http_status') or ''} "
            f"{usage.get('prompt_tokens', '?')}+{usage.get('completion_tokens', '?')} tokens "
            f"({', '.join(kinds) or 'none'}), version {data.get('version_start')}, "
            f"{data.get('latency_ms', 0):.0f} ms"
        )
    if event.event_type == "reward":
        of = f" of {data['call_id']}" if data.get("call_id") else ""
        return f"{data.get('value')}{of} from {data.get('source')}"
    return _short(data)


def _short(value: Any) -> str:
    from agl_core.wire import to_json

    text = to_json(value).decode()
    return text if len(text) <= 100 else f"{text[:97]}..."
