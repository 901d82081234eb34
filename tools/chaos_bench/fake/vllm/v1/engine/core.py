"""The engine's own thread: steps, and between them what the client asks for.

In vLLM it is a process. A thread starts in no time, and all that a client can see is the same: nothing
is answered within a step, and an engine that hangs or fails leaves the client's event loop alone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tools.chaos_bench.faults import EngineBreaksError, Faults
from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import EngineCoreOutput, PauseState, Scheduler
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.request import Request
from vllm.v1.worker.worker import extended

_log = logging.getLogger(__name__)
_JOIN_S = 1.0
"""How long a shutdown waits for the step under way; an engine that hangs is left behind."""


class EngineCore:
    """An engine. `call`, `post` and `shutdown` are for other threads, everything else runs in its own.

    Attributes:
        dead: whether it failed for good or was shut down.
    """

    def __init__(
        self,
        config: VllmConfig,
        deliver: Callable[[list[EngineCoreOutput]], None],
        on_death: Callable[[], None],
    ) -> None:
        """Start.

        Args:
            config: of the engine.
            deliver: takes what a step brought; called in the engine's thread.
            on_death: is told that nothing more will come; called in the engine's thread.

        Raises:
            RuntimeError: it does not start, as ordered.
        """
        self._faults = Faults(config.model_config.seed)
        try:
            self._faults.at("start")
        except EngineBreaksError as error:
            raise RuntimeError("Engine core initialization failed. See root cause above.") from error
        self._worker = extended(config.parallel_config.worker_extension_cls)(config, self._faults)
        self._scheduler = Scheduler(config)
        self._deliver, self._on_death = deliver, on_death
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unanswered: set[Future[Any]] = set()
        self._when_idle: list[Future[None]] = []
        self.dead = False
        self._thread = threading.Thread(target=self._run, name="EngineCore", daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Ask for a method of this class, to be called before the next step.

        Raises:
            EngineDeadError: it is dead.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # who does not wait any longer cannot undo it
        with self._lock:
            if self.dead:
                raise EngineDeadError
            self._unanswered.add(future)
        self._commands.put(lambda: self._answer(future, method, arguments))
        return future

    def post(self, method: str, *arguments: Any) -> None:
        """The same, for those who want no answer; a dead engine hears nothing."""
        self._commands.put(lambda: getattr(self, method)(*arguments))

    def shutdown(self) -> None:
        """End the thread; may be called twice, and by any thread."""
        self._commands.put(None)
        self._thread.join(_JOIN_S)
        self._die()

    def add_request(self, request: Request) -> None:
        self._scheduler.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._scheduler.finish_requests(request_ids)

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        self._faults.at("reset")
        if self._faults.takes("refuse_reset"):
            return False
        if self._faults.takes("pretend_reset"):
            return True
        return self._scheduler.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """There are no images."""

    def reset_encoder_cache(self) -> None:
        """There are no images."""

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None]:
        """Stop letting requests in; with `keep` those that run stop, too, and with `abort` they end.

        Returns:
            When the pause is complete: nothing runs, or what runs is frozen.

        Raises:
            ValueError: there is no such mode.
        """
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"Invalid pause mode: {mode}")
        self._faults.at("pause")
        if mode == "abort":
            dropped = self._scheduler.finish_requests(None)
            self._deliver([EngineCoreOutput(name, finish_reason="abort") for name in dropped])
        self._scheduler.pause_state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        idle: Future[None] = Future()
        if clear_cache:
            idle.add_done_callback(lambda _: self._scheduler.reset_prefix_cache(True))
        self._when_idle.append(idle)
        self._settle()
        return idle

    def resume_scheduler(self) -> None:
        self._faults.at("resume")
        self._scheduler.pause_state = PauseState.UNPAUSED

    def is_scheduler_paused(self) -> bool:
        return self._scheduler.pause_state is not PauseState.UNPAUSED

    def collective_rpc(self, method: str, arguments: tuple, keywords: dict[str, Any]) -> list[Any]:
        """A method of every worker, which is one."""
        words = {method, *method.split("_")} - {"load"}  # which is a place of its own, amid the weights
        self._faults.at(*words)
        for argument in arguments:
            if isinstance(argument, str) and argument.startswith("/proc/"):
                order = {"load": "wrong_digest", "import": "damage_import"}.get(method.split("_")[1], "")
                if self._faults.takes(order):
                    _damage(argument)
        return [getattr(self._worker, method)(*arguments, **keywords)]

    def _run(self) -> None:
        try:
            while True:
                while not (self._scheduler.has_work() and self._commands.empty()):
                    command = self._commands.get()
                    if command is None:
                        return
                    command()
                    self._settle()
                self._step()
                self._settle()
        except BaseException:
            _log.exception("the engine failed")
        finally:
            self._die()

    def _step(self) -> None:
        started = time.perf_counter()
        step = self._scheduler.schedule()
        if step.scheduled:
            self._faults.at("step")
        sampled = self._worker.execute_model(step)
        told = self._scheduler.update_from_output(step, sampled)
        self._scheduler.update_draft_token_ids(self._worker.model_runner.drafts)
        if step.scheduled:
            time.sleep(max(0.0, started + self._faults.step_s - time.perf_counter()))
        if told:
            self._deliver(told)

    def _settle(self) -> None:
        """Complete the pauses that waited for nothing to run."""
        if self._when_idle and not self._scheduler.has_work():
            idle, self._when_idle = self._when_idle, []
            for future in idle:
                future.set_result(None)

    def _answer(self, future: Future[Any], method: str, arguments: tuple) -> None:
        try:
            answer = getattr(self, method)(*arguments)
        except Exception as error:  # the client gets the text only, as from another process
            text = f"Call to {method} method failed: {error}"
            self._resolve(future, lambda: future.set_exception(Exception(text)))
            return
        if isinstance(answer, Future):
            answer.add_done_callback(lambda _: self._resolve(future, lambda: future.set_result(None)))
        else:
            self._resolve(future, lambda: future.set_result(answer))

    def _resolve(self, future: Future[Any], how: Callable[[], None]) -> None:
        with self._lock:
            waited_for = future in self._unanswered
            self._unanswered.discard(future)
        if waited_for:
            how()

    def _die(self) -> None:
        with self._lock:
            told = self.dead
            self.dead = True
            unanswered, self._unanswered = self._unanswered, set()
        for future in unanswered:
            future.set_exception(EngineDeadError())
        if not told:
            self._on_death()


def _damage(path: str) -> None:
    """Change a bit of a file's last byte, which belongs to a tensor."""
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
