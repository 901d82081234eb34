"""All that the doctor looks at, in the order it is read in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nemo_war.config import WarConfig
from nemo_war.doctor import installation, interpreter, versions, worker
from nemo_war.doctor.finding import Finding, Section, fail, note, refused
from nemo_war.doctor.plan import plan
from nemo_war.doctor.report import Report
from nemo_war.errors import ConfigError, UserError
from nemo_war.generation.nemo_rl import recipe
from nemo_war.generation.nemo_rl.block import war_of


class Recipe(NamedTuple):
    """A recipe that could be read.

    Attributes:
        config: all of it.
        war: its block, checked.
    """

    config: Mapping[str, Any]
    war: WarConfig

    @property
    def worker(self) -> str:
        """NeMo-RL's class of workers for it."""
        cfg = recipe.generation_of(self.config).get("vllm_cfg") or {}
        return interpreter.ASYNCHRONOUS if cfg.get("async_engine") else interpreter.SYNCHRONOUS


def examine(path: str | None, overrides: Sequence[str], stage: Callable[[str], None]) -> Report:
    """Look at everything.

    Args:
        path: of the recipe to look at, too; None for none.
        overrides: of the recipe.
        stage: told what is being done.
    """
    title = None if path is None else f"Recipe {path}"
    stage("importing NeMo-RL")
    if (missing := installation.absent()) is not None:
        rest = [Section(title, [note("recipe", "not read, as that takes NeMo-RL")])] if title else []
        own = Section("Versions", [*versions.judge(versions.installed(), None)])
        return Report([own, Section("NeMo-RL", [missing]), *rest], title)
    read = None if path is None else _read(path, overrides)
    known = read if isinstance(read, Recipe) else None
    sections = _installation(known, stage)
    if title is not None and read is not None:
        findings = [read] if isinstance(read, Finding) else [*_recipe(read)]
        sections.append(Section(title, findings))
    return Report(sections, title)


def _installation(known: Recipe | None, stage: Callable[[str], None]) -> list[Section]:
    stage("looking for what WAR takes hold of in NeMo-RL")
    here = installation.complaints()
    release, ours = installation.judge_release(), installation.judge_ours()
    answer, theirs = _workers(known, installation.for_workers(here), stage)
    own = versions.installed()
    there = None if answer is None else answer["contract"]
    seams = installation.judge_seams(here, there, release.facts.get("release"))
    return [
        Section("Versions", [*versions.judge(own, answer and answer["versions"])]),
        Section("NeMo-RL", [release, ours, *seams]),
        Section("vLLM's workers", theirs),
    ]


def _workers(
    known: Recipe | None, modules: Sequence[str], stage: Callable[[str], None]
) -> tuple[worker.Answer | None, list[Finding]]:
    """What the workers' environment says, where it says anything, and what that means."""
    try:
        python = interpreter.of_nemo_rl(known.worker if known else interpreter.ASYNCHRONOUS)
    except Exception as error:  # a NeMo-RL that has it elsewhere, or cannot be imported
        return None, [note("environment", f"not found by this NeMo-RL's registry: {error}")]
    if not python.exists:
        return None, [worker.unmade(python)]
    stage(f"asking {python.path}, for {worker.TIMEOUT_S:.0f} s at most")
    answer = worker.ask(python, modules, worker.TIMEOUT_S)
    if isinstance(answer, Finding):
        return None, [answer]
    return answer, [*worker.judge(python, answer, known and _drafts(known.war))]


def _drafts(war: WarConfig) -> bool:
    return war.enabled and war.speculative.enabled


def _read(path: str, overrides: Sequence[str]) -> Recipe | Finding:
    try:
        config = recipe.load(["--config", path, *overrides])
        generation = recipe.generation_of(config)
        if not generation:
            raise ConfigError(
                "policy.generation", None, "allowed: a block of NeMo-RL's", "take a recipe that generates"
            )
        return Recipe(config, war_of(generation))
    except ConfigError as error:
        return refused("recipe", error)
    except UserError as error:
        return fail("recipe", str(error), "correct the recipe")


def _recipe(read: Recipe) -> Iterator[Finding]:
    if read.war.enabled and (error := installation.refusal(read.war)) is not None:
        yield refused("release", error)
    try:
        yield from plan(read.config, read.war)
    except (KeyError, TypeError) as error:
        yield fail(
            "recipe", f"a key of NeMo-RL's is missing or of a wrong kind: {error!r}", "complete the recipe"
        )
