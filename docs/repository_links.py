"""A hook of MkDocs: puts measured results into the site, and turns links to other files of the repository into text."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path("experiments/results")


def on_files(files: Files, config: Any) -> Files:
    """Adds ``experiments/results`` as ``results``."""
    root = Path(config.config_file_path).parent / RESULTS
    for path in sorted(root.rglob("*")):
        if path.suffix in {".md", ".png", ".json"}:
            name = Path("results", path.relative_to(root)).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links from ``docs/`` to what is outside."""
    markdown = markdown.replace("](../experiments/results/", "](results/")
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)+(?:jaxnn|notebooks|experiments)(?:/[^)]*)?\)", r"\1", markdown)
