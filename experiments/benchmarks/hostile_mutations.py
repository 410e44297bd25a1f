"""Changes of one file of a record or of a saved model, as whoever wrote it could make them."""

import hashlib
import io
import json
import os
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

CANARY = "canary"  # a module in the record, and in the working directory
MARK = "mark"  # the file that it writes when it is imported
BAIT = "outside/bait"  # a file that no record has a reason to open
ESCAPES = r"\u001b]0;mine\u0007\u001b[2J\u009b\u202e"

# JSON of values that a field is replaced by.
NUMBERS = "0 1 -1 2.5 -0.0 1e-320 1e308 1e999 -1e999 NaN -Infinity 2147483647 2147483648 -9223372036854775809".split()
NUMBERS += [f"1{400 * '0'}", f"-1{5_000 * '0'}"]
TEXTS = [*("", "x", "1", "nan", "-inf", "all", "data=3", "float99[3]", "float32[1000000,1000000]", "a\\nb", "\\u0000")]
TEXTS += [f"{CANARY}:x", f"run.{CANARY}:x", f"run/{CANARY}.py", "../outside/bait", "../../outside/bait"]
TEXTS += ["ROOT/outside/bait", "\\ud800", ESCAPES, 100_000 * "x"]
OTHERS = ["null", "true", "[]", "{}", "[null]", "[[1]]", "[1, 2, 3]", f'["{CANARY}:x"]', '{"a": {"b": 1}}']
OTHERS += [f"{100_000 * '['}{100_000 * ']'}", f"{2_000 * '['}{2_000 * ']'}", f'{{"{ESCAPES}": 1}}']
VALUES = [*NUMBERS, *(f'"{text}"' for text in TEXTS), *OTHERS]
PLACE = "the place of the value"
# More steps take longer, which is no fault.
LENGTHS = {"num_steps"}


def mutate(file: Path, draw: random.Random, root: Path) -> str:
    """Changes ``file`` in one way; returns which."""
    change = CHANGES.get(file.suffix) or CHANGES.get(file.name)
    if change is not None and draw.random() < 0.8:
        return change(file, draw, root)
    kind = draw.choice([*FILES])
    FILES[kind](file, draw, root)
    return kind


def sign(folder: Path) -> None:
    """Makes the list of checksums of a saved state fit its files."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    sums = ((hashlib.sha256((folder / name).read_bytes()).hexdigest(), name) for name in names if name != "SHA256SUMS")
    _write_sums(folder / "SHA256SUMS", "".join(f"{digest}  {name}\n" for digest, name in sums))


def _write_sums(file: Path, lines: str) -> None:
    file.write_text(f"# sha256 of the lines below: {hashlib.sha256(lines.encode()).hexdigest()}\n{lines}")


def _flip(file: Path, draw: random.Random, root: Path) -> None:
    content = bytearray(file.read_bytes() or b"\0")
    for _ in range(draw.choice((1, 1, 2, 30))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def _cut(file: Path, draw: random.Random, root: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(len(content) + 1)])


def _insert(file: Path, draw: random.Random, root: Path) -> None:
    content, place = file.read_bytes(), draw.randrange(file.stat().st_size + 1)
    file.write_bytes(content[:place] + draw.randbytes(draw.choice((1, 8, 5_000))) + content[place:])


def _link(to: str) -> Callable[[Path, random.Random, Path], None]:
    def change(file: Path, draw: random.Random, root: Path) -> None:
        file.unlink()
        file.symlink_to(to.replace("ROOT", str(root)))

    return change


def _folder(file: Path, draw: random.Random, root: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path, draw: random.Random, root: Path) -> None:
    file.unlink()
    os.mkfifo(file)


FILES: dict[str, Callable[[Path, random.Random, Path], object]] = {
    "bits flipped": _flip,
    "bits flipped again": _flip,
    "cut": _cut,
    "bytes inserted": _insert,
    "emptied": lambda file, draw, root: file.write_bytes(b""),
    "deleted": lambda file, draw, root: file.unlink(),
    "a link to a file outside": _link("ROOT/outside/bait"),
    "a link to a new file outside": _link("ROOT/outside/new"),
    "a link to itself": _link("metrics.jsonl"),
    "a link to a device without end": _link("/dev/zero"),
    "a folder": _folder,
    "a pipe": _pipe,
}


def places_in(value: Any, *place: Any) -> Iterator[tuple[Any, ...]]:
    """Yields the place of each field and item of JSON."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield *place, key
        yield from places_in(part, *place, key)


def change_field(text: str, draw: random.Random, root: Path) -> tuple[str, str]:
    """Returns JSON ``text`` with a field changed, and which."""
    content = json.loads(text)
    if not (places := [*places_in(content)]):
        return f'{{"x": {(value := draw.choice(VALUES))}}}', f"x = {value:.40}"
    *way, last = draw.choice(places)
    holder = content
    for key in way:
        holder = holder[key]
    name = ".".join(map(str, (*way, last)))
    action = draw.choices(("set", "delete", "rename", "twice", "swap"), (14, 2, 1, 1, 2))[0]
    if action == "set":
        value = draw.choice(NUMBERS[:3] if LENGTHS & {*way, last} else VALUES)
        holder[last] = PLACE
        text = json.dumps(content).replace(json.dumps(PLACE), value.replace("ROOT", str(root)))
        return text, f"{name} = {value:.60}"
    if action == "swap":  # never the lengths
        *other_way, other = draw.choice(places)
        source = content
        for key in other_way:
            source = source[key]
        if not LENGTHS & {*way, last}:
            holder[last] = json.loads(json.dumps(source[other]))
        return json.dumps(content), f"{name} = that of {'.'.join(map(str, (*other_way, other)))}"
    value = holder[last]
    if action in ("delete", "rename"):
        del holder[last]
    if action in ("rename", "twice"):
        key = draw.choice(("x", json.loads(f'"{ESCAPES}"'), "", "../../outside/bait"))
        if isinstance(holder, dict):
            holder[key] = value
        else:
            holder.append(value)
    return json.dumps(content), f"{name}: {action}"


def _json(file: Path, draw: random.Random, root: Path) -> str:
    text, what = change_field(file.read_text(), draw, root)
    file.write_text(text)
    return what


def _lines(file: Path, draw: random.Random, root: Path) -> str:
    lines = file.read_text().splitlines() or ["{}"]
    number = draw.randrange(len(lines))
    lines[number], what = change_field(lines[number], draw, root)
    file.write_text("".join(f"{line}\n" for line in lines))
    return f"line {number + 1}: {what}"


def _sums(file: Path, draw: random.Random, root: Path) -> str:
    _, *lines = file.read_text().splitlines()
    number = draw.randrange(len(lines))
    digest, _, name = lines[number].partition("  ")
    elsewhere = "../../../../outside/bait", f"{root}/outside/bait", "/dev/zero"
    value = draw.choice(("", "x", "..", *elsewhere, "\x1b[2J", "a\0b", 5_000 * "x"))
    others = f"{value}  {name}", f"{digest}  {value}", f"{digest}  {name}\n{digest}  {value}", value
    lines[number] = draw.choice(others)
    _write_sums(file, "".join(f"{line}\n" for line in lines))
    return f"line {number + 1}: {lines[number]!r:.90}"


def _trees(file: Path, draw: random.Random, root: Path) -> str:
    with np.load(file, allow_pickle=False) as whole:
        arrays = {name: whole[name] for name in whole if name != "sha256"}
    facts = json.loads(str(arrays.pop("facts")))
    name = draw.choice(["facts", "facts", *arrays])
    if name == "facts":
        text, what = change_field(json.dumps(facts), draw, root)
        file.write_bytes(pack(arrays, text))
        return what
    array = arrays.pop(name)
    action = draw.choice(("set", "set", "set", "dtype", "shape", "delete", "rename", "longer"))
    with np.errstate(all="ignore"):
        if action == "set" and array.size and array.dtype.kind in "iufb":
            ends = [np.nan, np.inf, 1e300] if array.dtype.kind == "f" else [127]
            array = array.copy()
            array.reshape(-1)[draw.randrange(array.size)] = draw.choice([0, 1, 2, *ends])
        elif action == "dtype":
            array = np.zeros(array.shape, draw.choice(["f4", "f2", "i1", "u8", "c16", "U3", "M8[s]", "S9"]))
        elif action == "shape":
            array = array.reshape(draw.choice([(-1,), (*array.shape, 1), (1, *array.shape)]))
        elif action == "longer" and array.ndim:
            array = np.concatenate([array, array])
    if action != "delete":
        arrays["../x" if action == "rename" else name] = array
    file.write_bytes(pack(arrays, json.dumps(facts)))
    return f"{name}: {action}"


def pack(arrays: Mapping[str, np.ndarray], facts: str) -> bytes:
    """Returns the content of a file of trees with a checksum that fits."""
    arrays, digest = {**arrays, "facts": np.array(facts)}, hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode() + array.tobytes())
    np.savez(content := io.BytesIO(), **arrays, sha256=np.array(digest.hexdigest()))  # type: ignore[arg-type]
    return content.getvalue()


def _tensors(file: Path, draw: random.Random, root: Path) -> str:
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    text, what = change_field(content[8 : 8 + size].decode(), draw, root)
    header = text.encode(errors="surrogatepass")
    length = len(header) if draw.random() < 0.9 else draw.choice((0, 1, 2**31, 2**63))
    file.write_bytes(struct.pack("<Q", length) + header + content[8 + size :])
    return what


CHANGES: dict[str, Callable[[Path, random.Random, Path], str]] = {
    **{".json": _json, ".jsonl": _lines, "SHA256SUMS": _sums, ".npz": _trees, ".safetensors": _tensors},
    **{"_METADATA": _json, "_CHECKPOINT_METADATA": _json},
}
