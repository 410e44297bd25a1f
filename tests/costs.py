"""What tests cost: wall and CPU time, with processes that they start, and compiled programs; see ``--costs``."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import pytest

NAMES = ("wall", "cpu", "programs", "compiling")
COMPILED = "/jax/core/compile/backend_compile_duration"


class Costs:
    """Plugin that measures each test and prints the most expensive ones, with what fixtures cost their first test."""

    def __init__(self, config: pytest.Config, most: int) -> None:
        self._most = most
        self._file = config.getoption("--costs-to")
        self._is_worker = hasattr(config, "workerinput")
        self._start = self._now()
        self._compiled = Counter[str]()
        self._tests: dict[str, dict[str, float]] = {}
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, seconds: float, **_: Any) -> None:
        # JAX reports it for programs of its cache too, which take milliseconds.
        if event == COMPILED:
            self._compiled.update(programs=1, compiling=seconds)

    def _now(self) -> dict[str, float]:
        return {"wall": time.perf_counter(), "cpu": sum(os.times()[:4]), **getattr(self, "_compiled", {})}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._start = self._now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if report.when == "teardown":
            now = self._now()
            cost = {name: now.get(name, 0) - self._start.get(name, 0) for name in NAMES}
            report.user_properties = [*report.user_properties, ("cost", cost)]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" and not self._is_worker:
            self._tests[report.nodeid] = dict(report.user_properties)["cost"]  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._is_worker:
            return
        files: dict[str, Counter[str]] = {}
        for test, cost in self._tests.items():
            files.setdefault(test.partition("::")[0], Counter()).update(cost)
        for title, rows in (("tests", self._tests), ("files", files)):
            ordered = sorted(rows.items(), key=lambda row: -row[1]["cpu"])[: self._most]
            terminalreporter.section(f"the {len(ordered)} most expensive {title}")
            self._write(terminalreporter, [*ordered, ("all", _total(rows.values()))])
        if self._file:
            stats = {
                kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "failed", "error", "skipped")
            }
            with open(self._file, "a") as file:
                file.write(json.dumps(stats | _total(self._tests.values())) + "\n")

    @staticmethod
    def _write(terminal: Any, rows: Sequence[tuple[str, Any]]) -> None:
        terminal.write_line(f"{'CPU s':>8} {'wall s':>8} {'programs':>8} {'compiling s':>11}")
        for name, cost in rows:
            numbers = f"{cost['cpu']:8.1f} {cost['wall']:8.1f} {cost['programs']:8.0f} {cost['compiling']:11.1f}"
            terminal.write_line(f"{numbers}  {name}")


def _total(costs: Any) -> dict[str, float]:
    return {name: sum(cost[name] for cost in costs) for name in NAMES}
