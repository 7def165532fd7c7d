"""One run of the demo: start everything, train, tell, and leave nothing behind."""

from __future__ import annotations

import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from attrs import frozen

from agl_core.client import AglLiteClient
from agl_core.clock import SystemClock
from agl_core.errors import ApiError
from agl_demo.processes import DemoFailed, ModelServer, Service, sweep
from agl_demo.report import step_line, summary
from agl_demo.training import Step, Training

Say = Callable[[str], None]
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@frozen(kw_only=True)
class Options:
    """What the command line decides."""

    seed: int
    port: int
    max_active: int


def run_demo(options: Options, say: Say) -> tuple[list[Step], dict[str, Any]]:
    """Run the demo; returns its steps and its summary.

    Raises:
        DemoFailed: It could not be finished; nothing is left running.
    """
    run = uuid.uuid4().hex[:8]
    clock = SystemClock()
    began = clock.monotonic()
    with _sigterm_ends(), ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="agl-demo-", ignore_cleanup_errors=True)
        path = Path(stack.enter_context(folder))
        stack.callback(_leave_nothing, run, say)
        models = ModelServer(path, run, seed=options.seed, say=say)
        stack.callback(models.stop)
        service = Service(path, run, port=options.port, max_active=options.max_active)
        stack.callback(service.stop)
        # The end takes a second or two, and must not be broken off itself.
        stack.callback(_ignore_signals)
        models.wait_until_ready()
        service.wait_until_ready()
        say(f"service       {service.url}  (process {service.pid})")
        say(f"model server  {models.endpoint}  (process {models.pid})")
        say(
            f"dashboard     {service.url}/dashboard"
            "  (the dashboard plugin is not part of this version)"
        )
        client = stack.enter_context(AglLiteClient(service.url, key=""))

        def check() -> None:
            service.check()
            if models.revive():
                training.register()

        training = Training(
            client=client,
            models=models,
            run=run,
            seed=options.seed,
            check=check,
            report=lambda step: say(step_line(step)),
        )
        try:
            training.train()
        except ApiError as exc:
            # Mostly the service has died; then that is what should be told.
            service.check()
            raise DemoFailed(f"the service refused: {exc.message}", hint=exc.hint) from exc
        result = summary(
            training.steps,
            seed=options.seed,
            restarts=models.restarts,
            seconds=clock.monotonic() - began,
        )
    return training.steps, result


def _leave_nothing(run: str, say: Say) -> None:
    """Whatever happened before: no process of the run is left."""
    _ignore_signals()
    left = sweep(run)
    if left:
        say(f"these processes could not be ended: {', '.join(map(str, left))}")


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _sigterm_ends() -> Iterator[None]:
    """SIGTERM ends us in good order, as Ctrl-C does; what the signals did before comes back."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)
