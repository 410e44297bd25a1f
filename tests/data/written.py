"""Files that tests read."""

from pathlib import Path


def write(path: Path, content: str | bytes) -> Path:
    """Writes a file and its folders; text in UTF-8, with surrogates for bytes that are not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogateescape"))
    return path


def write_all(root: Path, files: dict[str, str]) -> Path:
    """Writes ``files``, texts by their path in ``root``, and returns it."""
    for name, text in files.items():
        write(root / name, text)
    return root
