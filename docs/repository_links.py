"""A hook of MkDocs: puts measured results into the site, turns links to other files of the repository into text."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("experiments/results")
# A browser does not let a page that was opened as a file read the search index.
SEARCH_NOTE = """<script>
if (location.protocol === "file:") {
  const note = "Search needs a server: make docs ARGS=--serve";
  document.querySelectorAll(".md-search__input").forEach(input => { input.placeholder = note; input.disabled = true; });
}
</script>
"""


def on_files(files: Files, config: Any) -> Files:
    """Adds ``experiments/results`` as ``results``."""
    results = ROOT / RESULTS
    for path in sorted(results.rglob("*")):
        if path.suffix in {".md", ".png", ".json"}:
            name = Path("results", path.relative_to(results)).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links from ``docs/`` to what is outside."""
    markdown = markdown.replace("](../experiments/results/", "](results/")
    outside = "|".join(re.escape(path.name) for path in ROOT.iterdir() if path.name != "docs")
    return re.sub(rf"\[([^\]]*)\]\((?:\.\./)+(?:{outside})(?:[/#][^)]*)?\)", r"\1", markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Says where search works, on a page that is opened as a file."""
    return output.replace("</body>", f"{SEARCH_NOTE}</body>")
