"""What is in the wheel: every package, whole, and nothing that is named but missing."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
PACKAGES: list[str] = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
PACKAGE_NAMES = {Path(path).name for path in PACKAGES}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built as for a release."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [uv, "build", "--wheel", "--quiet", "--out-dir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def files_of(package: Path) -> set[str]:
    """The files of a package, as the wheel should name them."""
    return {
        str(Path(folder, name).relative_to(package.parent))
        for folder, _, names in os.walk(package)
        for name in names
        if not folder.endswith("__pycache__") and not name.endswith(".pyc")
    }


@pytest.mark.timeout(180)
def test_the_wheel_has_every_file_of_every_package_and_no_other(wheel: zipfile.ZipFile) -> None:
    expected = {file for path in PACKAGES for file in files_of(ROOT / path)}
    built = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert built == expected


@pytest.mark.timeout(180)
def test_the_wheel_says_that_every_package_is_typed(wheel: zipfile.ZipFile) -> None:
    typed = {name.partition("/")[0] for name in wheel.namelist() if name.endswith("/py.typed")}
    assert typed == PACKAGE_NAMES


@pytest.mark.timeout(180)
def test_the_wheel_offers_the_extras_and_entry_points_of_the_project(
    wheel: zipfile.ZipFile,
) -> None:
    (info,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    for group in PROJECT["entry-points"]:
        assert f"[{group}]" in entry_points


def test_every_plugin_folder_is_in_the_wheels_list() -> None:
    folders = {f"plugins/{path.name}" for path in (ROOT / "plugins").glob("agl_*")}
    assert folders | {"agl_core"} == set(PACKAGES)


def test_every_entry_point_names_a_package_that_is_shipped() -> None:
    groups = [PROJECT["scripts"], *PROJECT["entry-points"].values()]
    named = {
        value.partition(":")[0].partition(".")[0] for group in groups for value in group.values()
    }
    assert named <= PACKAGE_NAMES


def test_every_plugin_folder_has_an_entry_point() -> None:
    values = [value for group in PROJECT["entry-points"].values() for value in group.values()]
    named = {value.partition(":")[0].partition(".")[0] for value in values}
    assert named >= PACKAGE_NAMES - {"agl_core"}


def test_every_package_stands_in_the_import_contracts() -> None:
    linter = PYPROJECT["tool"]["importlinter"]
    plugins = PACKAGE_NAMES - {"agl_core"}
    contracts = {contract["id"]: contract for contract in linter["contracts"]}
    assert set(linter["root_packages"]) == PACKAGE_NAMES
    assert set(contracts["core-knows-no-plugin"]["forbidden_modules"]) == plugins
    assert set(contracts["plugins-apart"]["modules"]) == plugins
    assert set(contracts["public-core"]["source_modules"]) == plugins
