"""What speculation does to a real engine's speed, against stock vLLM and its own suffix decoding.

Four engines on one core each, SmolLM2 at temperature 1, the same seeded prompts and the
same number of output tokens for all; they take turns, one cell (set x batch) at a time,
so that drift of the machine hits all alike. Ratios are medians over repeats of paired
times; above 1 means ours is faster.

  plain   stock vLLM at its own defaults
  suffix  stock vLLM, `method: suffix` (needs arctic-inference; left out where it is missing)
  floor   our seam (custom_class proposer, synchronous scheduling) with a proposer that never drafts
  ours    WAR's proposer, priced by load

The last line is JSON: ratio_vs_plain, ratio_vs_suffix, ratio_vs_floor, floor_vs_plain,
draft_share (of engine steps that verified drafts), acceptance_length, each by set and batch; `phases`
for a load that falls from 32 to 1.

Example: python -m tools.bench_speculation --repeats 3
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ray

from nemo_war.config import RefitConfig, SpeculativeConfig, StepTimePrior, WarConfig
from nemo_war.generation.embedded import model
from nemo_war.generation.embedded.chat import Chat
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.replica import Replica
from nemo_war.generation.embedded.turn import Turn
from nemo_war.generation.extension import RefitExtension, WarExtension
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.dispatcher import Dispatcher
from nemo_war.routing.sticky import Sticky
from nemo_war.speculative.pricing import DraftPricer

MODULE = "tools.bench_speculation"  # `__name__` is `__main__` here, and workers import it
BATCHES = (1, 4, 16, 32)
MAX_DRAFT = 24  # of every drafter: vLLM's default for its suffix decoding
WARM_UP = 10**6  # number of the round that warms up, whose prompts never come again
TOKENS = (40, 88)  # of a turn, drawn; equal lengths would keep a batch in lockstep, as no real one is
DIALOGUES = {1: 8, 4: 12, 16: 32}
"""Of a cell at these batches, so that its end, with places empty, counts little; elsewhere one for each."""
ENGINE = {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 1024,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 2**30,
    "enable_prefix_caching": True,
    "dtype": "bfloat16",
}
CPU_PRIOR = StepTimePrior(
    base=25, per_request=1, per_token=1.6, per_draft_token=0.8, per_kilotoken=1,
    speculating=2, speculating_per_request=2,
)  # fmt: skip
WAR = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=MAX_DRAFT, step_time_prior=CPU_PRIOR))
SETTINGS = [f"{a}_{b}" for a in ("alpha", "beta", "gamma", "port", "host") for b in ("size", "mode", "path")]
TOPICS = ["the sea", "a train", "winter", "bread", "a lighthouse", "the market", "an old clock", "a garden"]


class DialogueTurn(NamedTuple):
    """The messages that are new in a turn, the tokens to sample, and how the answer is made to begin."""

    messages: list[dict[str, str]]
    tokens: int
    begun: str = ""


Dialogue = list[DialogueTurn]


class CompatExtension(RefitExtension):
    """Lets a stock engine sample rightly under speculation; without, it would be timed on garbage."""

    def bench_apply(self) -> list[str]:
        from nemo_war.compat import apply_to_engine

        return list(apply_to_engine())


class ForcedExtension(WarExtension):
    """Can take the price away, so that everything drafted is verified."""

    def bench_apply(self) -> list[str]:
        return []

    def bench_force(self, forced: bool) -> None:
        drafter = self.model_runner.drafter
        drafter.pricer = DraftPricer(drafter.step_time, max_running=1000 if forced else None)


class NeverDrafts:
    """A proposer that costs nothing: what having the seam on costs by itself."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *_args: Any, **_kwargs: Any) -> None: ...

    def propose(self, sampled_token_ids: list[list[int]], *_args: Any, **_kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class BenchReplica(Replica):
    """A stock replica whose engine may have a speculative configuration of its own."""

    async def start(self) -> dict[str, Any]:
        facts = await super().start()
        if self._spec.extension:
            await self.call("bench_apply")
        return facts


class BenchFleet(Fleet):
    replica_class = BenchReplica


def specs(folder: str) -> dict[str, EngineSpec]:
    stock = EngineSpec(folder, ENGINE, None)
    never = f"{MODULE}.NeverDrafts"
    seam = {"method": "custom_class", "model": never, "num_speculative_tokens": MAX_DRAFT}
    extension = f"{MODULE}.CompatExtension"
    made = {
        "plain": stock,
        "floor": replace(stock, engine=ENGINE | {"speculative_config": seam}, extension=extension),
        "ours": EngineSpec(folder, ENGINE, WAR, extension=f"{MODULE}.ForcedExtension"),
    }
    if importlib.util.find_spec("arctic_inference"):
        suffix = {"method": "suffix", "num_speculative_tokens": MAX_DRAFT}
        made["suffix"] = replace(stock, engine=ENGINE | {"speculative_config": suffix}, extension=extension)
    return made


def copy_heavy(number: int) -> Dialogue:
    """An agent that edits a file and prints it, two more turns; answers are begun, as forced calls are."""
    draw = random.Random(f"copy/{number}")
    lines = [f"{name} = {draw.randint(2, 99)}" for name in draw.sample(SETTINGS, 10)]

    def printed() -> str:
        return "```\n" + "\n".join(lines) + "\n```"

    def edit() -> dict[str, str]:
        row = draw.randrange(1, len(lines))
        before, lines[row] = lines[row], f"{lines[row].split(' =')[0]} = {draw.randint(2, 99)}"
        return user(f"Change `{before}` to `{lines[row]}` and print the whole file again.")

    begun = f"```\n{lines[0]}\n"
    given = [user(f"Here is a file.\n{printed()}\nPrint it."), assistant(printed())]
    given += [edit(), assistant(printed())]
    length = lambda: draw.randint(*TOKENS)  # noqa: E731
    return [DialogueTurn([*given, edit()], length(), begun), DialogueTurn([edit()], length(), begun)]


def non_copy(number: int) -> Dialogue:
    """One turn of free text."""
    draw = random.Random(f"free/{number}")
    story = f"Write a short story about {draw.choice(TOPICS)} and the number {number}."
    return [DialogueTurn([user(story)], draw.randint(*TOKENS))]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SETS = {"copy": copy_heavy, "free": non_copy}


class Bench:
    def __init__(self, fleets: dict[str, Fleet], chat: Chat) -> None:
        self._fleets = fleets
        self._chat = chat

    async def cell(
        self, engine: str, name: str, batch: int, round_number: int
    ) -> tuple[float, dict[str, int]]:
        """Seconds for a cell's dialogues, `batch` at a time, and what the drafter counted."""
        fleet, places = self._fleets[engine], asyncio.Semaphore(batch)
        dispatcher = fleet.dispatcher(Sticky())
        before = await fleet.ask_one(0, "statistics")
        started = time.perf_counter()

        async def one(index: int) -> None:
            async with places:
                await self._dialogue(fleet, dispatcher, name, batch, round_number, index)

        await asyncio.gather(*map(one, range(DIALOGUES.get(batch, batch))))
        seconds = time.perf_counter() - started
        after = await fleet.ask_one(0, "statistics")
        return seconds, {key: after[key] - before[key] for key in after}

    async def _dialogue(
        self, fleet: Fleet, dispatcher: Dispatcher, name: str, batch: int, round_number: int, index: int
    ) -> None:
        # Half of the prompts of a round are new, half return from earlier ones, as prompts do in RL.
        number = 1000 * batch + (index if index % 2 else 100 * round_number + index)
        number += WARM_UP * (round_number >= WARM_UP)
        trajectory = f"{name}/{batch}/{round_number}/{index}"
        tokens: list[int] = []
        for turn_number, (messages, length, begun) in enumerate(SETS[name](number)):
            fresh = (
                self._chat.observation(messages[0], after_eos=False)
                if tokens
                else self._chat.prompt(messages)
            )
            tokens += fresh + self._chat.encode(begun)
            metadata = TurnMetadata(trajectory, f"{name}/{number}", turn_number)
            turn = Turn(tuple(tokens), metadata, length, length, ignore_eos=True)
            _, answer = await fleet.generate(turn, dispatcher)
            tokens += answer.tokens

    async def falling_load(self, engine: str, run: int) -> list[float]:
        """Seconds from 32 running to 8, and from 8 to the end, of turns of growing length; each run's own."""
        fleet = self._fleets[engine]
        dispatcher = fleet.dispatcher(Sticky())
        started, finished = time.perf_counter(), []

        async def one(index: int) -> None:
            messages, _, begun = copy_heavy(50_000 + 32 * run + index)[0]
            prompt = tuple(self._chat.prompt(messages) + self._chat.encode(begun))
            length = 32 if index < 24 else 32 + 24 * (index - 23)
            metadata = TurnMetadata(f"fall/{run}/{index}", f"fall/{run}/{index}")
            await fleet.generate(Turn(prompt, metadata, length, length, ignore_eos=True), dispatcher)
            finished.append(time.perf_counter() - started)

        await asyncio.gather(*map(one, range(32)))
        return [finished[23], finished[-1] - finished[23]]


async def measure(repeats: int, batches: Sequence[int], sets: Sequence[str], falling: bool) -> dict[str, Any]:
    from transformers import AutoTokenizer

    folder = model.resolve(model.BUNDLED, print)
    fleets: dict[str, Fleet] = {
        name: BenchFleet(spec, 1, 1, RefitConfig()) for name, spec in specs(str(folder)).items()
    }
    print(f"starting {', '.join(fleets)}", flush=True)
    try:
        await asyncio.gather(*(fleet.start() for fleet in fleets.values()))
        bench = Bench(fleets, Chat(AutoTokenizer.from_pretrained(folder)))
        await cells(bench, fleets, 1, batches[:1], sets, warm_up=True)
        result = await cells(bench, fleets, repeats, batches, sets)
        if falling:
            result["phases"] = await phases(bench, fleets, repeats)
        return result
    finally:
        await asyncio.gather(*(fleet.stop() for fleet in fleets.values()))


async def cells(
    bench: Bench,
    fleets: dict[str, Fleet],
    repeats: int,
    batches: Sequence[int],
    sets: Sequence[str],
    warm_up: bool = False,
) -> dict[str, Any]:
    names = list(fleets)
    times: dict[tuple[str, int], dict[str, list[float]]] = {}
    counted: dict[tuple[str, int], dict[str, int]] = {}
    for repeat in range(repeats):
        for set_name in sets:
            for batch in batches:
                order = names[repeat % len(names) :] + names[: repeat % len(names)]
                for name in order:
                    seconds, added = await bench.cell(
                        name, set_name, batch, repeat + (WARM_UP if warm_up else 0)
                    )
                    times.setdefault((set_name, batch), {}).setdefault(name, []).append(seconds)
                    for key, value in added.items():
                        total = counted.setdefault((set_name, batch), {})
                        total[key] = total.get(key, 0) + value
        print(f"repeat {repeat + 1} of {repeats} done", flush=True)
    return judge(times, counted)


def judge(
    times: dict[tuple[str, int], dict[str, list[float]]], counted: dict[tuple[str, int], dict[str, int]]
) -> dict:
    def ratios(of: str, to: str) -> dict[str, dict[int, float]]:
        table: dict[str, dict[int, float]] = {}
        for (set_name, batch), by_engine in times.items():
            if of in by_engine and to in by_engine:
                paired = [a / b for a, b in zip(by_engine[of], by_engine[to], strict=True)]
                table.setdefault(set_name, {})[batch] = round(statistics.median(paired), 3)
        return table

    shares: dict[str, dict[int, float]] = {}
    lengths: dict[str, dict[int, float | None]] = {}
    for (set_name, batch), total in counted.items():
        shares.setdefault(set_name, {})[batch] = round(
            total["speculating_steps"] / max(1, total["engine_steps"]), 3
        )
        length = round(1 + total["accepted_tokens"] / total["drafts"], 2) if total["drafts"] else None
        lengths.setdefault(set_name, {})[batch] = length
    return {
        "ratio_vs_plain": ratios("plain", "ours"),
        "ratio_vs_suffix": ratios("suffix", "ours"),
        "ratio_vs_floor": ratios("floor", "ours"),
        "floor_vs_plain": ratios("plain", "floor"),
        "suffix_vs_plain": ratios("plain", "suffix"),
        "draft_share": shares,
        "acceptance_length": lengths,
        "seconds": {
            f"{s}/{b}": {k: [round(x, 2) for x in v] for k, v in e.items()} for (s, b), e in times.items()
        },
    }


async def phases(bench: Bench, fleets: dict[str, Fleet], repeats: int) -> dict[str, Any]:
    """A load that falls from 32 to 1: ours against the better of never and always drafting.

    All three run in one engine; one more run before them warms it up.
    """
    sides: dict[str, list[list[float]]] = {"off": [], "on": [], "ours": []}
    await bench.falling_load("ours", -1)
    for repeat in range(repeats):
        for turn, side in enumerate(list(sides)[repeat % 3 :] + list(sides)[: repeat % 3]):
            await fleets["ours"].ask("enable_drafting", side != "off")
            await fleets["ours"].ask("call", "bench_force", side == "on")
            sides[side].append(await bench.falling_load("ours", 3 * repeat + turn))
    medians = {
        side: [statistics.median(column) for column in zip(*runs, strict=True)]
        for side, runs in sides.items()
    }
    best = [min(medians["off"][phase], medians["on"][phase]) for phase in range(2)]
    return {
        "seconds": {side: [round(x, 2) for x in values] for side, values in medians.items()},
        "ratio_vs_best_fixed": [round(best[phase] / medians["ours"][phase], 3) for phase in range(2)],
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{'set':6} {'batch':>5} {'vs plain':>9} {'vs suffix':>9} {'vs floor':>9} {'floor/plain':>11} "
        f"{'drafting':>9}"
    ]
    for set_name, by_batch in result["ratio_vs_plain"].items():
        for batch, ratio in by_batch.items():
            suffix = result["ratio_vs_suffix"].get(set_name, {}).get(batch)
            lines.append(
                f"{set_name:6} {batch:5} {ratio:9.2f} {suffix if suffix is not None else '-':>9} "
                f"{result['ratio_vs_floor'][set_name][batch]:9.2f} "
                f"{result['floor_vs_plain'][set_name][batch]:11.2f} "
                f"{result['draft_share'][set_name][batch]:9.0%}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--no-phases", action="store_true", help="leave the falling load out")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    arguments = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=2**28,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    try:
        result = asyncio.run(
            measure(arguments.repeats, arguments.batches, arguments.sets, not arguments.no_phases)
        )
    finally:
        ray.shutdown()
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
