"""Installed distributions, made by hand: a folder that only has to be put on ``sys.path``.

Discovery reads nothing but metadata, so that a plugin laid out like this is found as one that pip
installed is, without network and in a millisecond.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_distribution(
    folder: Path,
    name: str,
    *,
    version: str = "1.0",
    modules: Mapping[str, str] | None = None,
    entry_points: Mapping[str, Mapping[str, str]] | None = None,
    requires: Sequence[str] = (),
) -> Path:
    """Lay out a distribution as an installer would.

    Args:
        folder: Put it on ``sys.path`` or ``PYTHONPATH``.
        name: Of the distribution.
        version: Of the distribution.
        modules: Source text by path, such as ``{"my_plugin.py": "..."}``.
        entry_points: ``{group: {name: "module:Class"}}``.
        requires: ``Requires-Dist`` lines; ``'x; extra == "y"'`` also declares the extra.

    Returns:
        ``folder``.
    """
    metadata = folder / f"{re.sub(r'[-_.]+', '_', name)}-{version}.dist-info"
    metadata.mkdir(parents=True)
    extras = {found for line in requires for found in re.findall(r"extra == \"([^\"]+)\"", line)}
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    lines += [f"Provides-Extra: {extra}" for extra in sorted(extras)]
    (metadata / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    groups = []
    for group, members in (entry_points or {}).items():
        groups += [f"[{group}]", *(f"{key} = {value}" for key, value in members.items()), ""]
    (metadata / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    for path, text in (modules or {}).items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder
