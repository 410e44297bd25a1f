"""``python script.py decide``: whether a config with changed fields, or another script's experiment, is better."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import traceback
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from jaxnn._disk import write_bytes
from jaxnn._fields import with_fields
from jaxnn._json import jsonable, leaf_fields
from jaxnn._signals import RESUMABLE
from jaxnn._text import drop_output, flush_output, is_of_output, say_error
from jaxnn.cli._flags import field_value, parse_run
from jaxnn.cli._process import use_all_cores
from jaxnn.decisions import DecideOptions, Decision, DecisionInterrupted, decide
from jaxnn.engine import RunOptions
from jaxnn.types import ConfigError, Experiment, JaxnnError, suggest

NOT_DECIDED = 4  # the status after an error: 0 to 3 are verdicts
_ABOUT = (
    "Decides whether the config with the flags' fields is better than the one without them, by pairs of seeds. "
    "Exits with 0 keep, 1 discard, 2 no difference, 3 undecided, 4 error. Flags of decide: --metric, --alpha, "
    "--min-effect (the smallest difference that matters), --max-seeds, --max-steps, --budget, --test ranks, --session "
    "NAME (bounds false discoveries), --both FIELD=VALUE (of A and B), --json, --picture FILE."
)


def decide_command(
    experiment: Experiment[Any],
    arguments: Sequence[str],
    defaults: RunOptions | None,
    other: Experiment[Any] | None = None,
) -> Decision:
    """Prints whether B is better than ``experiment``, which is A, and exits with the verdict's code unless it is keep.

    B is the ``other`` experiment, or A with the fields of the flags.
    """
    use_all_cores()
    with apart_from_verdicts():
        _, options = _parsed(experiment, arguments, defaults)
        base = with_both(experiment, options.both)
        changed, options = _parsed(base, arguments, defaults)
        if options.picture is not None and not options.picture.absolute().parent.is_dir():
            raise ConfigError(f"the folder of the picture {options.picture} does not exist: create it.")
        base = base.replace(seed=changed.config.seed)  # the first seed of both
        if other is None:
            found = decide(base, changed, None, options)
        elif changed.config != base.config:
            raise ConfigError("flags of the config change neither script's experiment: set fields in it, or --both.")
        else:
            found = decide(base, with_both(other, options.both), None, options)
        if options.picture is not None:
            try:
                found.plot().savefig(drawn := io.BytesIO(), format=options.picture.suffix[1:] or "png")
            except ValueError as error:
                raise ConfigError(f"the picture {options.picture} cannot be drawn ({error}): ask for .png.") from error
            write_bytes(options.picture, drawn.getvalue())
        try:
            print(json.dumps(jsonable(found.as_json())) if options.json else found)
            flush_output()
        except OSError as error:
            if not is_of_output(error):
                raise
            drop_output()  # as of `head`: the verdict is known
    if found.exit_code:
        raise SystemExit(found.exit_code)
    return found


def _parsed(
    experiment: Experiment[Any], arguments: Sequence[str], defaults: RunOptions | None
) -> tuple[Experiment[Any], DecideOptions]:
    config, options, _ = parse_run(experiment, arguments, defaults, _ABOUT, DecideOptions, "decide")
    return dataclasses.replace(experiment, config=config), options


def with_both(experiment: Experiment[Any], words: Sequence[str]) -> Experiment[Any]:
    """The experiment with fields of the words of ``--both``, such as ``num_steps=500``."""
    values = dict[str, Any]()
    fields = [*leaf_fields(experiment.config)]
    known = {key: (name, owner) for name, owner in fields for key in (name, name.rpartition(".")[2])}
    for word in words:
        flag, equals, text = word.partition("=")
        if not equals or (flag := flag.replace("-", "_")) not in known:
            raise ConfigError(f"--both {word}: write FIELD=VALUE; {suggest(flag, [*known])}.")
        name, owner = known[flag]
        values[name] = field_value(flag, typing.get_type_hints(type(owner))[name.rpartition(".")[2]], text)
    return dataclasses.replace(experiment, config=with_fields(experiment.config, values))


@contextlib.contextmanager
def apart_from_verdicts() -> Iterator[None]:
    """Ends with a status of its own after an error or a defect, since 1 to 3 are verdicts."""
    try:
        yield
    except DecisionInterrupted as error:
        say_error(f"error: {error}")
        raise SystemExit(RESUMABLE) from None
    except JaxnnError as error:
        say_error(f"error: {error}")
        raise SystemExit(NOT_DECIDED) from None
    except SystemExit as error:  # of the parser, which has printed the reason
        raise SystemExit(NOT_DECIDED if error.code == 2 else error.code) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(NOT_DECIDED) from None
