"""A pytest plugin for NeMo-RL's own tests: they get our generation where they ask for NeMo-RL's."""

from __future__ import annotations

from nemo_war.generation.nemo_rl import seams

seams.install()
