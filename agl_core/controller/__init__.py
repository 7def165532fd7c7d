"""The reconcile loop between the store, over HTTP, and a runner."""

from agl_core.controller.loop import Controller
from agl_core.controller.service import ControllerClient

__all__ = ["Controller", "ControllerClient"]
