"""The documentation: its code runs, its links lead somewhere, and the API pages name every public module."""

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

import jaxnn as jn

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = [ROOT / "docs" / "quickstart.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]


def blocks(page: Path, *languages: str) -> list[str]:
    """The code of a page: ``python`` runs, ``py`` is only shown."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [code for language, code in found if language in languages]


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PROGRAMS if blocks(page, "python")])
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec", dont_inherit=True), names)


def test_code_of_all_pages_is_python():
    for page in PAGES:
        for code in blocks(page, "python", "py"):
            ast.parse(code.replace("->", "") if code.startswith("step(") else code, str(page))


def test_links_and_names_of_tests_lead_to_files_and_headings():
    wrong = []
    for page in PAGES:
        wrong += [name for name in re.findall(r"tests/\w+/\w+\.py", page.read_text()) if not (ROOT / name).exists()]
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\((?!https?:)([^)]*)\)", prose):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in headings(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert not wrong


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    assert [str(page) for page in PAGES[1:] if str(page.relative_to(docs)) not in navigation] == []


def test_api_pages_cover_every_public_name():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    # The page of `jaxnn` lists what is defined below it; a module has a page of its own.
    modules = {getattr(jn, name).__name__ for name in jn.__all__ if isinstance(getattr(jn, name), ModuleType)}
    by_name = {f"jaxnn.{name}" for name in ("parallel", "record", "sweeps", "bench", "plans")}
    assert modules | by_name | {"jaxnn"} <= documented
