"""``python -m jaxnn`` is the ``jaxnn`` command."""

from jaxnn.cli import command

command()
