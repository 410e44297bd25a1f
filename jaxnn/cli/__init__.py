"""Command lines: ``jn.main(experiment)`` for scripts, and the ``jaxnn`` command."""

from collections.abc import Sequence

from jaxnn.cli._flags import parse_run, parse_sweep
from jaxnn.cli._process import ClusterOptions, enable_compile_cache, exit_on_user_error, processes, use_all_cores
from jaxnn.cli._script import COMMANDS, main
from jaxnn.cli._text_command import text_command

__all__ = ["command", "main", "text_command"]


def command(argv: Sequence[str] | None = None) -> None:
    """Runs the ``jaxnn`` command; ``argv`` is by default that of the process. Raises SystemExit as `main`."""
    from jaxnn.cli._command import run_command  # scripts do not need it

    run_command(argv)
