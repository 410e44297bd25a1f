"""How a command line ends when something is wrong: one sentence on standard error, and a status."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from jaxnn.types import JaxnnError, TrainingError

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Turns the errors that jaxnn means for its user into a sentence and an exit; a defect keeps its traceback."""
    try:
        yield
    except JaxnnError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(FAILED if isinstance(error, TrainingError) else BAD_INPUT) from None
    except KeyboardInterrupt:
        print("interrupted at once; what was saved before is kept, see `jaxnn runs`", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
