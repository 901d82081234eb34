from pydantic import BaseModel

_GYM_RETRY_STATUSES = frozenset({429, 500, 502, 503, 504, 520})


class GenerationRouterConfig(BaseModel):
    enabled: bool = False
    port_range_low: int = 6000
    port_range_high: int = 6099
    backend_timeout_s: float = 600.0
    connect_timeout_s: float = 5.0
    no_healthy_backend_status: int = 409
