"""Workload-aware rollouts: a rollout backend for NeMo-RL."""

__version__ = "0.1.0"
