"""The main job: a live run on WAR's replicas, and with `--compare` on stock ones beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from nemo_war.config import WarConfig
from nemo_war.errors import ConfigError, UserError
from nemo_war.generation.embedded.chat import Chat
from nemo_war.generation.embedded.checkpoint import Checkpoint, Checkpoints
from nemo_war.generation.embedded.config import RunConfig
from nemo_war.generation.embedded.fixed import FixedWork
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.live import LivePass
from nemo_war.generation.embedded.model import resolve
from nemo_war.generation.embedded.workplace import Workplace
from nemo_war.generation.refit import RefitError
from nemo_war.report import summary
from nemo_war.report.main import report
from nemo_war.speculative.archive import read_archives
from nemo_war.telemetry.log import FILE_NAME, EventLog, read
from nemo_war.telemetry.progress import progress, stage

_OBJECT_STORE_BYTES = 2 * 1024**3
"""Room for the weights of several steps of the bundled model; Ray spills to disk beyond it."""


def run(config: RunConfig, *, compare: bool, run_dir: Path | None) -> int:
    """Run the job and print its report.

    Args:
        config: the whole run.
        compare: also run stock vLLM, live and on fixed work.
        run_dir: the run's folder; a new one below `logger.log_dir` by default.

    Returns:
        The exit status.

    Raises:
        UserError: something on this machine is missing, or the run failed for a reason that is named.
        KeyboardInterrupt: interrupted; everything was shut down before.
    """
    if compare:
        _check_comparison(config)
    checkpoints = Checkpoints(config) if config.checkpointing.enabled else None
    resumed = _find(checkpoints, config) if checkpoints else None
    if resumed is None:
        check_history(config.policy.generation.war)
    folder = _make_folder(config.logger.log_dir, run_dir)
    stage(f"this run's folder is {folder}")
    model = resolve(config.policy.model_name, stage)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints each process that dies to where results go
            asyncio.run(_job(config, model, folder, compare, checkpoints, resumed))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except RefitError as error:
        raise UserError(f"{error}; the run stopped there, its records are in {folder}") from error
    _summarize(folder)
    report(folder, as_json=False)  # its status is of the log; that of the run is that it came to its end
    return 0


def _summarize(folder: Path) -> None:
    """Write `summary.json`; a full disk costs no more than that, as it can be made again."""
    stream = read(folder / FILE_NAME)
    try:
        summary.write(folder / "summary.json", summary.summarize(stream.records, stream.damage))
    except OSError as error:
        again = f"nemo-war report {folder} --json makes it again"
        stage(f"WARNING: summary.json could not be written: {error.strerror}; {again}")


def _check_comparison(config: RunConfig) -> None:
    if not config.policy.generation.war.enabled:
        raise ConfigError(
            "policy.generation.war.enabled",
            False,
            "allowed: true with --compare, which has nothing to compare otherwise",
            "set policy.generation.war.enabled=true, or leave --compare out",
        )
    if config.checkpointing.enabled:
        raise ConfigError(
            "checkpointing.enabled",
            True,
            "allowed: false with --compare, which replays a live run that it has seen from its first step",
            "set checkpointing.enabled=false, or leave --compare out",
        )


def _find(checkpoints: Checkpoints, config: RunConfig) -> Checkpoint | None:
    """The checkpoint to go on from; says what was found."""
    resumed, steps = checkpoints.latest(), config.grpo.max_num_steps
    if resumed is None:
        stage(f"no checkpoint in {checkpoints.folder}: this run starts anew, and saves its own there")
    else:
        stage(f"resuming from {resumed.folder}: {resumed.info.step} of {steps} steps are done")
        if config.policy.generation.war.speculative.history.restore is not None:
            stage("history.restore is left out: what is remembered comes from the checkpoint")
    return resumed


def check_history(war: WarConfig) -> None:
    """A history that cannot be read should not take the start of all engines to be found."""
    history = war.speculative.history
    if history.restore is None or history.empty_if_damaged or not (war.enabled and war.speculative.enabled):
        return
    try:
        read_archives(history.restore)
    except UserError as error:
        raise ConfigError(
            "policy.generation.war.speculative.history.restore",
            str(history.restore),
            f"allowed: null, or a history that a run kept; {error}",
            "or set policy.generation.war.speculative.history.empty_if_damaged=true",
        ) from None


def _cancel_on_signals() -> None:
    """SIGTERM ends the job as Ctrl-C does: engines are shut down first."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, task.cancel)


async def _job(
    config: RunConfig,
    model: Path,
    folder: Path,
    compare: bool,
    checkpoints: Checkpoints | None,
    resumed: Checkpoint | None,
) -> None:
    import ray
    from transformers import AutoTokenizer

    folder_of_tokenizer = config.policy.tokenizer_folder(model)
    tokenizer = AutoTokenizer.from_pretrained(folder_of_tokenizer, trust_remote_code=False)
    with EventLog(folder / FILE_NAME) as log:
        place = Workplace(config, model, folder, Chat(tokenizer), log, checkpoints, resumed)
        _start_ray()
        _cancel_on_signals()  # now, as Ray has just put its own handler for SIGTERM in place
        fleets: dict[str, Fleet] = {}
        try:
            await _start_fleets(place, fleets, compare)
            await _passes(place, fleets, compare)
        finally:
            stage("shutting the replicas down")
            await asyncio.gather(*(fleet.stop() for fleet in set(fleets.values())))
            ray.shutdown()
            if log.lost:
                stage(f"WARNING: {log.lost} records could not be written to {log.path}: the disk was full")


async def _start_fleets(place: Workplace, fleets: dict[str, Fleet], compare: bool) -> None:
    """Start one fleet of stock engines and one of WAR's, as far as this run needs them."""
    war_enabled = place.config.policy.generation.war.enabled
    if compare or not war_enabled:
        fleets["baseline"] = fleets["sticky"] = place.fleet(war=False)
    if war_enabled:
        fleets["war"] = place.fleet(war=True)
    started = set(fleets.values())
    total = sum(fleet.size for fleet in started)
    with progress(f"starting {total} vLLM replicas", total=total) as bar:
        await asyncio.gather(*(fleet.start(lambda number: bar.advance()) for fleet in started))


async def _passes(place: Workplace, fleets: dict[str, Fleet], compare: bool) -> None:
    """Live passes first; the baseline's is the work that the comparison then replays."""
    recording = await LivePass(place, fleets["baseline"], "baseline").run() if "baseline" in fleets else None
    if "war" in fleets:
        await LivePass(place, fleets["war"], "war").run()
    if compare and recording:
        wanted: dict[str, Fleet] = {mode: fleets[mode] for mode in place.config.compare.modes}
        await FixedWork(place, wanted, recording).run()


def _start_ray() -> None:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would run the engines behind everything else
    # The user's own paths first, as in this process: replicas are to find what it would find.
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[3])) if path]
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=_OBJECT_STORE_BYTES,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
        )
    except SystemExit:  # which Ray's own handler of SIGTERM makes of it while Ray starts
        raise KeyboardInterrupt from None


def _make_folder(log_dir: Path, run_dir: Path | None) -> Path:
    """A new folder for this run, and `latest` beside it pointing there."""
    folder = run_dir or log_dir / time.strftime("%Y%m%d-%H%M%S")
    if (folder / FILE_NAME).exists():
        raise UserError(f"{folder} already holds a run; give another --run-dir, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if run_dir is None:
            link = log_dir / f".latest-{os.getpid()}"
            link.symlink_to(folder.name)
            link.replace(log_dir / "latest")
    except OSError as error:
        raise UserError(
            f"cannot make the run's folder {folder}: {error.strerror}; set logger.log_dir"
        ) from error
    return folder.resolve()
