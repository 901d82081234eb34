"""Which headers travel on: all but those that are about one connection, or that HTTP does not allow."""

from __future__ import annotations

import re
from collections.abc import Mapping

from multidict import CIMultiDict

from nemo_war.metadata import TurnMetadata
from nemo_war.routing.http.identity import EPOCH_HEADER, TURN_HEADER, write_turn

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""RFC 9110, 7.6.1; any that `Connection` names are added to them."""
_OF_THE_REQUEST = _HOP_BY_HOP | {"host", "content-length", "content-encoding", "expect", "accept-encoding"}
"""Bodies were decompressed when they are read here, and answers are to be read here as well."""
_OF_THE_ANSWER = _HOP_BY_HOP | {"content-length"}
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""What no header may hold (RFC 9110, 5.5). A replica's may all the same, as HTTP clients read leniently;
to write it on would be an error."""


def of_request(headers: Mapping[str, str], turn: TurnMetadata | None) -> CIMultiDict[str]:
    """A client's headers for the replica, and the turn's own; what a client says in its place is dropped."""
    kept = _without(headers, _OF_THE_REQUEST | {TURN_HEADER})
    if turn is not None:
        kept[TURN_HEADER] = write_turn(turn)
    return kept


def of_answer(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A replica's headers for the client."""
    return _without(headers, _OF_THE_ANSWER | {EPOCH_HEADER})


def _without(headers: Mapping[str, str], dropped: frozenset[str]) -> CIMultiDict[str]:
    if "connection" in headers:
        dropped |= {name.strip().lower() for name in headers["connection"].split(",")}
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in dropped and not _CONTROL.search(name + value)
    )
