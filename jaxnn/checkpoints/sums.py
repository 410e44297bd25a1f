"""The checksums of a checkpoint: written before it gets its name, held against its files before they are read."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from jaxnn.checkpoints.folder import ABOUT_FILE, files_below, read_about, step_path

SUMS_FILE = "SHA256SUMS"
# A line as `sha256sum` writes it: the sum, two spaces, the name.
LINE = re.compile(r"([0-9a-f]{64})  (.+)")
# The first line, which `sha256sum -c` passes over: damage to the list itself is not to be blamed on a file in it.
HEAD = "# sha256 of the lines below: "


def write_sums(folder: Path) -> None:
    """Writes the SHA-256 of every file below ``folder`` into its ``SHA256SUMS``, for ``sha256sum -c`` to read.

    All of them are on the disk when it returns, so that a power cut after that takes nothing back.

    Raises:
        OSError: a file cannot be read or written.
    """
    lines = "".join(f"{_digest(folder, name, sync=True)}  {name}\n" for name in _files(folder))
    with (folder / SUMS_FILE).open("w") as file:
        file.write(f"{HEAD}{_digest_of(lines)}\n{lines}")
        file.flush()
        os.fsync(file.fileno())


def find_damage(folder: Path) -> str | None:
    """What is wrong with the first file below ``folder`` that is not as it was saved; None where all are."""
    if not (folder / SUMS_FILE).is_file():
        return f"its file {SUMS_FILE} is missing"
    try:
        sums = _read_sums(folder)
    except (OSError, ValueError):
        return f"its file {SUMS_FILE} has other bytes than were saved"
    there = _files(folder)
    for name in sorted(sums.keys() | set(there)):
        if name not in sums:
            return f"its file {name} was not there when it was saved"
        if name not in there:
            return f"its file {name} is missing"
        try:
            changed = _digest(folder, name) != sums[name]
        except OSError as error:
            return f"its file {name} cannot be read ({error.strerror or error})"
        if changed:
            return f"its file {name} has other bytes than were saved"
    return None


def step_damage(folder: Path, step: int) -> str | None:
    """What is wrong with the checkpoint in ``folder`` that has the name of ``step``; None if it is as it was saved."""
    if (what := find_damage(step_path(folder, step))) is not None:
        return what
    try:
        saved = read_about(folder, step)["step"]
    except OSError:
        return f"its file {ABOUT_FILE} is missing"
    # A copy of another step's, or a link to it, is whole in itself.
    return None if saved == step else f"it holds the state of step {saved}"


def _files(folder: Path) -> list[str]:
    """The names of all files below ``folder`` but that of the sums, relative to it, in order."""
    return sorted(set(files_below(folder)) - {SUMS_FILE})


def _read_sums(folder: Path) -> dict[str, str]:
    """Each file's sum by its name.

    Raises:
        ValueError: the list is not as it was written.
    """
    head, _, lines = (folder / SUMS_FILE).read_text().partition("\n")
    matches = [LINE.fullmatch(line) for line in lines.splitlines()]
    if head != HEAD + _digest_of(lines) or not all(matches):
        raise ValueError(f"{folder / SUMS_FILE} is not as it was written")
    return {match[2]: match[1] for match in matches if match is not None}


def _digest(folder: Path, name: str, *, sync: bool = False) -> str:
    """The SHA-256 of a file, in hexadecimal; with ``sync`` its bytes are on the disk too."""
    with open(os.path.join(folder, name), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return digest


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
