"""`war/*`: what a step did, from counters since the start."""

from __future__ import annotations

from pathlib import Path

from nemo_war.generation.nemo_rl.arms import is_on
from nemo_war.generation.nemo_rl.events import Events, noting
from nemo_war.generation.nemo_rl.metrics import Steps, scalars
from nemo_war.telemetry import log
from nemo_war.telemetry.records import JobReplicaRecord


def statistics(scale: int, epoch: int = 0) -> list[dict[str, float]]:
    one = {
        "epoch": epoch,
        "turns": 2 * scale,
        "prompt_tokens": 100 * scale,
        "cached_tokens": 50 * scale,
        "output_tokens": 30 * scale,
        "busy_seconds": 3.0 * scale,
        "drafts": 4 * scale,
        "draft_tokens": 20 * scale,
        "accepted_tokens": 8 * scale,
        "history_tokens": 7 * scale,
    }
    return [one, one | {"busy_seconds": 1.5 * scale}]


def test_a_step_is_what_the_counters_grew_by() -> None:
    steps = Steps(None)
    steps.take(statistics(1))
    told = scalars(steps.take(statistics(3, epoch=2)))
    assert told["war/turns"] == 8
    assert told["war/history_tokens"] == 42, "which is a state, not a count"
    assert told["war/prefix_hit_rate"] == 0.5
    assert told["war/acceptance_length"] == 3.0
    assert told["war/makespan_seconds"] == 6.0
    assert told["war/tokens_per_second"] == 120 / 6
    assert (told["war/active"], told["war/policy_epoch"]) == (1.0, 2.0)


def test_an_engine_without_a_drafter_and_a_step_without_turns_have_figures_too() -> None:
    told = scalars(Steps(None).take([{"epoch": 0}]))
    assert set(told.values()) == {0.0, 1.0}
    assert [name for name, value in told.items() if value] == ["war/active"]


def test_arms_alternate_by_policy_epoch_beginning_with_war() -> None:
    assert [is_on(epoch, 2) for epoch in range(6)] == [True, True, False, False, True, True]
    assert all(is_on(epoch, None) for epoch in range(6))
    steps = Steps(2)
    assert [scalars(steps.take(statistics(1, epoch)))["war/active"] for epoch in range(4)] == [1, 1, 0, 0]


def test_records_go_to_a_log_beside_nemo_rls_own(tmp_path: Path) -> None:
    events = Events()
    record = JobReplicaRecord(0, 1, 0, True, turns=3)
    events.append([record])  # nobody knows where the logs are yet: it is left out
    events.begin(tmp_path)
    events.append([record, record])
    assert log.read(tmp_path / "nemo_war" / log.FILE_NAME).records == (record, record)


def test_a_log_that_cannot_be_begun_costs_records_only(tmp_path: Path, capsys) -> None:
    (tmp_path / "nemo_war").write_text("in the way")
    events = Events()
    events.begin(tmp_path)
    events.append([JobReplicaRecord(0, 1, 0, True)])
    events.append([JobReplicaRecord(1, 1, 0, True)])
    assert capsys.readouterr().out.count("no event log") == 1


def test_the_folder_is_the_one_that_nemo_rl_chose(tmp_path: Path, monkeypatch) -> None:
    events = Events()
    monkeypatch.setattr("nemo_war.generation.nemo_rl.events.log", events)
    assert noting(lambda base: f"{base}/exp_001")(tmp_path) == f"{tmp_path}/exp_001"
    events.append([JobReplicaRecord(0, 1, 0, True)])
    assert (tmp_path / "exp_001/nemo_war" / log.FILE_NAME).exists()
