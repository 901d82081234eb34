"""The proposer against a double of vLLM's model runner: only vLLM's interface is faked."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_war.config import HistoryConfig, SpeculativeConfig, WarConfig
from nemo_war.errors import UserError
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.embedded.replica import Replica
from nemo_war.generation.extension import WarExtension
from nemo_war.generation.memory_file import memory_file
from nemo_war.metadata import TurnMetadata
from nemo_war.speculative import proposer as proposers
from nemo_war.speculative.archive import encode
from nemo_war.speculative.history import SuffixHistory
from nemo_war.speculative.proposer import SuffixProposer

MAX_MODEL_LEN = 256
VOCABULARY = 1000
EOS = 2
PATTERN = [11, 12, 13, 14, 15, 16, 17, 18]


@dataclass
class Runner:
    """What the proposer reads of vLLM's model runner, driven by hand."""

    proposer: SuffixProposer
    requests: dict[str, Any] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    text: dict[str, list[int]] = field(default_factory=dict)
    scheduled: dict[str, list[int]] = field(default_factory=dict)

    @property
    def query_start_loc(self) -> Any:
        tokens = [1 + len(self.scheduled.get(row, [])) for row in self.rows]
        return SimpleNamespace(np=np.concatenate([[0], np.cumsum(tokens)]))

    @property
    def input_batch(self) -> Any:
        return SimpleNamespace(
            req_ids=self.rows, spec_token_ids=[self.scheduled.get(row, []) for row in self.rows]
        )

    def add(
        self,
        request: str,
        prompt: list[int],
        *,
        trajectory: str | None = None,
        max_tokens: int = 64,
        **more: Any,
    ) -> None:
        metadata = TurnMetadata(trajectory or request, "g", learn=more.pop("learn", True))
        params = SimpleNamespace(
            extra_args=more.pop("extra_args", metadata.to_extra_args()),
            max_tokens=max_tokens,
            min_tokens=more.pop("min_tokens", 0),
            stop_token_ids=more.pop("stop_token_ids", []),
            ignore_eos=more.pop("ignore_eos", False),
            all_stop_token_ids={EOS},
        )
        assert not more
        self.requests[request] = SimpleNamespace(sampling_params=params, num_prompt_tokens=len(prompt))
        self.rows.append(request)
        self.text[request] = list(prompt)

    def leave(self, request: str, *, finished: bool = True) -> None:
        self.rows.remove(request)
        self.scheduled.pop(request, None)
        if finished:
            del self.requests[request]

    def step(self, sampled: dict[str, list[int]]) -> dict[str, list[int]]:
        """One engine step: what each row sampled; drafts come back and count as scheduled."""
        for request, tokens in sampled.items():
            self.text[request] += tokens
        table = np.zeros((len(self.rows), MAX_MODEL_LEN), np.int32)
        lengths = np.zeros(len(self.rows), np.int32)
        for row, request in enumerate(self.rows):
            tokens = self.text[request][:MAX_MODEL_LEN]
            table[row, : len(tokens)], lengths[row] = tokens, len(tokens)
        drafts = self.proposer.propose([sampled.get(request, []) for request in self.rows], lengths, table)
        self.scheduled = dict(zip(self.rows, drafts, strict=True))
        return self.scheduled


def make(monkeypatch: pytest.MonkeyPatch, rank: int = 0, **settings: Any) -> Runner:
    monkeypatch.setattr("nemo_war.compat.apply_to_engine", lambda: ())
    settings = {"max_running": 64} | settings  # the price depends on time, and these tests must not
    speculative = SpeculativeConfig(max_draft_tokens=6, history=HistoryConfig(max_tokens=8192), **settings)
    config = SimpleNamespace(
        additional_config={proposers.SETTINGS: speculative.model_dump()},
        speculative_config=SimpleNamespace(num_speculative_tokens=6),
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN, get_vocab_size=lambda: VOCABULARY),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2),
    )
    proposer = SuffixProposer(config)
    runner = Runner(proposer)
    proposer.attach(runner)
    return runner


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    return make(monkeypatch)


def test_a_repeating_context_is_drafted_onwards(runner: Runner) -> None:
    runner.add("a", PATTERN * 4)
    draft = runner.step({"a": [PATTERN[0]]})["a"]
    assert draft == PATTERN[1 : 1 + len(draft)]
    assert draft


def test_a_sibling_drafts_from_a_finished_trajectory(runner: Runner) -> None:
    runner.add("a", [1, 5, 6, 7])
    for token in PATTERN:
        runner.step({"a": [token]})
    runner.leave("a")
    runner.add("b", [1, 5, 6, 7])
    draft = runner.step({"b": PATTERN[:3]})["b"]
    assert draft == PATTERN[3 : 3 + len(draft)]
    assert draft


def test_a_row_whose_prompt_is_not_complete_gets_no_draft(runner: Runner) -> None:
    runner.add("a", PATTERN * 4)
    runner.add("b", PATTERN * 4)
    drafts = runner.step({"a": [PATTERN[0]]})
    assert drafts["b"] == []
    assert drafts["a"]


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_draft_leaves_room_for_the_token_that_is_always_sampled(runner: Runner, left: int) -> None:
    runner.add("a", PATTERN * 4, max_tokens=left + 1)
    assert len(runner.step({"a": [PATTERN[0]]})["a"]) == left - 1


def test_a_draft_never_passes_the_model_length(runner: Runner) -> None:
    prompt = (PATTERN * 40)[: MAX_MODEL_LEN - 4]
    runner.add("a", prompt)
    follow = PATTERN[(MAX_MODEL_LEN - 4) % len(PATTERN)]
    assert len(runner.step({"a": [follow]})["a"]) <= 2


def test_tokens_behind_a_stop_token_are_neither_learned_nor_drafted_from(runner: Runner) -> None:
    runner.add("a", [1, 5, 6, 7])
    assert runner.step({"a": [21, EOS, 31, 32]})["a"] == []
    assert runner.proposer.statistics()["history_tokens"] == 6


def test_a_stop_token_counts_only_from_min_tokens_on_and_unless_ignored(runner: Runner) -> None:
    runner.add("a", [1, 5, 6, 7], min_tokens=4)
    runner.step({"a": [EOS, 21]})
    runner.add("b", [1, 5, 6, 8], ignore_eos=True)
    runner.step({"a": [], "b": [EOS, 21]})
    assert runner.proposer.statistics()["history_tokens"] == 12


def test_tokens_beyond_max_tokens_are_not_learned(runner: Runner) -> None:
    runner.add("a", [1, 5, 6, 7], max_tokens=2)
    assert runner.step({"a": [21, 22, 23]})["a"] == []
    assert runner.proposer.statistics()["history_tokens"] == 6


def test_rows_may_be_permuted_between_steps(runner: Runner) -> None:
    runner.add("a", PATTERN * 3)
    runner.add("b", [40 + token for token in PATTERN] * 3)
    runner.step({"a": [PATTERN[0]], "b": [40 + PATTERN[0]]})
    runner.rows.reverse()
    drafts = runner.step({"a": [PATTERN[1]], "b": [40 + PATTERN[1]]})
    assert drafts["a"][0] == PATTERN[2]
    assert drafts["b"][0] == 40 + PATTERN[2]


def test_a_preempted_request_comes_back_without_being_learned_twice(runner: Runner) -> None:
    runner.add("a", PATTERN * 3)
    runner.step({"a": [PATTERN[0]]})
    before = runner.proposer.statistics()["history_tokens"]
    runner.leave("a", finished=False)
    runner.add("b", [1, 2, 3, 4])
    runner.step({"b": [9]})
    runner.rows.append("a")
    runner.step({"b": [9], "a": []})
    runner.step({"b": [9], "a": [PATTERN[1]]})
    assert runner.proposer.statistics()["history_tokens"] == before + 1 + 4 + 3
    runner.proposer.history.check_integrity()


def test_an_aborted_request_frees_its_place(runner: Runner) -> None:
    for number in range(2000):  # far more than can be live at once
        runner.add(f"a{number}", [1, 2, 3, number + 10])
        runner.step({f"a{number}": [7]})
        runner.leave(f"a{number}")
    runner.add("b", PATTERN * 4)
    assert runner.step({"b": [PATTERN[0]]})["b"]
    runner.proposer.history.check_integrity()


def test_two_requests_at_once_in_the_name_of_one_trajectory_do_not_share_a_place(runner: Runner) -> None:
    runner.add("a", PATTERN * 3, trajectory="t")
    runner.add("b", PATTERN * 3, trajectory="t")
    runner.step({"a": [PATTERN[0]], "b": [PATTERN[0]]})
    runner.leave("a")
    runner.add("c", [1, 2, 3, 4], trajectory="other")
    drafts = runner.step({"b": [PATTERN[1]], "c": [9]})
    assert drafts["b"][0] == PATTERN[2]
    assert runner.proposer.statistics()["errors"] == 0
    runner.proposer.history.check_integrity()


def test_validation_turns_are_forgotten(runner: Runner) -> None:
    runner.add("v", PATTERN * 3, learn=False)
    runner.step({"v": [PATTERN[0]]})
    runner.leave("v")
    runner.add("b", [1, 2, 3])
    runner.step({"b": [4]})
    assert runner.proposer.statistics()["history_tokens"] == 4


def test_a_request_without_metadata_drafts_for_itself_only(runner: Runner) -> None:
    runner.add("a", PATTERN * 4, extra_args=None)
    assert runner.step({"a": [PATTERN[0]]})["a"]
    runner.leave("a")
    runner.add("b", [1, 2, 3])
    runner.step({"b": [4]})
    assert runner.proposer.statistics()["history_tokens"] == 4


def test_what_was_verified_is_counted_with_acceptance(runner: Runner) -> None:
    runner.add("a", PATTERN * 4)
    draft = runner.step({"a": [PATTERN[0]]})["a"]
    runner.step({"a": [*draft[:2], 99]})
    counted = runner.proposer.statistics()
    assert (counted["drafts"], counted["draft_tokens"], counted["accepted_tokens"]) == (1, len(draft), 2)
    assert (counted["engine_steps"], counted["speculating_steps"]) == (2, 1)


def test_accepted_tokens_behind_the_end_of_the_output_count_as_wasted(runner: Runner) -> None:
    runner.add("a", PATTERN * 4, stop_token_ids=[PATTERN[2]])
    draft = runner.step({"a": [PATTERN[0]]})["a"]
    assert len(draft) >= 3
    runner.step({"a": [*draft, 99]})
    assert runner.proposer.statistics()["accepted_tokens"] == 2


def test_nothing_is_divided_or_counted_when_no_draft_was_made(runner: Runner) -> None:
    runner.add("a", [1, 2, 3])
    runner.step({"a": [4]})
    runner.step({"a": [5]})
    counted = runner.proposer.statistics()
    assert (counted["drafts"], counted["accepted_tokens"], counted["speculating_steps"]) == (0, 0, 0)


def test_above_the_forced_load_nothing_is_drafted_and_everything_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make(monkeypatch, max_running=1)
    runner.add("a", PATTERN * 4)
    runner.add("b", PATTERN * 4)
    assert runner.step({"a": [PATTERN[0]], "b": [PATTERN[0]]}) == {"a": [], "b": []}
    runner.leave("b")
    assert runner.step({"a": [PATTERN[1]]})["a"]


def test_switched_off_it_drafts_nothing(runner: Runner) -> None:
    runner.proposer.enabled = False
    runner.add("a", PATTERN * 4)
    assert runner.step({"a": [PATTERN[0]]})["a"] == []


def test_an_error_while_drafting_is_counted_and_decoding_goes_on(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.add("a", PATTERN * 4)
    with monkeypatch.context() as broken:
        broken.setattr(runner.proposer.history, "draft", lambda *_: 1 / 0)
        assert runner.step({"a": [PATTERN[0]]}) == {"a": []}
    assert runner.proposer.statistics()["errors"] == 1
    assert runner.step({"a": [PATTERN[1]]})["a"]


def test_a_proposer_that_was_never_attached_counts_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make(monkeypatch)
    runner.proposer._runner = None
    runner.add("a", PATTERN * 4)
    assert runner.step({"a": [PATTERN[0]]}) == {"a": []}
    assert runner.proposer.statistics()["errors"] == 1


def test_the_history_can_be_emptied_while_requests_run(runner: Runner) -> None:
    runner.add("a", PATTERN * 4)
    runner.step({"a": [PATTERN[0]]})
    runner.proposer.clear_history()
    assert runner.step({"a": [PATTERN[1]]})["a"], (
        "the running turn entered the new history with its whole text"
    )
    runner.proposer.history.check_integrity()


def test_a_final_length_from_the_host_cuts_what_a_stop_string_ended(runner: Runner) -> None:
    runner.add("a", [1, 5, 6, 7])
    runner.step({"a": [21, 22, 23]})
    runner.leave("a")
    runner.proposer.commit({"a": 5, "unknown": 3})
    assert runner.proposer.statistics()["history_tokens"] == 5


def test_history_survives_a_new_epoch(runner: Runner) -> None:
    runner.add("a", PATTERN * 4)
    runner.step({"a": [PATTERN[0]]})
    before = runner.proposer.statistics()["history_tokens"]
    runner.proposer.advance_epoch(1)
    assert runner.proposer.statistics()["history_tokens"] == before


def test_a_rank_whose_drafts_do_not_count_makes_none_and_learns_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make(monkeypatch, rank=1)
    runner.add("a", PATTERN * 4)
    assert runner.step({"a": [PATTERN[0]]}) == {"a": []}
    assert runner.proposer.statistics()["history_tokens"] == 0
    assert runner.proposer.statistics()["engine_steps"] == 0


def test_a_history_of_an_earlier_run_is_drafted_from(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    runner.add("a", [1, 5, 6, 7])
    for token in PATTERN:
        runner.step({"a": [token]})
    path = str(tmp_path / "replica-0.suffixes")
    runner.proposer.history.save(path)
    later = make(monkeypatch)
    assert later.proposer.restore(path, empty_if_damaged=False) == 1
    later.add("b", [1, 5, 6, 7])
    assert later.step({"b": PATTERN[:3]})["b"]


def test_a_damaged_history_is_refused_or_left_out_as_configured(runner: Runner, tmp_path: Any) -> None:
    path = tmp_path / "replica-0.suffixes"
    path.write_bytes(b"junk")
    with pytest.raises(UserError, match="not a suffix history"):
        runner.proposer.restore(str(path), empty_if_damaged=False)
    assert runner.proposer.restore(str(path), empty_if_damaged=True) == 0


def test_another_replica_learns_the_text_up_to_where_the_host_says_it_ends(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make(monkeypatch)
    runner.add("a", [1, 5, 6, 7])
    runner.step({"a": PATTERN})
    runner.leave("a")  # over, and not seen by the proposer yet
    with memory_file("test") as file:
        assert runner.proposer.export_history(file.path, {"a": 10, "unknown": 3}) == 1
        assert other.proposer.import_history(file.path) == 1
        assert other.proposer.import_history(file.path) == 0
    assert other.proposer.statistics()["history_tokens"] == 10
    other.add("b", [1, 5, 6, 7])
    assert other.step({"b": PATTERN[:3]})["b"] == PATTERN[3:6]


async def test_histories_go_from_replica_to_replica_through_their_workers(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but Ray and vLLM's own call between a replica and its worker."""

    class Local(Replica):
        worker: WarExtension

        async def call(self, method: str, *arguments: Any) -> Any:
            return getattr(self.worker, method)(*arguments)

    replicas = [Local(number, EngineSpec("/m", {}, WarConfig())) for number in range(2)]
    for replica, each in zip(replicas, (runner, make(monkeypatch)), strict=True):
        replica.worker = WarExtension()
        replica.worker.model_runner = SimpleNamespace(drafter=each.proposer)
    runner.add("a", [1, 5, 6, 7])
    runner.step({"a": PATTERN})
    blob = await replicas[0].export_history({"a": 12})
    assert blob is not None
    assert (blob.dtype, blob.ndim) == (np.uint8, 1)
    blob.flags.writeable = False  # as Ray's views are
    assert await replicas[1].import_history(blob) == 1
    assert await replicas[1].import_history(blob) == 0
    assert await replicas[1].export_history({"unknown": 3}) is None
    stock = Replica(0, EngineSpec("/m", {}, None))
    assert (await stock.export_history({"a": 12}), await stock.import_history(blob)) == (None, 0)


def test_a_turn_that_is_over_does_not_keep_a_longer_text_of_its_trajectory_out(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make(monkeypatch)
    for each, prompt in ((runner, [1, 5, 6, 7]), (other, [1, 5, 6, 7, *PATTERN, 8])):
        each.add("a", prompt)
        each.step({"a": PATTERN})
    runner.leave("a")
    with memory_file("test") as file:
        other.proposer.export_history(file.path, None)
        assert runner.proposer.import_history(file.path) == 1
    assert runner.proposer.statistics()["history_tokens"] == 4 + 2 * len(PATTERN) + 1
    runner.proposer.history.check_integrity()


def test_what_another_model_sampled_is_refused(runner: Runner, tmp_path: Any) -> None:
    path = tmp_path / "foreign"
    foreign = SuffixHistory(1024, 4)
    foreign.end(foreign.begin("a", "g", 0, np.array([VOCABULARY], np.int32)))
    path.write_bytes(encode(foreign.export_sequences()))
    with pytest.raises(UserError, match="beyond this model's vocabulary"):
        runner.proposer.import_history(str(path))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="damaged"):
        runner.proposer.import_history(str(path))
    assert runner.proposer.statistics()["history_tokens"] == 0


def test_nothing_to_tell_leaves_the_file_empty(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = make(monkeypatch, rank=1)
    with memory_file("test") as file:
        assert runner.proposer.export_history(file.path, {"unknown": 3}) == 0
        assert idle.proposer.export_history(file.path, None) == 0
        assert idle.proposer.import_history(file.path) == 0
        assert len(file.read()) == 0


def test_a_disk_that_is_full_is_counted_and_the_run_goes_on(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def fail(path: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(runner.proposer.history, "save", fail)
    runner.proposer.save(str(tmp_path / "replica-0.suffixes"))
    assert runner.proposer.statistics()["errors"] == 1


def test_what_was_learned_is_saved_and_gone_on_with(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    runner.add("a", [1, 5, 6, 7])
    for token in PATTERN:
        runner.step({"a": [token]})
    stem = str(tmp_path / "replica-0")
    runner.proposer.save_learned(stem)
    later = make(monkeypatch)
    later.proposer.advance_epoch(3)
    later.proposer.restore_learned(stem)
    assert later.proposer.history.export_sequences().trajectories == ("a",)
    assert later.proposer.step_time.steps == runner.proposer.step_time.steps > 0
    later.add("b", [1, 5, 6, 7])
    assert later.step({"b": PATTERN[:3]})["b"]
    with pytest.raises(UserError, match=r"absent\.suffixes"):
        later.proposer.restore_learned(str(tmp_path / "absent"))


def test_a_rank_whose_drafts_do_not_count_writes_and_reads_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    other = make(monkeypatch, rank=1).proposer
    other.save_learned(str(tmp_path / "replica-0"))
    other.restore_learned(str(tmp_path / "replica-0"))
    assert list(tmp_path.iterdir()) == []
