"""VERL: exporters that give captured calls as what its trainers read.

Only records that carry the engine's own token ids are exported; nothing is ever tokenized again.
"""

from __future__ import annotations

from agl_core.hookspecs import hookimpl
from agl_core.interfaces import Exporter
from agl_verl.exporters import exporters


class VerlPlugin:
    """Offers the formats ``triplet`` and ``trajectory``."""

    @hookimpl
    def provide_exporter(self) -> list[Exporter]:
        return exporters()
