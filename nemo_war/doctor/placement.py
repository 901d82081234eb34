"""Who decides in a recipe which engine serves a turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_war.config import WarConfig
from nemo_war.doctor.finding import Finding, fail, note, ok

Config = Mapping[str, Any]

_GENERATION = "policy.generation"
_EXCHANGE = f"{_GENERATION}.war.speculative.history.exchange.when"
_EXCHANGES = {
    "step": "histories, at the end of a step",
    "live": "histories, at the end of a step, and to siblings what is finished meanwhile",
    "off": "none",
}
_EXPOSE = f"{_GENERATION}.vllm_cfg.expose_http_server"


def by_http(config: Config) -> bool:
    """Whether turns come by HTTP, from NeMo-Gym."""
    return bool((config.get("env") or {}).get("should_use_nemo_gym"))


def judge(config: Config, war: WarConfig) -> Iterator[Finding]:
    """What places turns, and what does not happen then."""
    cfg, policy = config["policy"]["generation"]["vllm_cfg"], war.routing.policy
    if by_http(config):
        if not (cfg.get("async_engine") and cfg.get("expose_http_server")):
            yield fail(
                "placement",
                "NeMo-Gym asks engines by HTTP, and they have no server",
                f"set {_GENERATION}.vllm_cfg.async_engine=true and {_EXPOSE}=true",
            )
        yield _router(config)
    elif cfg.get("async_engine"):
        yield ok(
            "placement",
            f"turn by turn, by one scheduler, an actor of Ray (policy {policy})",
            placement="scheduler",
        )
    else:
        yield note(
            "placement",
            "equal shares of each batch, in an order that leaves trajectories where their KV is",
            f"{_GENERATION}.vllm_cfg.async_engine=true has turns placed one by one",
            placement="affinity",
        )


def exchange(config: Config, war: WarConfig) -> Finding:
    """Whether engines learn from each other's turns."""
    when = war.speculative.history.exchange.when
    if by_http(config) and config.get("async_rl") is not None and when != "off":
        says = (
            "none, as the single controller asks for no metrics: each engine drafts from what it ran itself"
        )
        return note("exchange", says, history_exchange="off")
    if by_http(config) and when == "live":
        says = f"{_EXCHANGES['step']}; {_EXCHANGE}=live does no more where turns come by HTTP"
        return note("exchange", says, history_exchange="step")
    return ok("exchange", _EXCHANGES[when], history_exchange=when)


def comparison(war: WarConfig) -> Finding:
    """Whether the job compares WAR with itself."""
    if war.ab_every is None:
        return ok("A/B", "none: WAR is on throughout", ab_every=None)
    return ok("A/B", f"WAR is on for {war.ab_every} steps, off for as many, and so on", ab_every=war.ab_every)


def _router(config: Config) -> Finding:
    own = ((config.get("async_rl") or {}).get("generation_router") or {}).get("enabled")
    where = "in place of NeMo-RL's own" if own else "on the node that starts NeMo-Gym"
    return ok(
        "placement",
        f"turn by turn, by an HTTP router before the engines' servers, {where}",
        placement="router",
    )
