"""An extension of Griffe: examples in docstrings, from ``>>>`` to the next empty line, become blocks of code."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n *\S.*)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Puts fences around examples."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of ``obj`` before it is parsed."""
        if obj.docstring is not None:
            fenced = r"\1```pycon\n\g<0>\n\1```"
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)
