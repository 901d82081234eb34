from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nemo_war.config import StepTimePrior
from nemo_war.generation.step_time import StepLoad, StepTimeModel
from nemo_war.speculative import pricing
from nemo_war.speculative.pricing import DraftPricer


def pricer(max_running: int | None = None, **prior: float) -> DraftPricer:
    """A pricer that believes what it is told, and never probes."""
    fields = dict.fromkeys(StepTimePrior.model_fields, 0) | {"base": 20, "per_token": 0.01} | prior
    return DraftPricer(StepTimeModel(StepTimePrior(**fields)), max_running, doubt=0)


def choose(
    of: DraftPricer,
    survival: list[list[float]],
    critical: list[bool] | None = None,
    running: int | None = None,
) -> list[int]:
    table = np.array(survival, dtype=np.float32)
    lengths = np.full(len(table), table.shape[1], dtype=np.int32)
    running = running or len(table)
    chosen = of.choose(StepLoad(running, running), table, lengths, np.array(critical or [False] * len(table)))
    return chosen.tolist()


def test_in_a_memory_bound_step_almost_any_guess_is_worth_it() -> None:
    assert choose(pricer(), [[0.9, 0.5, 0.2, 0.05]]) == [4]


def test_in_a_saturated_step_nothing_is() -> None:
    saturated = pricer(base=0.1, per_token=1.0)
    assert choose(saturated, [[0.9, 0.8], [0.9, 0.7]]) == [0, 0]
    assert saturated.price > 0.9


def test_the_budget_goes_to_the_best_slots_of_the_whole_batch() -> None:
    assert choose(pricer(base=20, per_token=3), [[0.95, 0.9, 0.85], [0.3, 0.1, 0.05]]) == [3, 0]


def test_a_fixed_cost_of_speculating_must_be_earned() -> None:
    assert choose(pricer(speculating=0.0), [[0.2, 0.1]])[0] > 0
    assert choose(pricer(speculating=5.0), [[0.2, 0.1]]) == [0]


def test_each_request_that_rejection_sampling_slows_down_must_be_earned_too() -> None:
    assert choose(pricer(speculating_per_request=0.5), [[0.5]], running=1) == [1]
    assert choose(pricer(speculating_per_request=0.5), [[0.5]], running=64) == [0]


def test_critical_requests_may_spend_more() -> None:
    dear = {"base": 20.0, "per_token": 4.0}
    survival = [[0.25], [0.25], [0.25], [0.25]]
    assert choose(pricer(**dear), survival)[0] == 0
    chosen = choose(pricer(**dear), survival, critical=[True, False, False, False])
    assert chosen[0] >= chosen[1]
    assert choose(pricer(base=20.0, per_token=4.5), [[0.3], [0.9]], critical=[True, False])[0] == 1


def test_drafts_of_different_lengths_are_not_read_beyond_their_end() -> None:
    of = pricer()
    survival = np.array([[0.9, 0.8, 0.7], [0.9, 0.99, 0.99]], dtype=np.float32)
    chosen = of.choose(StepLoad(2, 2), survival, np.array([3, 1], dtype=np.int32), np.zeros(2, dtype=bool))
    assert chosen.tolist() == [3, 1]


def test_no_drafts_cost_nothing_and_divide_by_nothing() -> None:
    of = pricer()
    empty = np.zeros((2, 4), dtype=np.float32)
    assert of.choose(
        StepLoad(2, 2), empty, np.zeros(2, dtype=np.int32), np.zeros(2, dtype=bool)
    ).tolist() == [0, 0]


def test_once_off_a_gain_within_the_models_error_does_not_switch_it_on() -> None:
    of = pricer(per_token=0.01, speculating=1.0)
    slight = [[0.13]]  # 1.13 tokens in 21.01 ms against 1 in 20: +8 %
    assert choose(of, slight) == [1]
    assert choose(of, [[0.001]]) == [0]
    assert choose(of, slight) == [0]
    assert choose(of, [[0.5]]) == [1]


def run(of: DraftPricer, model: StepTimeModel, truth: dict[str, float], steps: int) -> list[int]:
    """Draft tokens of each step when steps really take what `truth` says."""
    real = StepTimeModel(StepTimePrior(**(dict.fromkeys(StepTimePrior.model_fields, 0) | truth)))
    drafted = []
    for _ in range(steps):
        drafted.append(sum(choose(of, [[0.7, 0.4, 0.2]] * 16)))
        load = StepLoad(16, 16 + drafted[-1], 0, drafted[-1])
        model.observe(load, real.predict(load))
    return drafted


DEAR = {"base": 30.0, "per_request": 3.0, "speculating": 20.0, "speculating_per_request": 2.0}
DEAR |= {"per_draft_token": 3.0}


def test_always_drafting_does_not_hide_what_drafting_costs() -> None:
    model = StepTimeModel(StepTimePrior(base=20, per_request=0, per_token=0.01, per_draft_token=0))
    always = DraftPricer(model, max_running=100)
    assert min(run(always, model, DEAR, 200)) > 0  # the model has put all of the cost on the requests
    drafted = run(DraftPricer(model), model, DEAR, 200)
    assert sum(map(bool, drafted[-100:])) <= 5


def test_never_drafting_does_not_hide_that_drafts_are_cheap() -> None:
    model = StepTimeModel(StepTimePrior(base=20, per_token=1, per_draft_token=10, speculating=50))
    drafted = run(DraftPricer(model), model, {"base": 30.0, "per_request": 1.0, "per_draft_token": 0.1}, 100)
    assert all(drafted[50:])


def test_a_probe_is_rare_where_both_kinds_of_step_are_known() -> None:
    model = StepTimeModel(StepTimePrior())
    of = DraftPricer(model)
    run(of, model, DEAR, 200)
    assert sum(map(bool, run(of, model, DEAR, 400))) <= 20


def test_promises_that_are_not_kept_make_it_ask_for_more() -> None:
    of = pricer(per_token=5.0)
    assert choose(of, [[0.5]]) == [1]
    for _ in range(50):
        of.settle(choose(of, [[0.9]])[0], 0)
    assert of.trust < 0.5
    assert choose(of, [[0.5]]) == [0]


def test_what_the_engine_did_not_verify_as_chosen_is_no_broken_promise() -> None:
    of = pricer()
    assert choose(of, [[0.9, 0.8]]) == [2]
    of.settle(1, 0)
    of.settle(0, 0)
    assert of.trust == 1


def test_a_forced_threshold_drafts_in_full_below_and_nothing_above() -> None:
    forced = pricer(max_running=4, base=0.1, per_token=1.0)
    assert choose(forced, [[0.1, 0.01]]) == [2]
    assert forced.wants(4)
    assert not forced.wants(5)


@given(
    st.lists(st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3), min_size=1, max_size=3),
    st.floats(0.1, 50),
    st.floats(0.001, 5),
    st.floats(0, 3),
)
def test_no_other_choice_of_draft_lengths_has_more_goodput(
    rows: list[list[float]], base: float, per_token: float, speculating: float
) -> None:
    survival = np.array([sorted(row, reverse=True) for row in rows], dtype=np.float32)
    of = pricer(base=base, per_token=per_token, speculating=speculating)
    chosen = choose(of, survival.tolist())

    def goodput(lengths: tuple[int, ...]) -> float:
        accepted = sum(float(survival[i, :n].sum()) for i, n in enumerate(lengths))
        time = base + per_token * (len(rows) + sum(lengths)) + speculating * (sum(lengths) > 0)
        return (len(rows) + accepted) / time

    best = max(goodput(lengths) for lengths in itertools.product(range(4), repeat=len(rows)))
    none = (0,) * len(rows)
    assert goodput(tuple(chosen)) >= best * 0.999 or (
        tuple(chosen) == none and best < goodput(none) * pricing._MARGIN_ON * 1.001
    )
