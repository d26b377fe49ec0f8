"""A few threads that keep no process from ending: one that waits for a host which went dark is not waited for."""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")
_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Threads:
    """At most so many, which are started when there is something to do."""

    def __init__(self, most: int, name: str) -> None:
        self.most, self._name = most, name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock, self._started, self._closed = threading.Lock(), 0, False
        self._free = 0  # threads that wait for a task, less those tasks that wait for one

    def submit(self, fn: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        """Have `fn` called on one of them. Once they are closed: never, and the future is cancelled."""
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                _cancel(future)
                return future
            self._free -= 1
            if self._free < 0 and self._started < self.most:
                self._started += 1
                self._free += 1
                threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True).start()
            self._tasks.put((future, fn, arguments))
        return future

    def close(self) -> None:
        """Begin nothing more: what waits is cancelled, what has begun goes on. Waits for nothing."""
        with self._lock:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while task := self._tasks.get_nowait():
                    _cancel(task[0])
            for _ in range(self._started):
                self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, fn, arguments = task
            if self._closed:
                _cancel(future)
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*arguments))
                except BaseException as error:
                    future.set_exception(error)
            with self._lock:
                self._free += 1


def _cancel(future: "Future[Any]") -> None:
    """What waits for it is told: `cancel` alone tells nothing to `concurrent.futures.wait`."""
    if future.cancel():
        future.set_running_or_notify_cancel()
