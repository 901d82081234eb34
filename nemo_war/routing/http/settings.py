"""Everything an operator can set, each described and bounded in one place.

The flags of `nemo-war route` and their help are made from these fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any, get_args
from urllib.parse import urlsplit

from nemo_war.config import PolicyName, StepTimePrior
from nemo_war.errors import ConfigError, choices
from nemo_war.generation.step_time import StepTimeModel
from nemo_war.routing.options import Options

POLICIES: tuple[str, ...] = get_args(PolicyName)
PROFILES = ("openai", "gym")

_DAY_S = 86_400.0
_PRIOR = StepTimePrior()


def _option(
    default: Any,
    purpose: str,
    *,
    least: float | None = None,
    most: float | None = None,
    among: tuple[str, ...] = (),
) -> Any:
    bounds = {"purpose": purpose, "least": least, "most": most, "among": among}
    return field(default=default, metadata=bounds)


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How a router behaves; see the purpose of each field.

    Attributes:
        replicas: base URL of each replica, its number being its place.
        token: what clients must present; empty for none.
    """

    replicas: tuple[str, ...]
    token: str = field(default="", repr=False)
    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(8000, "port to listen on; 0 takes a free one", least=0, most=65_535)
    policy: str = _option("sticky", "how turns are placed", among=POLICIES)
    profile: str = _option("openai", "how refusals are told; gym for NeMo-Gym", among=PROFILES)
    no_replica_status: int = _option(503, "status of answers while no replica is there", least=400, most=599)
    seed: int = _option(0, "seed of the policy's tie-breaking", least=0, most=2**31)
    kv_tokens: int = _option(
        0, "tokens of KV cache of each replica; 0: as their /metrics say", least=0, most=2**40
    )
    base_ms: float = _option(_PRIOR.base, "time of an engine step, whatever is in it", least=0, most=1e6)
    per_request_ms: float = _option(_PRIOR.per_request, "and of each request in it", least=0, most=1e6)
    per_token_ms: float = _option(
        _PRIOR.per_token, "and of each token, such as of a prompt", least=0, most=1e6
    )
    per_kilotoken_ms: float = _option(
        _PRIOR.per_kilotoken, "and of each thousand tokens attended to", least=0, most=1e6
    )
    patience_s: float = _option(
        Options().patience_s, "wait after which war places a turn regardless of room", least=0, most=_DAY_S
    )
    new_tokens: int = _option(2048, "assumed limit of a request that names none", least=1, most=2**24)
    max_body_mib: int = _option(64, "largest request body in MiB", least=1, most=4096)
    max_answer_mib: int = _option(
        256, "largest answer in MiB, a stream's events together", least=1, most=4096
    )
    max_waiting: int = _option(10_000, "turns that may wait for a replica", least=1, most=10**7)
    max_trajectories: int = _option(100_000, "trajectories remembered", least=1, most=10**8)
    max_attempts: int = _option(3, "replicas a request is tried on", least=1, most=100)
    wait_timeout_s: float = _option(3600.0, "longest wait for a replica", least=0.01, most=_DAY_S)
    outage_timeout_s: float = _option(
        10.0, "time without any healthy replica after which requests are refused", least=0, most=_DAY_S
    )
    connect_timeout_s: float = _option(5.0, "longest wait for a connection", least=0.01, most=_DAY_S)
    read_timeout_s: float = _option(
        3600.0, "longest silence of a replica; covers a whole unstreamed answer", least=0.01, most=_DAY_S
    )
    health_interval_s: float = _option(1.0, "time between two looks at a replica", least=0.01, most=_DAY_S)
    health_timeout_s: float = _option(5.0, "longest wait for a replica's /health", least=0.01, most=_DAY_S)
    idle_s: float = _option(600.0, "idle time after which a trajectory is over", least=0.01, most=_DAY_S)
    grace_s: float = _option(10.0, "time given to running requests at the end", least=0, most=_DAY_S)

    def step_time(self) -> StepTimeModel:
        """What the replicas' step times are said to be."""
        return StepTimeModel(
            StepTimePrior(
                base=self.base_ms,
                per_request=self.per_request_ms,
                per_token=self.per_token_ms,
                per_kilotoken=self.per_kilotoken_ms,
            )
        )

    def __post_init__(self) -> None:
        """Check all values.

        Raises:
            ConfigError: the first that is not allowed, under the name of its flag.
        """
        if not self.replicas:
            raise ConfigError("--replica", None, "allowed: one URL or more", "add --replica http://HOST:PORT")
        for url in self.replicas:
            _check_url(url, self.replicas)
        for each in options():
            _check_option(each, getattr(self, each.name))


def options() -> Iterator[Field[Any]]:
    """The fields that have a flag of their own."""
    return (each for each in fields(RouterSettings) if "purpose" in each.metadata)


def flag(option: Field[Any]) -> str:
    """The option as it is written on the command line."""
    return "--" + option.name.replace("_", "-")


def base(url: str) -> str:
    """A replica's URL as paths are appended to it; engines advertise themselves with /v1."""
    return url.rstrip("/").removesuffix("/v1")


def _check_url(url: str, replicas: tuple[str, ...]) -> None:
    example = "write --replica http://127.0.0.1:8001, for example"
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    # A path, a query or a password would silently be dropped, or shown in /state.
    if not whole or "@" in parts.netloc or parts.path not in ("", "/", "/v1", "/v1/") or parts.query:
        raise ConfigError("--replica", url, "allowed: http[s]://HOST:PORT, with or without /v1", example)
    if [base(each) for each in replicas].count(base(url)) > 1:
        raise ConfigError("--replica", url, "allowed: each URL once", "remove the second one")


def _check_option(option: Field[Any], value: Any) -> None:
    least, most, among = (option.metadata[name] for name in ("least", "most", "among"))
    fix = f"leave it out for {option.default}"
    if among and value not in among:
        raise ConfigError(flag(option), value, choices(among), fix)
    if least is not None and not least <= value <= most:  # false for a NaN, too
        raise ConfigError(flag(option), value, f"allowed: {least} to {most}", fix)
