"""Mutation testing: changes the library in one place at a time and runs the tests that execute that place.

A development tool, not a test. Everything runs in temporary copies of the working tree::

    make mutate ARGS='--results mutations.json'               # the same command resumes
    make mutate ARGS='--results other.json --tests-from ../other/tests'

First it runs every test file unmutated and records its duration, its failures, which are deselected from then on, and
the lines of the library that it executes, in subprocesses too. Then it applies each mutation of `mutations.py` and runs
the test files that execute the statement: those named after the module, then of its package, then the fastest first.
A mutation is killed if a test fails twice, the second time alone, or if pytest crashes or exceeds its time limit.
"""

import argparse
import bisect
import collections
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mutations import AREAS, Mutation, choose

ROOT = Path(__file__).resolve().parent.parent.parent
IGNORED = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", "runs", "build", "dist")
# Put into each copy as sitecustomize.py: appends the lines of the library that a process executes to a file.
TRACER = """
import os, sys
def trace(path, library, write=os.write):
    file, monitor, tool = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), sys.monitoring, 4
    def executed(code, line):
        try:
            if code.co_filename.startswith(library):
                write(file, f"{code.co_filename.removeprefix(library)}:{line}\\n".encode())
        except OSError:  # A test limits the size of files: the next execution is tried again.
            return None
        return monitor.DISABLE
    monitor.use_tool_id(tool, "mutate")
    monitor.register_callback(tool, monitor.events.LINE, executed)
    monitor.set_events(tool, monitor.events.LINE)
if "MUTATE_TRACE" in os.environ:
    trace(os.environ["MUTATE_TRACE"], os.path.join(os.path.dirname(os.path.abspath(__file__)), "jaxnn", ""))
"""


class Copy:
    """A temporary copy of the repository to run tests in; ``tests`` replaces its tests."""

    def __init__(self, folder: Path, tests: Path) -> None:
        self.root, self.trace = folder / "repository", folder / "trace"
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=IGNORED)
        shutil.rmtree(self.root / "tests")
        shutil.copytree(tests, self.root / "tests", ignore=IGNORED)
        (self.root / "sitecustomize.py").write_text(TRACER)
        self.environment = {name: value for name, value in os.environ.items() if name != "CI"}
        self.environment |= {"PYTHONPATH": str(self.root), "XDG_CACHE_HOME": str(folder / "cache")}
        self.environment.setdefault("JAXNN_DATA", str(ROOT.parent / "shared" / "data"))
        self.command = [sys.executable, "-m", "pytest", "-q", f"--basetemp={folder / 'pytest'}"]

    def pytest(self, *arguments: str, limit: float, **environment: str) -> tuple[int | None, list[str]]:
        """Returns pytest's exit status, None if it exceeded ``limit`` seconds, and the ids of failed tests."""
        failed = self.root / ".pytest_cache" / "v" / "cache" / "lastfailed"
        failed.unlink(missing_ok=True)
        with (self.root.parent / "log").open("wb") as log:
            command, variables = [*self.command, *arguments], self.environment | environment
            process = subprocess.Popen(command, cwd=self.root, env=variables, stdout=log, stderr=log)
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                # As Ctrl-C does: tests end the processes that they started.
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()
                process.wait()
                return None, []
        names = list(json.loads(failed.read_text())) if failed.exists() else []
        if status == 2 and not names:
            raise KeyboardInterrupt
        return status, names

    def profile(self, file: str, limit: float) -> dict[str, Any]:
        """Runs a test file unmutated; returns its seconds, failed tests, and executed lines by module."""
        start = time.monotonic()
        self.trace.write_text("")
        status, failed = self.pytest(file, limit=limit, MUTATE_TRACE=str(self.trace))
        lines = collections.defaultdict(list)
        for entry in sorted(set(self.trace.read_text().splitlines())):
            module, _, line = entry.rpartition(":")
            lines[module].append(int(line))
        # Of a file that cannot be run to its end, nothing is run later.
        failed = failed if status in (0, 1, 5) else [file]
        return {"seconds": time.monotonic() - start, "failed": failed, "lines": lines}

    def judge(self, mutation: Mutation, profile: dict[str, Any], limit: float) -> dict[str, Any]:
        """Applies a mutation and runs the tests that reach it; ``killer`` is a test, a crash, a time-out, or None."""
        path, start, killer, flaky = self.root / "jaxnn" / mutation.module, time.monotonic(), None, []
        source, rest = path.read_bytes(), reaching(mutation, profile)
        num_files, skipped = len(rest), [f"--deselect={name}" for file in rest for name in profile[file]["failed"]]
        try:
            self.write(path, source[: mutation.start] + mutation.after.encode() + source[mutation.end :])
            while rest and killer is None:
                # Some two minutes of tests at a time, so that the time limit is near what they need.
                seconds = list(itertools.accumulate(profile[file]["seconds"] for file in rest))
                size = max(1, bisect.bisect(seconds, 120))
                status, failed = self.pytest("-x", *rest[:size], *skipped, limit=limit + 4 * seconds[size - 1])
                if status in (0, 5):
                    rest = rest[size:]
                elif not failed:
                    killer = "time-out" if status is None else f"exit status {status}"
                elif self.pytest(failed[0], limit=limit)[0] != 0:
                    killer = failed[0]
                else:
                    flaky.append(failed[0])
                    skipped.append(f"--deselect={failed[0]}")
                    rest = rest[rest.index(failed[0].partition("::")[0]) :]
        finally:
            self.write(path, source)
        facts = {"area": mutation.area, "mutation": str(mutation), "killer": killer, "flaky": flaky, "files": num_files}
        return facts | {"seconds": time.monotonic() - start}

    @staticmethod
    def write(path: Path, source: bytes) -> None:
        """Writes a module and removes its compiled code, whose age Python compares in whole seconds."""
        path.write_bytes(source)
        for file in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            file.unlink()


def reaching(mutation: Mutation, profile: dict[str, Any]) -> list[str]:
    """The test files that execute a mutation's statement; at module level, any function of its module."""
    stem, package = Path(mutation.module).stem.strip("_"), mutation.area
    found = [
        (stem not in Path(file).name, f"/{package}/" not in file, facts["seconds"], file)
        for file, facts in profile.items()
        if file not in facts["failed"] and not set(facts["lines"].get(mutation.module, ())).isdisjoint(mutation.lines)
    ]
    return [file for *_, file in sorted(found)]


def sources_digest(tests: Path) -> str:
    """The SHA-256 of the library and of the tests."""
    digest = hashlib.sha256()
    for folder in (ROOT / "jaxnn", tests):
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def summary(outcomes: Sequence[dict[str, Any]]) -> str:
    """The killed and all mutations by area, and how many no test executes."""
    rows = []
    for area in (*AREAS, "all"):
        mine = [outcome for outcome in outcomes if area in ("all", outcome["area"])]
        killed, unreached = (sum(map(test, mine)) for test in (lambda o: bool(o["killer"]), lambda o: not o["files"]))
        rows.append(f"{area:8} {killed:3}/{len(mine):<3} killed; {unreached} not executed")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--results", type=Path, default="mutations.json", help="JSON file of results; those in it are not run again")
    add("--count", type=int, default=80, help="number of mutations over all areas")
    add("--seed", type=int, default=0, help="another seed selects other mutations")
    add("--jobs", type=int, default=1, help="number of pytest processes at a time")
    add("--timeout", type=float, default=300, help="time limit in seconds, plus 4 times the unmutated tests")
    add("--tests-from", type=Path, default=ROOT / "tests", help="folder of tests to run instead of this tree's")
    add("--list", action="store_true", help="print the mutations and exit")
    options = parser.parse_args()
    mutations, tests = choose(ROOT, options.count, options.seed), options.tests_from
    if options.list:
        return print(*mutations, sep="\n")
    results: dict[str, Any] = {"sources": sources_digest(tests), "profile": {}, "mutations": {}}
    if options.results.exists():
        stored = json.loads(options.results.read_text())
        if stored["sources"] != results["sources"]:
            parser.error(f"{options.results} has results of other sources: check those out, or give another file")
        results = stored
    profile, done = results["profile"], results["mutations"]
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def work(task: str | Mutation) -> dict[str, Any]:
        copy = copies.get()
        try:
            if isinstance(task, str):
                return copy.profile(task, options.timeout)
            return copy.judge(task, profile, options.timeout)
        finally:
            copies.put(copy)

    def work_all(table: dict[str, Any], tasks: Mapping[str, str | Mutation]) -> None:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            futures = {pool.submit(work, task): key for key, task in tasks.items() if key not in table}
            try:
                for future in concurrent.futures.as_completed(futures):
                    key = futures[future]
                    table[key] = facts = future.result()
                    print(
                        key, json.dumps({name: value for name, value in facts.items() if name != "lines"}), flush=True
                    )
                    partial = options.results.with_suffix(".partial")
                    partial.write_text(json.dumps(results))
                    partial.replace(options.results)
            finally:
                pool.shutdown(cancel_futures=True)

    with tempfile.TemporaryDirectory(prefix="mutate") as folder:
        for index in range(options.jobs):
            copies.put(Copy(Path(folder) / str(index), tests))
        files = sorted(f"tests/{path.relative_to(tests)}" for path in tests.rglob("test_*.py"))
        work_all(profile, {file: file for file in files})
        work_all(done, {mutation.id: mutation for mutation in mutations})
    print(summary([done[mutation.id] for mutation in mutations]))


if __name__ == "__main__":
    main()
