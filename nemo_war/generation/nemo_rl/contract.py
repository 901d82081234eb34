"""Every name of NeMo-RL's that the adapter relies on, and what it relies on it for.

Nothing of NeMo-RL is imported here, so that this can be read, and held against an installation,
where there is none. The names were read at `COMMIT`. That they are there is checked by `check`;
that they behave as said, by the tests that have a checkout.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from nemo_war.generation.nemo_rl.facts import driver, refit, training, worker
from nemo_war.generation.nemo_rl.facts.fact import Fact

COMMIT = "7ea279ab"
"""Of NeMo-RL's main branch, of 22 August 2026."""

FACTS: tuple[Fact, ...] = (*driver.FACTS, *worker.FACTS, *refit.FACTS, *training.FACTS)


def check(importer: Callable[[str], ModuleType]) -> list[str]:
    """What does not hold in an installation, a line for each fact.

    A module that cannot be imported has one line, whatever is relied on in it.

    Args:
        importer: gives a module by its name, as `importlib.import_module` does.
    """
    found: dict[str, ModuleType | None] = {}
    problems = []
    for fact in FACTS:
        if fact.module not in found:
            try:
                found[fact.module] = importer(fact.module)
            except Exception as error:  # an import runs whatever stands in the module
                found[fact.module] = None
                problems.append(f"{fact.module}: cannot be imported: {type(error).__name__}: {error}")
        module = found[fact.module]
        problem = None if module is None else fact.problem(module)
        if problem is not None:
            problems.append(problem)
    return problems
