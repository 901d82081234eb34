"""Start a NeMo-RL script with WAR: python -m nemo_war.launch SCRIPT --config YAML [overrides].

The script is started as it is. Where its configuration has `policy.generation.war` with
`enabled: true`, NeMo-RL makes WAR's generation backend in place of its own; else nothing
of NeMo-RL is touched.

Example: python -m nemo_war.launch examples/run_grpo.py --config examples/configs/grpo_math_1B.yaml \\
             ++policy.generation.war.enabled=true
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_war.errors import ConfigError, UserError
from nemo_war.generation.nemo_rl import python_path, recipe
from nemo_war.generation.nemo_rl.block import war_of


def main(arguments: Sequence[str]) -> int:
    """Run the script in this process; returns the exit status where it was not run."""
    try:
        script, rest = _script(arguments)
        war = war_of(recipe.generation_of(recipe.load(rest)))
        if war.enabled:
            from nemo_war.generation.nemo_rl import release

            release.check(war)
            from nemo_war.generation.nemo_rl import seams

            os.environ["PYTHONPATH"] = python_path.for_workers(os.environ.get("PYTHONPATH", ""))
            seams.install(war)
    except UserError as error:
        print(f"nemo_war.launch: {error}", file=sys.stderr)
        return 2
    sys.argv = [str(script), *rest]
    sys.path[0] = str(script.parent)  # as Python does for a script
    runpy.run_path(str(script), run_name="__main__")
    return 0


def _script(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if arguments else 2)
    script = Path(arguments[0])
    if not script.is_file():
        raise ConfigError("SCRIPT", str(script), "allowed: a Python file", "name NeMo-RL's script first")
    return script, list(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
