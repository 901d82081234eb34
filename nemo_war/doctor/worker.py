"""NeMo-RL's vLLM workers: their environment is asked by a process of its own, as they would start there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_war.doctor import probe
from nemo_war.doctor.finding import Finding, fail, note, ok
from nemo_war.doctor.interpreter import Interpreter
from nemo_war.doctor.remedy import remedy
from nemo_war.generation.nemo_rl import python_path

TIMEOUT_S = 60.0
"""Longest wait for an answer. Most of it is imports, which a shared file system may make slow once."""
_LAST_LINES = 3

Answer = Mapping[str, Any]
"""See `probe.answer`."""

_NO_DRAFTS = "set policy.generation.war.speculative.enabled=false, or update NeMo-RL to one with vLLM 0.25"


def ask(python: Interpreter, modules: Sequence[str], timeout_s: float) -> Answer | Finding:
    """What a worker's environment says of itself, or why it says nothing.

    Args:
        python: of the environment.
        modules: see `probe`.
        timeout_s: longest wait.
    """
    environment = os.environ | {"PYTHONPATH": python_path.for_workers(os.environ.get("PYTHONPATH", ""))}
    command = [str(python.path), "-m", probe.__name__, *modules]
    try:
        return read(*_run(command, environment, timeout_s))
    except subprocess.TimeoutExpired:
        return fail(
            "environment",
            f"{python.path} did not answer within {timeout_s:.0f} s",
            "try again: what was read once is read faster. If it stays so, its file system is too slow",
        )
    except OSError as error:
        return fail("environment", f"{python.path} cannot be started: {error.strerror}", remedy("vllm", ""))


def read(out: str, err: str, status: int) -> Answer | Finding:
    """The answer in what a probe wrote, which is one line of JSON or a failure."""
    with contextlib.suppress(ValueError):
        said = json.loads(out)
        if isinstance(said, dict) and said.keys() >= probe.KEYS:
            return said
    last = " / ".join([*err.splitlines(), *out.splitlines()][-_LAST_LINES:]) or "nothing"
    return fail(
        "environment", f"no answer (exit status {status}); the last it said: {last}", remedy("", last)
    )


def unmade(python: Interpreter) -> Finding:
    """The environment is not there."""
    if python.made_at_start:
        return note(
            "environment",
            f"{python.path} is not there yet: NeMo-RL makes it at the first start, which needs the network",
        )
    return fail("environment", f"{python.path} is not there", "name a Python that is there in the registry")


def judge(python: Interpreter, answer: Answer, drafting: bool | None) -> Iterator[Finding]:
    """Findings in an answer.

    Args:
        python: that gave it.
        answer: what it said.
        drafting: whether drafts are wanted; None: nobody said.
    """
    yield ok("environment", str(python.path), python=str(python.path))
    yield _ours(answer["nemo_war"])
    reasons: dict[str, list[str]] = {}
    for module, why in answer["imports"].items():
        if why is not None:
            reasons.setdefault(why, []).append(module)
    for why, modules in reasons.items():
        says, fix = f"{', '.join(modules)}: {why}", remedy(modules[0], why)
        needed = drafting is not False or not probe.FOR_DRAFTS.issuperset(modules)
        yield fail("imports", says, fix) if needed else note("imports", f"{says}; only drafts need it", fix)
    if not reasons:
        yield ok("imports", ", ".join(answer["imports"]))
    yield _drafter(answer["drafter"], drafting, bool(reasons))


def _run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> tuple[str, str, int]:
    """Output, errors, exit status. What the process started ends with it, and would keep its pipes open."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return out, err, process.returncode


def _ours(folder: str) -> Finding:
    if folder == probe.folder():
        return ok("nemo_war", f"found in {folder}, as here", folder=folder)
    return note(
        "nemo_war",
        f"found in {folder}, and here in {probe.folder()}: the two must be of one version",
        "take the other one out of that environment; a folder on PYTHONPATH comes before it",
        folder=folder,
    )


def _drafter(why: str | None, drafting: bool | None, broken: bool) -> Finding:
    if why is None:
        return ok("drafter", "vLLM takes WAR's by its class (speculative_config.method: custom_class)")
    if drafting is False:
        return ok("drafter", "none wanted")
    if broken:
        return note("drafter", "not tried, as imports failed")
    if drafting:
        return fail("drafter", f"vLLM does not take WAR's: {why}", _NO_DRAFTS)
    return note("drafter", f"vLLM does not take WAR's, so that drafts are refused: {why}", _NO_DRAFTS)
