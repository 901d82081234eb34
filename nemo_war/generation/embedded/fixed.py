"""The comparison: every mode does the same recorded work, interleaved, several times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.live import RecordedStep, Recording
from nemo_war.generation.embedded.workplace import DraftMeter, Workplace, step_record
from nemo_war.telemetry.progress import progress
from nemo_war.telemetry.records import Pass


class FixedWork:
    """Replays a recording on the fleets of several modes.

    Args:
        place: the run.
        fleets: by mode; two modes may share one (stock engines under two schedulers).
        recording: the work.
    """

    def __init__(self, place: Workplace, fleets: Mapping[str, Fleet], recording: Recording) -> None:
        self._place = place
        self._fleets = dict(fleets)
        self._steps: Sequence[RecordedStep] = recording.steps[: place.config.compare.steps]

    async def run(self) -> None:
        """All repeats. The order of the modes rotates, so that drift of the machine hits all alike.

        Raises:
            RefitError: a refit failed.
        """
        repeats, modes = self._place.config.compare.repeats, list(self._fleets)
        with progress("comparison at fixed work", total=repeats * len(modes) * len(self._steps)) as bar:
            for repeat in range(repeats):
                turn = repeat % len(modes)
                for mode in modes[turn:] + modes[:turn]:
                    await self._replay(Pass(mode, "fixed", repeat), bar.advance)

    async def _replay(self, which: Pass, on_step: Callable[[], None]) -> None:
        """One pass: empty history, then the recorded weights and work step by step."""
        fleet = self._fleets[which.mode]
        await fleet.clear_history()
        rollouts, meter = self._place.rollouts(fleet, which.mode), DraftMeter(fleet)
        for step, recorded in enumerate(self._steps):
            refit = await self._place.refit(which, fleet, recorded.weights)
            starts = [self._place.recorded_start(which, step, each) for each in recorded.trajectories]
            await meter.start()
            trajectories, makespan = await rollouts.run(which, step, starts, lambda: None)
            await meter.stop(which, step, self._place.log)
            self._place.log.append(
                step_record(which, step, refit.epoch, makespan, trajectories, refit_s=refit.seconds)
            )
            on_step()
        await rollouts.stop()
