"""All that a replica's drafter learned, as two files: its history, and its tables.

`STEM.suffixes` is the history as a run keeps it anyway (see `archive`); `STEM.state` holds
calibration, step times and the pricer's trust (see `snapshot`). Together they let a run
that is resumed draft as one that never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nemo_war import snapshot
from nemo_war.config import StepTimePrior
from nemo_war.generation.step_time import StepTimeModel
from nemo_war.snapshot import State
from nemo_war.speculative import archive
from nemo_war.speculative import calibration as calibrations
from nemo_war.speculative.calibration import Calibration
from nemo_war.speculative.history import SuffixHistory
from nemo_war.speculative.pricing import DraftPricer


@dataclass(frozen=True, slots=True)
class Tables:
    """What is learned beside the history; all of it changes in place."""

    calibration: Calibration
    step_time: StepTimeModel
    pricer: DraftPricer

    def state(self) -> State:
        """All of it as it is now."""
        return State.join(
            {
                "calibration": calibrations.state(self.calibration),
                "step_time": self.step_time.state(),
                "pricer": self.pricer.state(),
            }
        )

    def restore(self, state: State) -> None:
        """Go on with what a state learned.

        Raises:
            ValueError: it is not such a state.
        """
        calibrations.restore(self.calibration, state.part("calibration"))
        self.step_time.restore(state.part("step_time"))
        self.pricer.restore(state.part("pricer"))


def save(stem: str, history: SuffixHistory, tables: Tables) -> None:
    """Write both files.

    Raises:
        OSError: one could not be written.
    """
    history.save(stem + archive.SUFFIX)
    snapshot.write(Path(stem + snapshot.SUFFIX), tables.state())


def restore(stem: str, history: SuffixHistory, tables: Tables, vocabulary: int) -> int:
    """Go on with what both files hold; return how many trajectories that is.

    Args:
        stem: as it was given to `save`.
        history: an empty one.
        tables: fresh ones, the history's own calibration among them.
        vocabulary: token ids of the model that drafts.

    Raises:
        UserError: a file is missing, damaged, of another kind or version, or makes no sense.
    """
    trajectories = history.restore(stem + archive.SUFFIX, vocabulary)
    _restore_tables(stem, tables)  # behind it, as taking texts in teaches the calibration a little
    return trajectories


def check(stem: str) -> None:
    """Read both files as `restore` would, to find out early whether it can.

    Raises:
        UserError: see `restore`.
    """
    archive.read_archive(stem + archive.SUFFIX)
    step_time = StepTimeModel(StepTimePrior())
    _restore_tables(stem, Tables(calibrations.new_calibration(), step_time, DraftPricer(step_time)))


def _restore_tables(stem: str, tables: Tables) -> None:
    path = Path(stem + snapshot.SUFFIX)
    try:
        tables.restore(snapshot.read(path))
    except ValueError as error:
        raise snapshot.KIND.malformed(path, error) from None
