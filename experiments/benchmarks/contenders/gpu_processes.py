"""Cases in processes of their own: started side by side, and then timed in turn while nothing else runs."""

import collections
import contextlib
import ctypes
import functools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from gpu_record import conclude
from harness import NotMeasured, Row, interleaved

from jaxnn.types import ConfigError, DataError

# What an implementation refuses on a GPU too: others of these are failures.
REFUSALS = re.compile("it takes no bias|compute capability 8.0 or above")
type Heard = queue.SimpleQueue[tuple["Worker", dict[str, Any] | None]]
# Where this process answers its parent, if it has one.
_answers: list[TextIO] = []


class Case(NamedTuple):
    """A computation, which ``what`` identifies within its part.

    ``begin`` compiles or computes it and returns what it observed, and a measure of the seconds of ``work`` in a
    ``unit``; None: there is nothing to time. ``expected`` is a range of its speed over that of the first case of its
    group, or ``"equal bits"``.
    """

    what: Mapping[str, Any]
    begin: Callable[[], tuple[dict[str, Any], Callable[[], float] | None]]
    work: float = 1.0
    unit: str = "call"
    expected: Any = None


class Process(NamedTuple):
    """Cases that a process begins one after another, in an ``environment`` of its own.

    ``command`` starts a contender in place of this program: one case, of ``work`` steps.
    """

    cases: Sequence[Case]
    environment: Mapping[str, str] = {}
    command: Sequence[str] = ()


class Group(NamedTuple):
    """Processes whose cases are timed in turn, in ``rounds``; ``then`` is what to do with the answer."""

    processes: Sequence[Process]
    rounds: int = 5
    then: str = ""


class Limits(NamedTuple):
    """How many processes may run at once, when each must have answered again, and when all ends (`time.monotonic`)."""

    processes: int
    answer_seconds: float
    until: float


class Stopped(Exception):
    """The time of a part is up."""


def say(text: str) -> None:
    """Has the parent print a line, and keep it."""
    print(json.dumps({"say": text}), file=_answers[0], flush=True)


def attempt(case: Case, kind: str) -> tuple[dict[str, Any], Callable[[], float] | None]:
    """Begins a case; an error is an answer too.

    On a CPU, an implementation may refuse the case, which then has no measurement; on a GPU only as in `REFUSALS`.
    """
    try:
        observed, measure = case.begin()
        return {"observed": observed, "timed": measure is not None}, measure
    except Exception as error:
        refused = isinstance(error, ConfigError | DataError)
        if isinstance(error, NotMeasured) or (refused and (kind != "gpu" or REFUSALS.search(str(error)))):
            return {"missing": str(error)}, None
        return {"observed": {"ok": False, "failure": in_one_line(error)}}, None


def in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def serve(process: Process, kind: str) -> None:
    """Begins the cases of this process, then measures one for each request; output of libraries goes to stderr."""
    with contextlib.suppress(AttributeError):  # Linux ends this process with the one that started it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    _answers.append(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    send = functools.partial(print, file=_answers[0], flush=True)
    sys.stdin.readline()
    measures = []
    for case in process.cases:
        answer, measure = attempt(case, kind)
        measures.append(measure)
        send(json.dumps(answer))
    for request in map(json.loads, sys.stdin):
        try:
            measure = measures[request["case"]]
            send(json.dumps({"seconds": measure and measure()}))
        except Exception as error:
            send(json.dumps({"error": in_one_line(error)}))


class Worker:
    """A process, seen by the parent: the answers of its cases so far."""

    def __init__(self, process: Process, command: Sequence[str], log: Path, heard: Heard) -> None:
        self.process, self.answers, self.since = process, list[dict[str, Any]](), time.monotonic()
        self.log, self.runs = log, queue.SimpleQueue[Any]()
        given, environment = list(process.command or command), os.environ | process.environment
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with log.open("w") as errors:
            self.child = subprocess.Popen(given, env=environment, stderr=errors, start_new_session=True, **pipes)
        self.listener = threading.Thread(target=self._listen, args=(heard,), daemon=True)
        self.listener.start()
        self._ask(command="start", steps=int(process.cases[0].work))

    def _listen(self, heard: Heard) -> None:
        """Passes on the answer of each case, then those of runs; None: the process has ended."""
        count = 0
        for answer in map(json.loads, self.child.stdout or ()):
            starting = count < len(self.process.cases)
            (heard if starting else self.runs).put((self, answer) if starting else answer)
            count += "say" not in answer
        heard.put((self, None))
        self.runs.put(None)

    def _ask(self, **request: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self.child.stdin, flush=True)

    @property
    def ready(self) -> bool:
        """Whether all cases have answered."""
        return len(self.answers) == len(self.process.cases)

    def take(self, answer: dict[str, Any] | None) -> None:
        """Takes the answer of the next case; None: the process has ended, and all of its cases."""
        self.since = time.monotonic()
        if answer is None:
            last = (self.log.read_text(errors="replace").strip().splitlines() or ["no message"])[-1]
            failure = f"the process ended with status {self.child.wait()}: {last}"
            missing = len(self.process.cases) - len(self.answers)
            self.answers += [{"observed": {"ok": False, "failure": failure}}] * missing
            return
        if self.process.command:  # a contender, whose answer is an error or its facts
            failed = answer.get("error")
            answer = {"observed": {"ok": False, "failure": failed} if failed else answer, "timed": not failed}
        self.answers.append(answer)

    def give_up(self, reason: str) -> None:
        """Ends the process, and answers in place of the cases that have not."""
        self.end()
        self.answers += [{"missing": reason}] * (len(self.process.cases) - len(self.answers))

    def run(self, number: int, until: float) -> float:
        """Returns the seconds of one run of a case, and NaN after it failed; Stopped when the time is up."""
        if not self.answers[number].get("timed"):
            return float("nan")
        self._ask(command="run", case=number)
        try:
            answer = self.runs.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise Stopped from None
        if answer is None or "seconds" not in answer:
            reason = "the process ended" if answer is None else answer["error"]
            self.answers[number] = {"observed": {"ok": False, "failure": reason}}
            return float("nan")
        if "loss" in answer:  # a contender's, of its last round
            self.answers[number]["observed"]["loss"] = answer["loss"]
        return float(answer["seconds"])

    def end(self) -> None:
        """Ends the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        self.listener.join(5)
        for pipe in (self.child.stdin, self.child.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]

    def row(self, number: int, seconds: Sequence[float] = ()) -> Row:
        """Returns the row of a case."""
        case, answer = self.process.cases[number], self.answers[number]
        times = tuple(seconds) if answer.get("timed") else ()
        return Row(case.what, times, case.work, case.unit, answer.get("observed", {}), answer.get("missing", ""))


def timed(workers: Sequence[Worker], group: Group, until: float) -> list[Row]:
    """Times the cases of a group in turn, and returns their rows with what follows from them."""
    cases = [(worker, number) for worker in workers for number in range(len(worker.process.cases))]
    measures = {
        index: functools.partial(worker.run, number, until)
        for index, (worker, number) in enumerate(cases)
        if worker.answers[number].get("timed")
    }
    seconds = interleaved(measures, rounds=group.rounds)
    rows = [worker.row(number, seconds.get(index, ())) for index, (worker, number) in enumerate(cases)]
    return conclude(rows, [worker.process.cases[number].expected for worker, number in cases], group.then)


def run_groups(
    groups: Sequence[Group],
    start: Callable[[Process, Heard], Worker],
    keep: Callable[[Sequence[Row]], None],
    limits: Limits,
    *,
    alone: bool,
) -> Iterator[str]:
    """Runs groups, keeps each row when it is done, and yields what processes say; Stopped when there is no time left.

    ``alone``: as many groups as fit become ready side by side, and are timed in turn before the next ones start.
    Otherwise nothing is timed, and the next group takes the place of one that is done.
    """
    left, running = collections.deque(groups), list[tuple[Group, list[Worker]]]()
    heard: Heard = queue.SimpleQueue()
    try:
        while left or running:
            filling = not (alone and running)
            while left and filling:
                used = sum(len(workers) for _, workers in running)
                if used and used + len(left[0].processes) > limits.processes:
                    break
                group = left.popleft()
                running.append((group, [start(process, heard) for process in group.processes]))
            yield from hear(heard, [workers for _, workers in running], keep, limits)
            done = [pair for pair in running if all(worker.ready for worker in pair[1])]
            for group, workers in [] if alone and len(done) < len(running) else done:
                rows = timed(workers, group, limits.until)
                for worker in workers:
                    worker.end()
                running.remove((group, workers))
                keep(rows)
    finally:
        for _, workers in running:
            for worker in workers:
                worker.end()


def hear(
    heard: Heard, groups: Sequence[Sequence[Worker]], keep: Callable[[Sequence[Row]], None], limits: Limits
) -> Iterator[str]:
    """Waits for the next answer and takes it, or gives up those that are late; yields what a process says."""
    waiting = [worker for workers in groups for worker in workers if not worker.ready]
    late = min(worker.since for worker in waiting) + limits.answer_seconds
    try:
        worker, answer = heard.get(timeout=max(0.0, min(late, limits.until) - time.monotonic()))
    except queue.Empty:
        if time.monotonic() >= limits.until:
            raise Stopped from None
        for worker in waiting:
            if time.monotonic() >= worker.since + limits.answer_seconds:
                worker.give_up(f"not ready in {limits.answer_seconds:.0f} s")
        return
    if answer is not None and "say" in answer:
        worker.since = time.monotonic()
        yield answer["say"]
    elif not worker.ready:
        worker.take(answer)
        last = len(worker.answers) - 1
        if [worker] in groups and not worker.answers[last].get("timed"):
            keep([worker.row(last)])
