"""What a client is told when its request is not served, in OpenAI's shape of errors.

`openai` says what is: 429 when too much waits, 503 when no replica is there, with the
time to come back. `gym` is for NeMo-Gym, which repeats 429, 502, 503, 504 and 520
without bound but gives up on 500 after a few tries: there these five become 500.
"""

from __future__ import annotations

import json
from typing import Any

NO_REPLICA = "no_replica"
"""`error.type` where nobody is there to serve; with which status is for the operator to say."""
_REPEATED_WITHOUT_BOUND = frozenset({429, 502, 503, 504, 520})


class RefusalError(Exception):
    """A request that is not served.

    Attributes:
        status: of the answer, in the `openai` profile.
        kind: `error.type` of the answer.
        retry_after_s: when to come back; 0 where that would not help.
    """

    def __init__(self, status: int, kind: str, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status, self.kind, self.retry_after_s = status, kind, retry_after_s


def invalid(message: str, status: int = 400) -> RefusalError:
    """The request itself is wrong."""
    return RefusalError(status, "invalid_request_error", message)


def overloaded(message: str) -> RefusalError:
    """Too much is waiting already."""
    return RefusalError(429, "overloaded", message, retry_after_s=1)


def no_replica(message: str) -> RefusalError:
    """Nobody is there to serve."""
    return RefusalError(503, NO_REPLICA, message, retry_after_s=5)


def status_for(profile: str, status: int) -> int:
    """The status that clients of this profile can take."""
    return 500 if profile == "gym" and status in _REPEATED_WITHOUT_BOUND else status


def error_body(status: int, kind: str, message: str) -> bytes:
    """A refusal in OpenAI's shape."""
    return json.dumps(_error(status, kind, message)).encode()


def as_error(status: int, body: bytes) -> bytes:
    """A replica's error in OpenAI's shape; unchanged where it has it."""
    try:
        shaped = isinstance(json.loads(body)["error"], dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        shaped = False
    return body if shaped else error_body(status, "replica_error", body[:500].decode(errors="replace"))


def broken_stream(message: str) -> bytes:
    """The one event that ends a stream whose replica was lost."""
    return b"data: " + error_body(502, "replica_lost", message) + b"\n\ndata: [DONE]\n\n"


def _error(status: int, kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
