"""``agl serve`` and ``agl controller``: the two long-running processes."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agl_core.cli.options import config_option, config_path_of, log_level_option, set_up_logging

if TYPE_CHECKING:
    from agl_core.clock import Clock

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_CONTROLLER_STOP_SECONDS = 20.0
_HEARTBEAT_SECONDS = 5.0
_RESTART_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)


@click.command()
@config_option
@click.option("--host", help="Overrides server.host.")
@click.option("--port", type=int, help="Overrides server.port; 0 takes any that is free.")
@click.option("--insecure", is_flag=True, help="Listen beyond loopback without keys.")
@click.option("--with-runner", is_flag=True, help="Also run the controller, as a child process.")
@log_level_option
def serve(
    config_path: str | None,
    host: str | None,
    port: int | None,
    insecure: bool,
    with_runner: bool,
    log_level: str,
) -> None:
    """Run the service: gateway, store and API.

    The line "listening on URL" on standard output says when it is ready. SIGTERM or Ctrl-C ends
    it: calls get server.grace_seconds to finish. A second signal ends it at once.
    """
    from agl_core import app, running

    set_up_logging(log_level)
    path = config_path_of(config_path)
    loaded = app.load(_raw(path, host, port, insecure))
    service = app.create_app(loaded)
    server = app.load_asgi_server(loaded)
    running.check_certificates(loaded.settings.server)
    sock = running.bind(loaded.settings)
    url = running.url_of(sock, loaded.settings)
    child = ControllerChild(path, url, loaded.settings, log_level) if with_runner else None

    async def ready() -> None:
        click.echo(f"listening on {url}")
        if child is not None:
            child.start()

    async def before_drain() -> None:
        if child is not None:
            await child.stop()

    _run(running.serve(service, server, sock, on_ready=ready, before_drain=before_drain))


def _raw(path: Path | None, host: str | None, port: int | None, insecure: bool) -> Any:
    from agl_core.config import read_config

    given: dict[tuple[str, ...], tuple[str, str]] = {}
    if host is not None:
        given["server", "host"] = ("--host", host)
    if port is not None:
        given["server", "port"] = ("--port", str(port))
    if insecure:
        given["server", "insecure"] = ("--insecure", "true")
    return read_config(path, options=given)


def _run(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where it is installed."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None
    try:
        import uvloop

        loop_factory = uvloop.new_event_loop
    except ImportError:
        loop_factory = None
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main)


class ControllerChild:
    """The controller as a child process that is started again when it dies.

    It talks HTTP to the service like one on another machine would. It has a session of its own, so
    that Ctrl-C reaches the service alone, which ends the controller first.
    """

    def __init__(self, path: Path | None, url: str, settings: Any, log_level: str) -> None:
        self._command = [sys.executable, "-m", "agl_core.cli", "controller"]
        self._command += ["--exit-with-parent", str(os.getpid()), "--log-level", log_level]
        if path is not None:
            self._command += ["--config", str(path)]
        self._environ = {**os.environ, "AGL__CONTROLLER__URL": url}
        auth, key = settings.auth, settings.controller.key
        key = key or auth.controller_key or auth.algorithm_key
        if key is not None:
            self._environ["AGL__CONTROLLER__KEY"] = key.reveal()
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_stopping = False

    def start(self) -> None:
        """Start the child and watch it."""
        self._spawn()
        self._watch = asyncio.create_task(self._keep_running())

    def _spawn(self) -> None:
        # From the main thread: the kernel's parent-death signal follows the thread that forked.
        self._process = subprocess.Popen(
            self._command, env=self._environ, stdin=subprocess.DEVNULL, start_new_session=True
        )
        log.info("controller started", extra={"pid": self._process.pid})

    async def _keep_running(self) -> None:
        from agl_core.clock import SystemClock

        clock = SystemClock()
        restarts = 0
        while True:
            assert self._process is not None
            began = clock.monotonic()
            status = await asyncio.to_thread(self._process.wait)
            if self._is_stopping:
                return
            if clock.monotonic() - began > 60:
                restarts = 0
            wait = _RESTART_SECONDS[min(restarts, len(_RESTART_SECONDS) - 1)]
            restarts += 1
            log.error(
                "controller ended, it is started again",
                extra={"exit_status": status, "restart_in_seconds": wait},
            )
            await clock.sleep(wait)
            self._spawn()

    async def stop(self) -> None:
        """End the child; it leaves agents running unless controller.stop_agents is set."""
        self._is_stopping = True
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, _CONTROLLER_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                log.error("controller did not end in time and is killed")
                process.kill()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)


@click.command()
@config_option
@click.option("--url", help="Overrides controller.url.")
@click.option(
    "--heartbeat",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file to touch every few seconds while the controller is alive, for a liveness probe.",
)
@click.option("--exit-with-parent", type=int, hidden=True)
@log_level_option
def controller(
    config_path: str | None,
    url: str | None,
    heartbeat: Path | None,
    exit_with_parent: int | None,
    log_level: str,
) -> None:
    """Run the controller: it starts agents for queued rollouts and reports how they end.

    Where the runner elects a leader, it waits until no other controller works.
    """
    from agl_core import app
    from agl_core.config import read_config

    set_up_logging(log_level)
    if exit_with_parent is not None:
        _die_with(exit_with_parent)
    given: dict[tuple[str, ...], tuple[str, str]] = {}
    if url is not None:
        given["controller", "url"] = ("--url", url)
    loaded = app.load(read_config(config_path_of(config_path), options=given))
    with asyncio.Runner() as runner:
        runner.run(_control(loaded, heartbeat))


async def _control(loaded: Any, heartbeat: Path | None) -> None:
    from agl_core.client import AsyncAglLiteClient
    from agl_core.clock import SystemClock
    from agl_core.controller import Controller
    from agl_core.controller.waiting import first_of

    settings = loaded.settings.controller
    clock = SystemClock()
    runner = loaded.plugins.provide_runner(clock)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop)
    key = settings.key.reveal() if settings.key is not None else None
    async with AsyncExitStack() as stack:
        if heartbeat is not None:
            beating = asyncio.create_task(_beat(heartbeat, clock))
            stack.callback(beating.cancel)
        client = await stack.enter_async_context(AsyncAglLiteClient(settings.url, key))
        # Entering may wait for another controller to go, and a signal ends that too.
        entering = asyncio.ensure_future(stack.enter_async_context(runner))
        await first_of(asyncio.shield(entering), stop.wait())
        if not entering.done():
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)
            return
        entering.result()
        log.info("controller serves %s", settings.url)
        await Controller(client, runner, settings, clock).run(stop)


async def _beat(path: Path, clock: Clock) -> None:
    while True:
        await asyncio.to_thread(path.touch)
        await clock.sleep(_HEARTBEAT_SECONDS)


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(130)
    stop.set()


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies; end now if it has already."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent has ended")
