"""vLLM's own servers, and our router in front of them, as processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from nemo_war.generation.embedded.engine import cores_of, process_environment
from tests.engine.fleets import ENGINE

MODEL = "model"
ARGUMENTS = ENGINE | {
    "dtype": "float32",  # so that greedy text does not depend on what was cached or batched
    "served_model_name": MODEL,
    "enable_prompt_tokens_details": True,
}


class Server:
    """One vLLM server on a port that it keeps; `kill` and `start` it as often as needed."""

    def __init__(self, number: int, model: Path, folder: Path) -> None:
        """Choose a port; `folder` takes its log, and its path marks its processes."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"server-{number}.log"
        arguments = ARGUMENTS | {"model": model, "host": "127.0.0.1", "port": port}
        self._flags = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in arguments.items()
        ]
        self._environment = (
            os.environ | process_environment(cores_of(number, 1)) | {"NEMO_WAR_TEST_MARK": str(folder)}
        )
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Begin to start; not by `vllm serve`, which asks for a distribution of the GPU build's name."""
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self._flags],
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    def wait(self) -> None:
        """Wait until it serves."""
        until(lambda: self._is_up() or self._process.poll() is not None, 240)
        assert self._is_up(), self.log.read_text()[-3000:]

    def kill(self) -> None:
        """End its processes without a word to anybody; the tracker of their shared memory frees that."""
        if self._process is None or self._process.poll() is not None:
            return
        server = psutil.Process(self._process.pid)
        own = [server, *server.children(recursive=True)]
        for process in [each for each in own if "resource_tracker" not in " ".join(each.cmdline())]:
            with suppress(psutil.NoSuchProcess):  # gone with its parent
                process.kill()
        self._process.wait()

    def figure(self, name: str, **labels: str) -> float:
        """Sum of one of its metrics, over the labels that are not given."""
        return figure(self.url, name, **labels)

    def _is_up(self) -> bool:
        try:
            return httpx.get(self.url + "/health").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def router(servers: Sequence[Server], policy: str, folder: Path) -> Iterator[str]:
    """`nemo-war route` in front of these servers: its URL."""
    command = [sys.executable, "-m", "nemo_war.cli", "route", "--port", "0", "--policy", policy]
    for server in servers:
        command += ["--replica", server.url]
    log = folder / f"{policy}.log"
    with log.open("w") as said:
        process = subprocess.Popen(command, stderr=said, env=os.environ | {"NEMO_WAR_TEST_MARK": str(folder)})
    try:
        until(lambda: "routing on" in log.read_text() or process.poll() is not None, 60)
        found = re.search(r"routing on (\S+)", log.read_text())
        assert found, log.read_text()
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(30) == 130, log.read_text()


def client(url: str) -> openai.OpenAI:
    """OpenAI's client, which tries once: what it sees fail has failed."""
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def figure(url: str, name: str, **labels: str) -> float:
    """Sum of a metric that a process tells, over the labels that are not given."""
    page = httpx.get(url + "/metrics").text
    samples = [each for family in text_string_to_metric_families(page) for each in family.samples]
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


def until(condition: Callable[[], Any], seconds: float) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
