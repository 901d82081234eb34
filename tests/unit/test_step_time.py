from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_war.config import StepTimePrior
from nemo_war.generation.step_time import StepLoad, StepTimeModel

PRIOR = StepTimePrior()


def cpu(load: StepLoad) -> float:
    """A replica on one core, as measured: milliseconds."""
    verifying = (load.drafts > 0) * (2.0 + 2.5 * load.requests) + 0.7 * load.drafts
    return 25 + 3.5 * load.requests + 1.4 * load.tokens + verifying + 1.0 * load.context / 1000


def loads(count: int, seed: int = 0) -> list[StepLoad]:
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        requests = draw.randint(1, 16)
        drafts = draw.choice([0, draw.randint(1, 4 * requests)])
        prefill = draw.choice([0, 0, 0, draw.randint(1, 400)])
        made.append(StepLoad(requests, requests + drafts + prefill, 500 * requests, drafts))
    return made


def relative_error(model: StepTimeModel, truth, seed: int = 9) -> float:  # type: ignore[no-untyped-def]
    return float(np.median([abs(model.predict(load) / truth(load) - 1) for load in loads(200, seed)]))


def test_before_any_step_the_prior_is_believed() -> None:
    model = StepTimeModel(
        StepTimePrior(
            base=10,
            per_request=1,
            per_token=0.5,
            per_kilotoken=2,
            speculating=3,
            speculating_per_request=0.25,
            per_draft_token=0.5,
        )
    )
    assert model.predict(StepLoad(4, 6, 2000, 2)) == pytest.approx(10 + 4 + 3 + 4 + 3 + 1 + 1)


def test_a_wrong_prior_is_outweighed_within_a_few_hundred_steps() -> None:
    model = StepTimeModel(PRIOR)
    noise = random.Random(1)
    for load in loads(300):
        model.observe(load, cpu(load) * noise.gauss(1, 0.1))
    assert relative_error(model, cpu) < 0.06


def test_a_change_of_speed_is_followed() -> None:
    model = StepTimeModel(PRIOR)
    for load in loads(400):
        model.observe(load, cpu(load))
    for load in loads(1000, seed=2):
        model.observe(load, 2 * cpu(load))
    assert relative_error(model, lambda load: 2 * cpu(load)) < 0.05


def test_an_idle_moment_between_steps_does_not_spoil_the_model() -> None:
    model = StepTimeModel(PRIOR)
    for number, load in enumerate(loads(400)):
        model.observe(load, cpu(load) if number % 50 else 60_000.0)
    assert relative_error(model, cpu) < 0.35


def test_tokens_get_dearer_beyond_the_flat_part() -> None:
    def roofline(load: StepLoad) -> float:
        return 15 + max(0, load.tokens - 64) * 0.1

    model = StepTimeModel(PRIOR)
    draw = random.Random(3)
    for _ in range(600):
        requests = draw.randint(1, 128)
        drafts = draw.randint(0, requests)
        load = StepLoad(requests, requests + drafts, 0, drafts)
        model.observe(load, roofline(load))
    low = np.diff(model.with_drafts(StepLoad(4, 4), 40))[1:].mean()
    high = np.diff(model.with_drafts(StepLoad(120, 120), 40))[1:].mean()
    assert low < 0.03
    assert high > 0.07


def test_with_drafts_is_the_prediction_with_that_many_tokens_more() -> None:
    model = StepTimeModel(PRIOR)
    for load in loads(200):
        model.observe(load, cpu(load))
    for tokens in (3, 60, 64, 500):
        base = StepLoad(3, tokens, 900)
        times = model.with_drafts(base, 30)
        assert times[0] == pytest.approx(model.predict(base))
        for drafts in (1, 7, 30):
            assert times[drafts] == pytest.approx(model.predict(StepLoad(3, tokens + drafts, 900, drafts)))


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(0, 2000), st.integers(0, 10**6), st.floats(0.01, 1e5)),
        max_size=60,
    )
)
def test_whatever_was_measured_no_cost_is_negative_or_infinite(
    steps: list[tuple[int, int, int, float]],
) -> None:
    model = StepTimeModel(PRIOR)
    for requests, extra, context, milliseconds in steps:
        model.observe(StepLoad(requests, requests + extra, context, extra * (extra % 2)), milliseconds)
    times = model.with_drafts(StepLoad(4, 4, 1000), 50)
    assert np.isfinite(times).all()
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
