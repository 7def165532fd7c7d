"""Distributions that are installed for one test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from agl_core.testing.distributions import write_distribution


class Install(Protocol):
    """Install a distribution with one module, and plugins in the group ``agl.plugins``."""

    def __call__(
        self,
        name: str,
        source: str = "",
        *,
        plugins: Mapping[str, str] | None = None,
        group: str = "agl.plugins",
        requires: Sequence[str] = (),
        version: str = "1.0",
    ) -> Path: ...


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Lay out distributions and put them on ``sys.path``; their modules are forgotten after."""
    before = set(sys.modules)

    def run(
        name: str,
        source: str = "",
        *,
        plugins: Mapping[str, str] | None = None,
        group: str = "agl.plugins",
        requires: Sequence[str] = (),
        version: str = "1.0",
    ) -> Path:
        module = name.replace("-", "_")
        folder = write_distribution(
            tmp_path / f"site_{module}",
            name,
            version=version,
            modules={f"{module}.py": source},
            entry_points={group: plugins if plugins is not None else {name: f"{module}:Plugin"}},
            requires=requires,
        )
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        return folder

    yield run
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
