"""The studies of this repository: each is complete; activations and products compute what they say."""

import io
import json
import re

import jax
import numpy as np
import pytest
from articles.studies import activations, matmul
from matplotlib.figure import Figure

from jaxnn.bench import NotMeasured, Rows, Study, find_studies

STUDIES = find_studies()


@pytest.mark.parametrize("one", STUDIES.values(), ids=list(STUDIES))
def test_a_study_is_complete_and_draws_nothing_from_nothing(one: Study) -> None:
    assert one.title[-1] == "?" and len(one.method) > 40 and re.fullmatch(r"[a-z_]+", one.name)
    assert all(re.fullmatch(r"A\d+", claim) for claim in one.claims)
    for settings in (one.full, one.quick):
        assert settings.rounds >= 2
        json.dumps(one.definition(settings))
    assert one.definition(one.full) != one.definition(one.quick)
    assert all(found.quantity is None for found in one.findings(Rows())) and list(one.conclude({"CPU": Rows()})) == []
    figure = Figure(layout="constrained")
    one.draw({"CPU": Rows()}, figure)
    figure.savefig(io.BytesIO(), format="png")


def test_every_way_of_running_an_activation_computes_the_same() -> None:
    vector = np.linspace(-3, 3, 50, dtype=np.float32)
    for operation in activations.OPERATIONS:
        values = [activations.make_call(operation, form, vector, jax.devices()[0])() for form in activations.FORMS]
        for found in values[1:]:
            np.testing.assert_allclose(np.asarray(found), values[0], rtol=1e-5, atol=1e-6)


def test_the_error_of_a_precision_is_that_of_its_rounding() -> None:
    def error(name: str) -> float:
        return float(matmul._error(name, 128, "cpu", jax.devices()[0])["error"])  # type: ignore[arg-type]

    # Rounding to m bits is off by 2**-(m+1) at most, and by 0.4 of that on average; two factors, so √2 of it.
    assert 0.2 * 2**-8 < error("bfloat16") < 2**-8 and 0.2 * 2**-11 < error("float16") < 2**-11
    assert 1e-17 < error("float64") < 1e-14 and 1e-8 < error("float32") < 1e-6
    # Steps of 1/32 are off by 1/32/√12 each: 0.9 % of a standard deviation, in two factors 1.3 %.
    assert error("int8") == pytest.approx(0.0128, rel=0.1)


def test_precisions_that_a_device_lacks_are_not_measured() -> None:
    with pytest.raises(NotMeasured, match="CPUs do not have it in hardware"):
        matmul._begin("tf32", 8, "cpu", jax.devices()[0])
