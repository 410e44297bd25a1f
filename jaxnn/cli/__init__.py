"""Command lines: ``jn.main(experiment)`` for scripts, and the ``jaxnn`` command."""

from __future__ import annotations

from collections.abc import Sequence

from jaxnn.cli._process import MOST_DEVICES as MOST_DEVICES
from jaxnn.cli._process import ClusterOptions as ClusterOptions
from jaxnn.cli._process import enable_compile_cache as enable_compile_cache
from jaxnn.cli._process import exit_on_user_error as exit_on_user_error
from jaxnn.cli._process import processes as processes
from jaxnn.cli._process import use_all_cores as use_all_cores
from jaxnn.cli._script import COMMANDS as COMMANDS
from jaxnn.cli._script import main as main
from jaxnn.cli._script import parse_run as parse_run
from jaxnn.cli._script import parse_sweep as parse_sweep


def command(argv: Sequence[str] | None = None) -> None:
    """Runs the ``jaxnn`` command; ``argv`` is by default that of the process. Raises SystemExit as `main`."""
    from jaxnn.cli._command import run_command  # scripts do not need it

    run_command(argv)
