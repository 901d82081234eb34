from __future__ import annotations

from typing import Any


class GenerationRouterImpl:
    def __init__(
        self,
        *,
        backend_urls: list[str],
        host: str,
        port: int,
        backend_timeout_s: float,
        connect_timeout_s: float,
        no_healthy_backend_status: int,
        health_managed: bool = False,
    ) -> None:
        pass

    def base_url(self) -> str:
        raise NotImplementedError

    def set_serving_backends(self, urls: list[str]) -> None:
        raise NotImplementedError

    def drain_backend_failures(self) -> dict[str, int]:
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        raise NotImplementedError

    def is_serving(self) -> bool:
        raise NotImplementedError

    def build_app(self) -> Any:
        raise NotImplementedError

    def _on_backend_error(self, backend: str, error: BaseException) -> Any:
        raise NotImplementedError
