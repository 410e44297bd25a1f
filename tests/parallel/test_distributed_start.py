"""Processes start together and end together: real ones, and the messages when one is missing, wrong or gone."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxnn as jn
from jaxnn import _compat
from jaxnn.cli import ClusterOptions
from jaxnn.parallel import Place, joined
from tests import processes, shell, tiny

COMPUTE = "while True: total(1.0)"
WAIT = "time.sleep(60)"
# Asks process 0 again and again, and computes nothing.
ASK = "vote = StopVote()\nfor window in range(6000): vote.poll(window, False), time.sleep(0.01)"
READY = "total(1.0)\nsay('here')\n"


# --- together ---


def test_processes_share_their_devices_and_end_silently() -> None:
    code = "say(total(rank + 1.0), jax.device_count(), jax.local_device_count(), is_primary(), process_count())"
    done = processes.run(code, devices=2)
    assert [(process.status, process.err) for process in done] == [(0, "")] * 2
    assert "6.0 4 2 True 2" in done[0].out and "6.0 4 2 False 2" in done[1].out


@pytest.mark.slow
def test_a_process_that_is_done_waits_for_the_others() -> None:
    with processes.start("say('here')\ntime.sleep(2 * rank)\nsay('done')") as running:
        running.wait_for("here")
        running.wait_for("done", [0])
        time.sleep(0.5)
        assert running.processes[0].poll() is None
        done = running.finish()
    assert [(process.status, process.err) for process in done] == [(0, "")] * 2


@pytest.mark.slow
def test_processes_of_the_next_run_wait_until_the_last_one_has_ended() -> None:
    where = {"coordinator": f"localhost:{processes.free_port()}"}
    with processes.start("total(1.0)\nsay('here')\ntime.sleep(3)", flags=where) as first:
        first.wait_for("here")
        with processes.start("say('next', total(1.0))", ranks=[1], flags=where) as early:
            assert [process.status for process in first.finish()] == [0, 0]
            with processes.start("say('next', total(1.0))", ranks=[0], flags=where) as late:
                done = [*early.finish(), *late.finish()]
    assert [(process.status, process.err) for process in done] == [(0, "")] * 2


@pytest.mark.slow
def test_a_proxy_for_the_web_is_not_asked() -> None:
    nowhere = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "grpc")}
    done = processes.run("say(total(1.0))", **nowhere)
    assert [(process.status, process.err) for process in done] == [(0, "")] * 2


def test_after_the_first_computation_it_is_too_late() -> None:
    tiny.fit(tiny.experiment(num_steps=1))
    place = Place(f"localhost:{processes.free_port()}", 2, 0)
    with pytest.raises(jn.ConfigError, match="a backend of JAX runs already"), joined(place):
        pass


def test_one_file_uses_private_modules_of_jax() -> None:
    sources = sorted((shell.ROOT / "jaxnn").rglob("*.py"))
    assert [path.name for path in sources if re.search(r"jax\._src|(from|import) jaxlib", path.read_text())] == [
        "_compat.py"
    ]


def test_jax_with_other_internals_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _compat.coordination_client() is None
    for name in [name for name in os.environ if name.startswith(processes.FOREIGN)]:
        monkeypatch.delenv(name)
    assert _compat.detect_cluster(1) == (None, None, None)
    for module, call in (("distributed", _compat.coordination_client), ("clusters", lambda: _compat.detect_cluster(1))):
        monkeypatch.setitem(sys.modules, f"jax._src.{module}", None)
        with pytest.raises(jn.ConfigError, match=r"several processes do not work with jax .*: install jax"):
            call()


# --- missing, and wrong ---


OLDER = "jax.__version__ = '0.0.1'\n"


def flags(rank: int, count: int = 2, before: str = "", **more: Any) -> tuple[dict[str, Any], str]:
    """The place of a process, and what it does before it joins."""
    return {"process_id": rank, "num_processes": count, **more}, before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "status", "words"),
    [
        (
            [flags(0, 4, start_timeout=4.0), flags(2, 4, start_timeout=4.0)],
            1,
            "processes 1, 3 of 4 did not start: look",
        ),
        ([flags(1, start_timeout=1.0)], 1, "process 1 waited 1 s, and process 0 did not start: nothing answered at l"),
        ([flags(0, 3), flags(1, 3), flags(1, 3)], 2, "two processes say that they are process 1, on .* and on "),
        ([flags(0), flags(1, 3)], 2, "process 1 on .* with --num-processes 3, and process 0 with --num-processes 2"),
        ([flags(0, 3), flags(1)], 2, "process 1 on .* with --num-processes 2, and process 0 with --num-processes 3"),
        ([flags(0), flags(1, before=OLDER)], 2, "process 1 on .* was started with jax 0.0.1, and process 0 with jax"),
    ],
    ids=["missing", "missing-0", "twice", "more", "fewer", "versions"],
)
def test_what_does_not_fit_together_is_reported_by_all(
    places: list[tuple[dict[str, Any], str]], status: int, words: str
) -> None:
    where = {"coordinator": f"localhost:{processes.free_port()}"}
    with contextlib.ExitStack() as stack:
        starting = [
            stack.enter_context(
                processes.start("say('never')", flags=where | own, ranks=[own["process_id"]], before=before)
            )
            for own, before in places
        ]
        done = [process for running in starting for process in running.finish()]
    for process in done:
        assert process.status == status and process.err.startswith("error: ") and process.err.count("\n") == 1, process
        assert re.search(words, process.err) and "never" not in process.out, process


@pytest.mark.slow
def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        (done,) = processes.run("say('never')", ranks=[0], flags={"coordinator": f"localhost:{port}"})
    assert done.status == 2 and f"listen on port {port} of this machine, which is in use" in done.err


# --- strangers ---


class Stranger:
    """A client of process 0 that is none of its processes."""

    def __init__(self, port: int) -> None:
        self.port = port

    def connect(self) -> socket.socket:
        """A connection to a process 0 that is about to listen."""
        for _ in range(1000):
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", self.port), timeout=20)
            time.sleep(0.02)
        raise AssertionError("nothing listens")

    def says(self, words: bytes) -> None:
        with self.connect() as stranger, contextlib.suppress(OSError):
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):
                pass

    def greets(self, secret: str, count: int = 2, rank: object = 1, host: object = "node", kind: str = "join") -> bytes:
        """A greeting as a process would send it, for those who know the protocol; what process 0 answers."""
        version = jax.__version__
        message = {"kind": kind, "rank": rank, "host": host, "greeting": {"--num-processes": count, "jax": version}}
        with self.connect() as stranger, stranger.makefile("rb") as lines, contextlib.suppress(OSError):
            nonce = json.loads(lines.readline())["nonce"]
            signed = json.dumps([nonce, message], sort_keys=True).encode()
            proof = hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
            stranger.sendall(json.dumps({**message, "proof": proof}).encode() + b"\n")
            return lines.readline()
        return b""


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(1000),
    b"\x00" * 1_000_000,
    b"\xff\xfe\x1b[31m\n",
    b"[" * 10_000 + b"\n",
    b"[]\n",
    b'{"kind": "join"}\n',
    b'{"kind": "join", "rank": 1, "host": 7, "greeting": [], "proof": {"a": "\\ud800"}}\n',
    b'{"kind": "jax", "proof": "\xc3\xa9\\ud800"}\n',
    b"",
]


@pytest.mark.slow
def test_strangers_neither_end_nor_hang_a_run() -> None:
    port = processes.free_port()
    stranger = Stranger(port)
    where = {"coordinator": f"127.0.0.1:{port}", "start_timeout": 60.0}
    environment = {"JAXNN_CLUSTER_SECRET": "known to two"}
    code = f"{READY}time.sleep(2)\nsay('done', total(1.0))"
    hanging: list[socket.socket] = []

    def attack() -> None:
        for words in GARBAGE:
            stranger.says(words)
        for kind in ("join", "jax"):
            assert stranger.greets("guessed", kind=kind) == b""
            assert stranger.greets("guessed", count=7, host="\x1b[31m", kind=kind) == b""
        hanging.extend(stranger.connect() for _ in range(300))

    with contextlib.ExitStack() as stack:
        first = stack.enter_context(processes.start(code, ranks=[0], flags=where, **environment))
        attack()
        second = stack.enter_context(processes.start(code, ranks=[1], flags=where, **environment))
        first.wait_for("here")
        # Once all have joined nothing listens there.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        done = [*first.finish(), *second.finish()]
        for connection in hanging:
            connection.close()
    assert [(process.status, process.err) for process in done] == [(0, "")] * 2, done
    assert all("done" in process.out for process in done)


@pytest.mark.slow
def test_what_a_process_says_of_itself_is_printed_without_control_characters() -> None:
    port = processes.free_port()
    with processes.start("say('never')", ranks=[0], flags={"coordinator": f"127.0.0.1:{port}"}) as running:
        answer = Stranger(port).greets("", count=3, host="\x1b[2J\x07node\r\n\u202eevil" * 100)
        done = running.finish()[0]
    assert b"refused" in answer
    assert done.status == 2 and "with --num-processes 3" in done.err and done.err.count("\n") == 1
    assert done.err.rstrip("\n").isprintable() and len(done.err) < 1000


@pytest.mark.slow
def test_a_process_with_another_secret_does_not_join() -> None:
    where = {"coordinator": f"127.0.0.1:{processes.free_port()}", "start_timeout": 6.0}
    with contextlib.ExitStack() as stack:
        starting = [
            stack.enter_context(processes.start("say('never')", ranks=[rank], flags=where, JAXNN_CLUSTER_SECRET=secret))
            for rank, secret in enumerate(("one", "other"))
        ]
        done = [process for running in starting for process in running.finish()]
    assert [process.status for process in done] == [1, 1]
    assert all("JAXNN_CLUSTER_SECRET" in process.err and process.err.count("\n") == 1 for process in done), done


@pytest.mark.slow
def test_process_0_listens_on_the_interface_of_its_address_alone() -> None:
    port = processes.free_port()
    # Linux has all of 127.0.0.0/8 on the loopback interface.
    with processes.start("say('never')", ranks=[0], flags={"coordinator": f"127.0.0.1:{port}"}):
        Stranger(port).connect().close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))


# --- gone ---


def lose(killed: int, code: str, count: int = 2, pause: float = 0.0, seconds: float = 20.0) -> list[processes.Done]:
    """How all others end when one process is killed ``pause`` seconds after all have said ``here``."""
    with processes.start(code, count) as running:
        running.wait_for("here")
        time.sleep(pause)
        running.signal(killed)
        return survivors(running.finish(seconds), killed)


def survivors(done: list[processes.Done], killed: int) -> list[processes.Done]:
    assert done[killed].status == -signal.SIGKILL
    others = [process for process in done if process.rank != killed]
    for process in others:
        assert process.status == 75 and process.err.count("\n") <= 1, process
    return others


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("doing", [COMPUTE, *(pytest.param(doing, marks=pytest.mark.slow) for doing in (WAIT, ASK))])
def test_a_killed_process_is_named_by_the_other_which_ends_resumably(killed: int, doing: str) -> None:
    code = f"set_resume_hint('go on with --resume runs/x')\n{READY}{doing}"
    (other,) = lose(killed, code, seconds=10 if doing == COMPUTE else 20)
    assert other.err.startswith(f"error: process {killed} on ")
    assert other.err.endswith(" is gone (its connection closed): go on with --resume runs/x.\n")


@pytest.mark.slow
@pytest.mark.parametrize(("count", "killed"), [(3, 0), (4, 0), (4, 2)])
def test_all_others_end_resumably_when_one_of_several_is_killed(count: int, killed: int) -> None:
    assert all(f"process {killed} on " in process.err for process in lose(killed, f"{READY}{COMPUTE}", count))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_done_does_not_wait_for_one_that_is_killed(killed: int) -> None:
    (other,) = lose(killed, f"{READY}if rank == {killed}: {WAIT}", pause=0.5)
    assert f"process {killed} on " in other.err


@pytest.mark.slow
def test_a_process_whose_output_is_not_read_ends_too() -> None:
    deaf = "ends = os.pipe()\nos.close(ends[0])\nos.dup2(ends[1], 1)\nos.dup2(ends[1], 2)\n"
    lose(0, f"say('here')\n{deaf}time.sleep(1)\n{WAIT}")


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_process_is_gone_after_the_bound(silent: int) -> None:
    with processes.start(f"{READY}{COMPUTE}", flags={"lost_after": 1.5}) as running:
        running.wait_for("here")
        running.signal(silent, signal.SIGSTOP)
        running.processes[1 - silent].wait(30)
        running.signal(silent)
        (other,) = survivors(running.finish(), silent)
    assert f"process {silent} on " in other.err
    assert "is gone (nothing was heard of it for 1.5 s): what was saved before is intact" in other.err


@pytest.mark.slow
def test_sigterm_outside_of_training_ends_all_processes_to_be_started_again() -> None:
    with processes.start(f"say('here')\n{WAIT}") as running:
        running.wait_for("here")
        running.signal(1, signal.SIGTERM)
        done = running.finish()
    assert [process.status for process in done] == [75, 75], done
    assert done[1].err.startswith("interrupted before")


DATA_ERROR = "total(1.0)\nif rank == {}: raise jn.DataError('no data here.')\n{}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (DATA_ERROR.format(1, COMPUTE), 2, ["process 1 failed: no data here.", "no data here."]),
        (DATA_ERROR.format(0, COMPUTE), 2, ["no data here.", "process 0 failed: no data here."]),
        (DATA_ERROR.format(1, WAIT), 2, ["process 1 failed: no data here.", "no data here."]),
        ("total(1.0)\nraise jn.TrainingError('the loss is nan.')", 1, ["the loss is nan."] * 2),
        (f"total(1.0)\nif rank == 1: 1 / 0\n{COMPUTE}", 1, ["process 1 failed: ZeroDivisionError.", None]),
    ],
    ids=["one", "first", "waiting", "all", "defect"],
)
def test_error_of_one_process_ends_all_with_its_status_and_message(code: str, status: int, said: list[Any]) -> None:
    done = processes.run(code)
    assert [process.status for process in done] == [status] * 2
    for process, message in zip(done, said, strict=True):
        if message is None:
            assert "Traceback" in process.err and process.err.endswith("ZeroDivisionError: division by zero\n")
        else:
            assert process.err == f"error: {message}\n"


# --- flags ---


FLAGS = ["--coordinator", "node:1", "--num-processes", "2", "--process-id", "0"]


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--distributed"],
            "no cluster started this process; looked for SLURM .*Open MPI.*Kubernetes.*Cloud TPU.*--coor",
        ),
        (["--distributed", *FLAGS], "--distributed detects the values of --coordinator .*: give either it or them"),
        (FLAGS[:2], "^error: --num-processes and --process-id must be given too: --coordinator HOST:PORT"),
        (FLAGS[2:], "^error: --coordinator must be given too"),
        ([*FLAGS[:5], "2"], "^error: process_id is 2, and must be one of 0 to 1, since there are 2 processes"),
        ([*FLAGS, "--process-id", "-1"], "^error: process_id is -1"),
        ([*FLAGS, "--num-processes", "1"], "^error: num_processes is 1, and a run of several has at least 2"),
        ([*FLAGS, "--coordinator", "node"], "^error: the coordinator is 'node', and must be HOST:PORT"),
        ([*FLAGS, "--coordinator", "node:port"], "^error: the coordinator is 'node:port'"),
        ([*FLAGS, "--coordinator", "node:70000"], "^error: the coordinator is 'node:70000'"),
        ([*FLAGS, "--start-timeout", "0"], "^error: start_timeout is 0.0 seconds, and must be more than 0"),
        ([*FLAGS, "--lost-after", "nan"], "^error: lost_after is nan seconds"),
        (["sweep", "--seed", "0", "1", "--distributed"], "^error: --distributed makes one run of several.*--shard I/N"),
        (["plan", "--process-id=1"], "^error: --process-id makes one run of several processes, and plan is for one"),
    ],
)
def test_a_mistake_in_the_flags_is_named(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith(processes.FOREIGN)]:
        monkeypatch.delenv(name)
    said = shell.fails(capsys, lambda words: jn.main(tiny.experiment(), words), *arguments)
    assert re.search(words, said), said


# --- clusters ---


def cluster(kind: str, port: int, rank: int, count: int) -> dict[str, str]:
    """The variables that a task of a cluster finds, as far as JAX reads them; they make the port."""
    job = port - 61440
    if kind == "slurm":
        names = {"JOB_ID": job, "STEP_NODELIST": "localhost", "NTASKS": count, "PROCID": rank, "LOCALID": rank}
        return {f"SLURM_{name}": str(value) for name, value in names.items()}
    names = {"SIZE": count, "RANK": rank, "LOCAL_RANK": rank}
    uri = f"{4096 * job}.0;tcp://127.0.0.1:34911"
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {"OMPI_MCA_orte_hnp_uri": uri}


@pytest.mark.parametrize("kind", ["slurm", "open mpi"])
def test_the_processes_of_a_cluster_find_each_other(kind: str) -> None:
    port = processes.free_port(61440, 65535)
    tasks = [cluster(kind, port, rank, 2) for rank in range(2)]
    alone = {"coordinator": None, "num_processes": None, "process_id": None, "distributed": True}
    done = processes.run("say(total(rank + 1.0), jax.process_count())", flags=alone, variables=tasks)
    assert [(process.status, process.err) for process in done] == [(0, "")] * 2
    assert all("3.0 2" in process.out for process in done)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (cluster("slurm", 62000, 0, 1), "num_processes is 1, and a run of several has at least 2"),
        (cluster("slurm", 62000, 0, 2) | {"SLURM_NTASKS": "2(x3)"}, "--distributed: invalid literal .*'2.x3.'"),
        (
            cluster("open mpi", 62000, 0, 2) | {"OMPI_VERSION": "5.0.1"},
            "--distributed: Open MPI 5 or newer requires mpi4py",
        ),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            "--distributed: Kubernetes environment detected, but the `kubernetes`",
        ),
    ],
)
def test_a_cluster_that_cannot_be_asked_is_named(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(processes.FOREIGN)]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(jn.ConfigError, match=words):
        ClusterOptions(distributed=True).place()


# --- the scripts of the documentation ---

SCRIPT = """
import os
import sys
import jax
from jaxnn.cli import exit_on_user_error, parse_run, processes
from jaxnn.parallel import broadcast_from_primary
from tests import tiny
with exit_on_user_error():
    config, options, cluster = parse_run(tiny.experiment(), sys.argv[1:])
    with processes(cluster):
        found = options.run_dir or f"resumed {options.resume}"
        told = (cluster.process_id, found, config.num_steps, jax.process_count(), broadcast_from_primary(lambda: "led"))
        # At once, for all write to one pipe.
        os.write(1, (" ".join(map(str, told)) + chr(10)).encode())
sys.exit(config.seed)
"""
# The same, until one process is told to stop.
ENDLESS = """
        import signal
        from jaxnn.parallel import StopVote, all_agree
        asked, vote, window = [], StopVote(), 0
        signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
        os.write(1, b"trains" + bytes([10]))
        while not vote.poll(window, bool(asked)):
            all_agree("window", {})
            window += 1
sys.exit(75)
"""


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """Stand-ins for the commands of clusters, and a script that joins and says what it was told."""
    (tmp_path / "joins.py").write_text(SCRIPT)
    texts = {
        # As many tasks as the job has, side by side, each with the variables of its own; the highest status is srun's.
        "srun": """
            test "$1" = --cpus-per-task=4 || exit 9
            shift
            worst=0
            for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks="$tasks $!"; done
            for task in $tasks; do wait $task || worst=$?; done
            exit $worst
        """,
        "scontrol": 'echo "scontrol $*"',
        "ssh": 'test "$1" = -n && shift 2 && exec bash -c "$*"',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{textwrap.dedent(text)}")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def environment(commands: Path, **variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    run_dir = str(commands / "a run")
    return {"PATH": path, "RUN_DIR": run_dir, "SCRIPT": str(commands / "joins.py"), "JAX_PLATFORMS": "cpu", **variables}


def finish(command: list[object], **variables: str) -> processes.Done:
    with processes.started([command], **variables) as running:
        return running.finish()[0]


def test_the_slurm_script_starts_a_run_and_goes_back_to_the_queue_if_it_was_interrupted(commands: Path) -> None:
    port = processes.free_port(61440, 65535)
    variables = cluster("slurm", port, 0, 2) | {"SLURM_CPUS_PER_TASK": "4"}
    done = finish(["docs/slurm_run.sh", "--num-steps", 7, "--seed", 75], **environment(commands, **variables))
    assert done.status == 75, done
    assert done.out.count(f"None {commands / 'a run'} 7 2 led\n") == 2
    assert f"scontrol requeue {port - 61440}" in done.out


@pytest.mark.parametrize("status", [0, 2, 137])
def test_the_slurm_script_is_over_with_any_other_status(commands: Path, status: int) -> None:
    (commands / "srun").write_text(f"#!/bin/sh\nexit {status}\n")
    done = finish(["docs/slurm_run.sh"], **environment(commands, SLURM_CPUS_PER_TASK="4", SLURM_JOB_ID="7"))
    assert done.status == status and "scontrol" not in done.out


@pytest.mark.slow
def test_the_ssh_script_starts_a_run_and_goes_on_with_it(commands: Path) -> None:
    tiny.fit(tiny.experiment(num_steps=1), commands / "a run")
    where = {"HOSTS": "localhost 127.0.0.1", "PORT": str(processes.free_port()), "PYTHON": sys.executable}
    done = finish(["docs/ssh_run.sh", "--num-steps", 9], **environment(commands, FOLDER=str(shell.ROOT), **where))
    assert done.status == 0, done
    said = f"resumed {commands / 'a run'} 9 2 led\n"
    assert f"0 {said}" in done.out and f"127.0.0.1: 1 {said}" in done.out
    assert not list(shell.ROOT.glob(".ssh_run.*"))


@pytest.mark.slow
def test_the_ssh_script_hands_on_the_signal_to_stop_and_the_status(commands: Path) -> None:
    (commands / "joins.py").write_text(SCRIPT.rpartition("sys.exit")[0] + ENDLESS)
    where = {"HOSTS": "localhost localhost", "PORT": str(processes.free_port()), "PYTHON": sys.executable}
    with processes.started([["docs/ssh_run.sh"]], **environment(commands, FOLDER=str(shell.ROOT), **where)) as running:
        running.wait_for("localhost: trains")
        running.wait_for("\ntrains")
        running.signal(0, signal.SIGTERM)
        done = running.finish()[0]
    assert done.status == 75 and done.err == "", done


def test_the_pods_of_the_job_start_a_run(commands: Path) -> None:
    import yaml

    service, job = yaml.safe_load_all((shell.ROOT / "docs" / "kubernetes_run.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    # What Kubernetes makes of them: pod 0 is JOB-0.SUBDOMAIN, where the service of that name selects the job's pods.
    name = job["metadata"]["name"]
    assert given["COORDINATOR"].startswith(f"{name}-0.{pod['subdomain']}:")
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["selector"] == {"job-name": name}
    assert int(given["NUM_PROCESSES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    here = {"COORDINATOR": f"127.0.0.1:{processes.free_port()}", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    everywhere = environment(commands, **given | here | environment(commands))
    indices = [{"JOB_COMPLETION_INDEX": str(index)} for index in range(2)]
    with processes.started([container["command"]] * 2, *indices, **everywhere) as running:
        done = running.finish()
    assert [(pod.status, pod.err) for pod in done] == [(0, "")] * 2
    assert [f"{index} {commands / 'a run'} 20 2 led\n" in done[index].out for index in range(2)] == [True, True]
