"""The documentation is true: its programs run, and what it names exists."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from attrs import frozen

from agl_core.app import load_file
from agl_core.cli import agl
from agl_core.client import AglLiteClient

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"^(?:agl_core|plugins|docs|tests|examples|\.ci)/[\w./-]*$")
_FILE = re.compile(r"^(?:pyproject\.toml|justfile|constraints\.txt)$")
_MODULE = re.compile(r"^agl_[a-z]+(?:\.\w+)+$")
RunBlock = Callable[[str, str], subprocess.CompletedProcess[str]]
_SECRET = re.compile(r'env\s*=\s*"(\w+)"')


@frozen(kw_only=True)
class Block:
    """A fenced block. ``run`` after its language says that it runs, ``file=NAME`` that it is kept.

    Each block that runs is a process of its own, in a folder that its page has to itself, with
    ``AGL_URL`` set.
    """

    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def file_name(self) -> str | None:
        return next((m.removeprefix("file=") for m in self.marks if m.startswith("file=")), None)


@frozen(kw_only=True)
class Page:
    """One Markdown file."""

    path: Path
    text: str
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def prose(self) -> str:
        """The text without its blocks; lines keep their places."""
        return _walk(self.text)[1]

    @property
    def runs(self) -> bool:
        return any("run" in block.marks for block in self.blocks)


def _walk(text: str) -> tuple[tuple[Block, ...], str]:
    blocks: list[Block] = []
    prose: list[str] = []
    opened: tuple[int, str, int] | None = None
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if opened is None and fence is None:
            prose.append(line)
            continue
        prose.append("")
        if opened is None:
            assert fence is not None
            opened, inside = (number, fence["info"], len(fence["indent"])), []
        elif fence is not None and not fence["info"].strip():
            start, info, _ = opened
            language, *marks = info.split() or [""]
            kept = "\n".join(inside) + "\n"
            blocks.append(Block(line=start, language=language, marks=tuple(marks), text=kept))
            opened = None
        else:
            inside.append(line[opened[2] :])
    assert opened is None, f"the block in line {opened} is never closed"
    return tuple(blocks), "\n".join(prose)


def read_page(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    return Page(path=path, text=text, blocks=_walk(text)[0])


def all_pages() -> list[Page]:
    """README, CONTRIBUTING and everything below docs but the changelog's fragments."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [read_page(path) for path in paths if not path.name.startswith("+")]


PAGES = all_pages()
RUNNING = [page for page in PAGES if page.runs]


def each_page(pages: list[Page]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.name)


def anchors_of(page: Page) -> set[str]:
    """The anchors that a renderer makes of a page's headings."""
    headings = re.findall(r"^#+\s+(.*)$", page.prose, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


@each_page(PAGES)
def test_every_relative_link_leads_somewhere(page: Page) -> None:
    broken: list[str] = []
    for match in _LINK.finditer(page.prose):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.path.parent / target).resolve() if target else page.path
        is_there = path.exists() and path.is_relative_to(ROOT)
        if not is_there or (anchor and anchor not in anchors_of(read_page(path))):
            broken.append(match["target"])
    assert broken == []


def test_every_page_can_be_reached_from_the_index() -> None:
    pages = {page.path: page for page in PAGES}
    seen: set[Path] = set()
    left = [ROOT / "docs/index.md"]
    while left:
        path = left.pop()
        if path in seen or path not in pages:
            continue
        seen.add(path)
        targets = (m["target"].partition("#")[0] for m in _LINK.finditer(pages[path].prose))
        left += [(path.parent / target).resolve() for target in targets if target]
    assert sorted(str(path) for path in pages.keys() - seen) == []


def commands_of(page: Page) -> Iterator[list[str]]:
    """The words after each ``agl`` in a page: in shell blocks, and in code within a sentence."""
    for block in page.blocks:
        if block.language != "bash":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\||;|\$\(", line):
                if re.match(r"\s*([\w./-]+ )*agl\b", part):
                    words = shlex.split(part.rstrip(" &)"), comments=True)
                    yield words[words.index("agl") + 1 :]
    for code in _CODE.findall(page.prose):
        if code.startswith("agl "):
            yield code.split()[1:]


@each_page(PAGES)
def test_every_agl_command_exists_with_its_options(page: Page) -> None:
    wrong: list[str] = []
    for words in commands_of(page):
        command: click.Command = agl
        rest = list(words)
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            found = command.get_command(click.Context(command, **command.context_settings), rest[0])
            if found is None:
                break
            command, rest = found, rest[1:]
        options = {
            o
            for p in command.get_params(click.Context(command, **command.context_settings))
            for o in p.opts
        }
        options |= {"-h", "--help"}
        unknown = [word for word in rest if word.startswith("-") and word not in options]
        if unknown or (isinstance(command, click.Group) and rest and not rest[0].startswith("-")):
            wrong.append(" ".join(["agl", *words]))
    assert wrong == []


@each_page(PAGES)
def test_every_path_and_module_named_exists(page: Page) -> None:
    missing: list[str] = []
    for code in _CODE.findall(page.prose):
        if _PATH.match(code) or _FILE.match(code):
            is_there = (ROOT / code).exists()
        elif _MODULE.match(code):
            is_there = can_be_named(code)
        else:
            continue
        if not is_there:
            missing.append(code)
    assert missing == []


def can_be_named(dotted: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    above, _, name = dotted.rpartition(".")
    try:
        if importlib.util.find_spec(dotted) is not None:
            return True
    except ModuleNotFoundError:
        pass
    if importlib.util.find_spec(above) is None:
        return False
    return hasattr(importlib.import_module(above), name)


@each_page([page for page in PAGES if any(b.language == "toml" for b in page.blocks)])
def test_every_agl_toml_shown_can_be_loaded(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in page.blocks:
        if block.language != "toml" or not block.text.startswith("# agl.toml"):
            continue
        for name in _SECRET.findall(block.text):
            monkeypatch.setenv(name, "a-key")
        path = tmp_path / f"line_{block.line}.toml"
        path.write_text(block.text)
        load_file(path)


@pytest.mark.timeout(240)
@each_page(RUNNING)
def test_every_program_shown_runs(
    page: Page, service_url: str, page_folder: Path, run_block: RunBlock
) -> None:
    languages = {block.language for block in page.blocks if "run" in block.marks}
    if "bash" in languages and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    for block in page.blocks:
        if block.file_name is not None:
            (page_folder / block.file_name).write_text(block.text)
        if "run" in block.marks:
            done = run_block(block.language, block.text)
            where = f"{page.name}:{block.line}\n{done.stdout}\n{done.stderr}"
            assert done.returncode == 0, where
    with AglLiteClient(service_url, "") as client:
        failed = [r.rollout_id for r in client.iter_rollouts(status="failed")]
    assert failed == []


def test_the_pages_that_newcomers_read_have_programs_that_run() -> None:
    wanted = {"README.md", "docs/getting-started.md", "docs/agents.md", "docs/api.md"}
    assert wanted <= {page.name for page in RUNNING}
