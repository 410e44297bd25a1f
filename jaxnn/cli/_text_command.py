"""The command of a script that writes text by the language model of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxnn import data, models
from jaxnn.engine import load_data
from jaxnn.optim import evaluation_state
from jaxnn.run import Run
from jaxnn.types import ConfigError, printable


def text_command(network: Callable[[Any], Any]) -> Callable[..., None]:
    """Returns a command for `main` that prints a text by the language model ``network(config)`` of a run.

    ``python script.py generate RUN --prompt "To be" --num-tokens 200 --temperature 0.8 --seed 1``; further flags are
    ``--top-k`` and ``--top-p`` (`jaxnn.models.generate`). The vocabulary is that of the run's data, ``class_names``.
    When its context is full, the model continues from the last half; one without a cache from as many as in training.

    >>> generate = jn.text_command(lambda config: jn.models.GPT(65, max_length=config.length))
    >>> jn.main(experiment, commands={"generate": generate}, at_end="generate")  # doctest: +SKIP
    """

    def generate(
        run: Run,
        prompt: str = "\n",
        num_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> None:
        """Prints a text that continues the prompt, token by token; a temperature of 0 takes the most likely ones."""
        if not prompt:
            raise ConfigError("--prompt is empty: give one character or more, such as the default, a line end.")
        splits, model, state = load_data(run.experiment), network(run.config), evaluation_state(run.state)
        vocabulary, window = splits.class_names, splits.train.as_batch(splits.train.read(np.arange(1))).inputs
        tokens = models.stream(
            model,
            {"params": state.params, **state.model_state},
            data.encode_text(prompt, vocabulary)[None],
            num_tokens=num_tokens,
            key=jax.random.key(seed),
            overlap=(getattr(model, "context_length", None) or 2) // 2,
            context=None if hasattr(model, "init_cache") else window.shape[1],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        print(printable(prompt), end="")
        for token in tokens:
            print(printable(data.decode_text(token, vocabulary)), end="", flush=True)
        print()

    return generate
