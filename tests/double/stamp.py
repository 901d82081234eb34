"""Says which contract NeMo-RL and its double were last held against: python -m tests.double.stamp

NEMO_RL_PATH names the checkout. CI has none, so that a contract that changed is not known there to
hold; the stamp tells.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from nemo_war.generation.nemo_rl import contract

HERE = Path(__file__).parent
FILE = HERE / "stamp.txt"
TESTS = HERE.parent / "nemo_rl" / "test_contract.py"


def digest() -> str:
    """Of all of the contract that is checked; sentences may be reworded."""
    checked = [
        (fact.name, fact.kind.value, fact.parameters, fact.overridden, fact.asks.value)
        for fact in contract.FACTS
    ]
    return hashlib.sha256(repr((contract.COMMIT, checked)).encode()).hexdigest()


def main() -> int:
    """Write the stamp, if NeMo-RL is what the contract says."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", str(TESTS)], check=False)
    if done.returncode:  # having found no tests, too, where NEMO_RL_PATH names no checkout
        return done.returncode
    FILE.write_text(f"{digest()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
