"""vLLM's own exceptions, as far as they are raised here."""

from __future__ import annotations


class VLLMError(Exception):
    """Any of them."""


class VLLMClientError(VLLMError):
    """The request is at fault."""


class VLLMServerError(VLLMError):
    """The engine is at fault."""


class VLLMValidationError(VLLMClientError):
    """The request makes no sense."""
