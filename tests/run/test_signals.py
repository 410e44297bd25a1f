"""SIGINT and SIGTERM within a run: the first asks to stop, the second stops at once, and handlers are restored."""

from __future__ import annotations

import signal
import threading

import pytest

from jaxnn.run import Interruption, interruptible


def test_the_first_signal_is_a_wish_and_the_second_stops_at_once() -> None:
    with interruptible() as interruption, interruption.finishing("the window"):
        assert interruption.signum is None
        signal.raise_signal(signal.SIGTERM)
        assert interruption.signum == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back_whatever_happens() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), interruptible():
        assert signal.getsignal(signal.SIGINT) != before[0]
        raise RuntimeError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_thread_that_cannot_catch_signals_runs_all_the_same() -> None:
    seen: list[Interruption] = []

    def work() -> None:
        with interruptible() as interruption:
            seen.append(interruption)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [interruption.signum for interruption in seen] == [None]
