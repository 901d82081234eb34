"""What becomes of requests when the engine fails."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMServerError


class EngineGenerateError(VLLMServerError):
    """One request failed; the engine serves on."""


class EngineDeadError(VLLMServerError):
    """The engine failed for good."""

    def __init__(self, *args: Any) -> None:
        message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        super().__init__(message, *args)
