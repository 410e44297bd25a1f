"""``python -m jaxnn`` is the ``jaxnn`` command."""

from jaxnn.cli.app import main

main()
