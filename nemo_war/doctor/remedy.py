"""What to do about a package or module that cannot be imported."""

from __future__ import annotations

_GUIDE = "docs/guides/install-on-a-cluster.md"
_NUMBA = (
    "put a numba that takes the NumPy there beside nemo_war, for example by "
    'pip install --target DIR --no-deps "numba==0.67.*" "llvmlite==0.49.*", and DIR on PYTHONPATH; '
    f"see {_GUIDE}"
)
_REMEDIES = {
    "nemo_war": f"put the folder that holds nemo_war on PYTHONPATH, on all nodes; see {_GUIDE}",
    "numba": _NUMBA,
    "vllm": "have NeMo-RL make that environment anew: NRL_FORCE_REBUILD_VENVS=true at the next start",
    "nemo_rl": "have NeMo-RL's checkout installed there, or put it on PYTHONPATH",
}


def remedy(module: str, said: str) -> str:
    """What to do.

    Args:
        module: what was imported.
        said: the error.
    """
    if "umba" in said or "llvmlite" in said:  # whatever module wanted it
        return _NUMBA
    for name, what in _REMEDIES.items():
        if f"No module named '{name}'" in said or module == name:
            return what
    return f"put what is missing into that environment, or beside nemo_war; see {_GUIDE}"
