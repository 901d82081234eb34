"""Predicted acceptance follows what is accepted."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_war.speculative import calibration as calibrations
from nemo_war.speculative.history import SuffixHistory

CELL = {"kind": 1, "length": 7, "agreement": 0.95, "support": 3, "place": 2, "form": 200}


def predict(calibration: calibrations.Calibration, which: int) -> float:
    return calibrations.acceptance(calibration, which)


def cell(**changes: object) -> int:
    return calibrations.cell_of(*{**CELL, **changes}.values())


def teach(calibration: calibrations.Calibration, which: int, rate: float, trials: int, seed: int = 0) -> None:
    for success in np.random.default_rng(seed).random(trials) < rate:
        calibrations.learn(calibration, which, predict(calibration, which), bool(success))


def test_a_cell_converges_to_its_rate():
    calibration = calibrations.new_calibration()
    teach(calibration, cell(), 0.8, 3000)
    assert predict(calibration, cell()) == pytest.approx(0.8, abs=0.04)


def test_a_cell_without_trials_leans_on_its_neighbours():
    calibration = calibrations.new_calibration()
    teach(calibration, cell(place=2), 0.1, 500)
    before = predict(calibrations.new_calibration(), cell(place=4))
    assert predict(calibration, cell(place=4)) < before / 2


def test_a_cell_follows_a_drift():
    calibration = calibrations.new_calibration()
    teach(calibration, cell(), 0.9, 20_000)
    calibrations.soften(calibration)
    teach(calibration, cell(), 0.2, 1000)
    assert predict(calibration, cell()) < 0.4


def test_softening_keeps_rates():
    calibration = calibrations.new_calibration()
    teach(calibration, cell(), 0.7, 1500)
    before = predict(calibration, cell())
    calibrations.soften(calibration)
    assert predict(calibration, cell()) == pytest.approx(before, abs=0.02)


def test_longer_matches_weigh_more_before_anything_was_learned():
    trust = calibrations.new_calibration().trust
    for kind in range(calibrations.KINDS):
        weights = [
            calibrations.weight_of(trust, kind, length, 0) for length in range(calibrations.MAX_MATCH + 1)
        ]
        assert weights == sorted(weights)


def test_every_cell_fits_its_table():
    calibration = calibrations.new_calibration()
    top = cell(kind=11, length=999, agreement=1.0, support=999, place=999, form=256)
    assert top >> 24 == len(calibration.detail) - 1
    assert (top >> 8) & 65535 == len(calibration.outline) - 1
    assert top & 255 == len(calibration.sketch) - 1
    assert cell(kind=0, length=0, agreement=0.0, support=0, place=0, form=0) == 0


def test_a_request_whose_drafts_keep_failing_is_believed_less_than_others():
    calibration, failing, sure = calibrations.new_calibration(), cell(form=0), cell(form=256)
    for _ in range(200):
        calibrations.learn(calibration, sure, 0.5, True)
        calibrations.learn(calibration, failing, 0.5, False)
    elsewhere = {"length": 2, "support": 1}
    assert predict(calibration, cell(form=0, **elsewhere)) < predict(calibration, cell(form=256, **elsewhere))
    assert predict(calibration, failing) < predict(calibration, sure)


def test_the_form_falls_with_wrong_drafts_and_rises_with_right_ones():
    form = calibrations.FIRST_FORM
    for _ in range(20):
        form = calibrations.form_after(form, False)
    assert form < calibrations.FULL_FORM // calibrations.FORMS
    for _ in range(20):
        form = calibrations.form_after(form, True)
    assert form >= calibrations.FULL_FORM * 3 // 4


def test_predictions_are_reliable_on_a_text_that_copies_with_errors():
    rng = np.random.default_rng(0)
    history = SuffixHistory(100_000, 8)
    base = rng.integers(0, 2000, 200)
    for number in range(40):
        text = np.where(rng.random(200) < 0.1, rng.integers(0, 2000, 200), base).astype(np.int32)
        slot = np.array([history.begin(f"t{number}", "g", 0, text[:3])], np.int32)
        at = 3
        while at < 200:
            history.draft(slot, np.full(1, 8, np.int32), 0)
            count = int(rng.integers(1, 6))
            history.extend(
                slot, text[None, at : at + count], np.array([len(text[at : at + count])], np.int32)
            )
            at += count
        history.end(int(slot[0]))
    curve = history.reliability()
    assert sum(count for _, _, count in curve) > 3000
    assert all(
        predicted == pytest.approx(observed, abs=0.1) for predicted, observed, count in curve if count > 200
    )
