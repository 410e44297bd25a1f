"""Command lines: ``jn.main(experiment)`` for scripts, and the ``jaxnn`` command."""

from jaxnn.cli.script import main as main
