"""What a process knows of the others: a thread that waits for them, hears of their end, and ends this process too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Coroutine
from typing import Any

import jax

from jaxnn.parallel.processes.ending import LOST, Ending
from jaxnn.parallel.processes.hub import Hub
from jaxnn.parallel.processes.member import Member
from jaxnn.parallel.processes.place import Place

# When another process has ended, this one has so long to end in its own way: a collective of CPUs fails at once, one of
# GPUs may wait for ever.
GRACE_SECONDS = 10.0
# How long the last process may take after the first is done: it may have a record to complete.
FINISH_SECONDS = 600.0
# How long a word to another process may take on its way.
SEND_SECONDS = 2.0
ADVICE = "what was saved before is intact: go on with --resume and the directory of the run"


class Peers:
    """The other processes of a run.

    Args:
        place: this process's place among them.

    Attributes:
        advice: what to do when one is lost, for the sentence that says so.
    """

    def __init__(self, place: Place) -> None:
        self.advice = ADVICE
        self._ending: Ending | None = None
        self._heard = threading.Event()
        self._spoken = threading.Lock()
        greeting = {"--num-processes": place.num_processes, "jax": jax.__version__}
        kind = Hub if place.process_id == 0 else Member
        self._line: Hub | Member = kind(place, greeting, self._hear)
        ready = threading.Event()
        # A daemon: it must not keep alive a process that wants to end.
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live(ready)), name="peers", daemon=True)
        self._thread.start()
        ready.wait()

    def join(self) -> str:
        """Waits until all processes have started; where this one reaches JAX's coordination service.

        Raises:
            ConfigError: the processes do not fit together, or the port is taken.
            TrainingError: some did not start in time.
        """
        return self._call(self._line.join())

    def ending(self, seconds: float = 0.0) -> Ending | None:
        """The first end of another process, if it was heard of or is within ``seconds``."""
        self._heard.wait(seconds)
        return self._ending

    def finish(self) -> bool:
        """Waits until all processes are done; False: another one ended, or is not done for very long."""
        return self._call(self._finish())

    def fail(self, status: int, sentence: str) -> None:
        """Tells the others that this process ends with ``status``, and sees to it that it does."""
        self._loop.call_soon_threadsafe(self._loop.call_later, GRACE_SECONDS, os._exit, status)
        self._call(self._within(self._line.fail(status, sentence), SEND_SECONDS))

    def close(self) -> None:
        """Ends the connections, once the other ends need them no more."""
        self._call(self._within(self._line.close(), GRACE_SECONDS))
        self.stop()

    def stop(self) -> None:
        """Drops the connections."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(SEND_SECONDS)

    def say(self, ending: Ending) -> bool:
        """Says on standard error why this process ends, unless it was said; whether it was not."""
        if not self._spoken.acquire(blocking=False):
            return False
        advice = f": {self.advice}" if ending.status == LOST else ""
        # Who read what this process says may have ended before it.
        with contextlib.suppress(OSError):
            os.write(2, f"error: {ending.sentence}{advice}.\n".encode())
        return True

    async def _live(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._ended = asyncio.Event()
        ready.set()
        await self._stopped.wait()
        self._line.stop()
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        # What they closed is so after the next turn of the loop.
        await asyncio.sleep(0)

    def _hear(self, ending: Ending) -> None:
        if self._ending is None:
            self._ending = ending
            self._ended.set()
            self._heard.set()
            self._loop.call_later(GRACE_SECONDS, self._end, ending)

    def _end(self, ending: Ending) -> None:
        """The end of this process, from beside a main thread that may wait for ever."""
        try:
            if self.say(ending):
                # What was printed is worth a second, but no more: the main thread may hold the lock of the stream.
                flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
                flushing.start()
                flushing.join(1.0)
        finally:
            os._exit(ending.status)

    async def _finish(self) -> bool:
        finished, ended = asyncio.ensure_future(self._line.finish()), asyncio.ensure_future(self._ended.wait())
        await asyncio.wait((finished, ended), timeout=FINISH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        return finished.done() and not ended.done()

    async def _within(self, coroutine: Coroutine[Any, Any, None], seconds: float) -> None:
        await asyncio.wait((asyncio.ensure_future(coroutine),), timeout=seconds)

    def _call[Result](self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``coroutine``, which runs in the thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
