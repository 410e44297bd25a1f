"""Processes start together and end together: real ones, and the sentences where one is missing, wrong or gone."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxnn as jn
from jaxnn.cli.cluster import ClusterOptions
from jaxnn.parallel.processes import Peers, Place, start_processes
from jaxnn.parallel.processes import peers as peers_module
from tests import processes, shell, tiny

# Shorter than for users: how long a process may take to end in its own way when another has ended.
QUICKLY = "peers.GRACE_SECONDS = 1.0\n"
COMPUTE = "while True: total(1.0)"
WAIT = "time.sleep(60)"


# --- together ---


def test_processes_share_their_devices_and_end_in_silence() -> None:
    code = "say(total(rank + 1.0), jax.device_count(), jax.local_device_count(), is_leader(), process_count())"
    done = processes.run(code, devices=2)
    assert [(process.status, process.err) for process in done] == [(0, "")] * 2
    assert "6.0 4 2 True 2" in done[0].out and "6.0 4 2 False 2" in done[1].out


def test_who_is_done_waits_for_the_others() -> None:
    done = processes.run(
        """
from jaxnn.parallel.processes import runtime
leave = runtime.shutdown
runtime.shutdown = lambda: (say("left at", time.time()), leave())
time.sleep(rank)
"""
    )
    assert [(process.status, process.err) for process in done] == [(0, "")] * 2
    first, second = (float(process.out.rpartition("left at")[2]) for process in done)
    assert abs(first - second) < 0.5


def test_four_processes_join() -> None:
    done = processes.run("say(total(2.0**rank), from_leader(lambda: rank))", 4)
    assert [(process.status, process.err) for process in done] == [(0, "")] * 4
    assert all("15.0 0" in process.out for process in done)


@pytest.mark.slow
def test_two_runs_may_follow_each_other_at_one_address() -> None:
    where = {"coordinator": f"127.0.0.1:{processes.free_port()}"}
    for _ in range(2):
        done = processes.run("say(total(1.0))", flags=where)
        assert [process.status for process in done] == [0, 0]


def test_a_proxy_for_the_web_is_not_asked() -> None:
    nowhere = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "grpc")}
    done = processes.run("say(total(1.0))", **nowhere)
    assert [(process.status, process.err) for process in done] == [(0, "")] * 2


def test_sigterm_ends_a_process_as_ever_outside_of_training() -> None:
    with processes.start(f"{QUICKLY}say('here')\n{WAIT}") as running:
        running.wait_for("here")
        running.signal(1, signal.SIGTERM)
        done = running.finish()
    assert done[1].status == -signal.SIGTERM and done[0].status == 75


# --- missing, and wrong ---


def test_who_does_not_start_is_named_by_all_who_did() -> None:
    done = processes.run("say('never')", 4, ranks=[0, 2], flags={"start_timeout": 1.5})
    sentence = "error: process 0 waited 1.5 s, and processes 1, 3 did not start: "
    for process in done:
        assert process.status == 1 and process.err.startswith(sentence) and process.err.count("\n") == 1
        assert "never" not in process.out


def test_a_missing_first_process_is_named() -> None:
    done = processes.run("say('never')", ranks=[1], flags={"start_timeout": 1.0})
    assert done[0].status == 1 and done[0].err.count("\n") == 1
    assert done[0].err.startswith("error: process 1 waited 1 s, and process 0 did not start: nothing answered at 127.")


@contextlib.contextmanager
def waiting(*places: Place) -> Iterator[list[concurrent.futures.Future[str]]]:
    """Processes that wait for each other, without JAX and within this one: the address they find, or an error."""
    everyone = [Peers(place) for place in places]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield [pool.submit(peers.join) for peers in everyone]
        for peers in everyone:
            peers.stop()


def place(rank: int, count: int = 2, port: int = 0, **how: Any) -> Place:
    return Place(f"localhost:{port}", count, rank, **{"start_timeout": 5.0, **how})


def test_the_roll_is_called_in_any_order() -> None:
    port = processes.free_port()
    with waiting(place(2, 3, port), place(1, 3, port), place(0, 3, port)) as joining:
        addresses = {future.result() for future in joining}
    assert len(addresses) == 3 and all(address.startswith("127.0.0.1:") for address in addresses)


def test_two_processes_of_one_rank_are_told_so() -> None:
    port = processes.free_port()
    with waiting(place(0, 3, port), place(1, 3, port), place(1, 3, port)) as joining:
        for future in joining:
            with pytest.raises(jn.ConfigError, match="^two processes say that they are process 1, on .* and on .*"):
                future.result()


def test_processes_started_unlike_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    port = processes.free_port()
    sentence = "process 1 on .* was started with --num-processes 3, and process 0 with --num-processes 2: start all"
    with waiting(place(0, 2, port), place(1, 3, port)) as joining:
        for future in joining:
            with pytest.raises(jn.ConfigError, match=sentence):
                future.result()
    older = Peers(place(1, 2, port))
    monkeypatch.setattr(peers_module.jax, "__version__", "99.0")
    with waiting(place(0, 2, port)) as joining:
        with pytest.raises(jn.ConfigError, match="was started with jax .* and process 0 with jax 99.0"):
            older.join()
        older.stop()
        assert joining[0].exception() is not None


def test_one_that_comes_too_late_waits_for_the_next_run() -> None:
    port = processes.free_port()
    with waiting(place(0, 2, port), place(1, 2, port)) as joining:
        assert all(future.result() for future in joining)
        with waiting(place(1, 2, port, start_timeout=0.3)) as late:
            with pytest.raises(
                jn.TrainingError, match="process 0 did not start: a run that has not ended is at localh"
            ):
                late[0].result()
        next_one = Peers(place(1, 2, port, start_timeout=1.0))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waits = pool.submit(next_one.join)
            time.sleep(0.3)
            assert not waits.done()
    with pytest.raises(jn.TrainingError):
        waits.result()
    next_one.stop()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("", 0)) as taken:
        peers = Peers(place(0, 2, taken.getsockname()[1]))
        with pytest.raises(jn.ConfigError, match=r"is to listen on port \d+ of this machine, which is in use: choose"):
            peers.join()
        peers.stop()


def knocking(port: int) -> socket.socket:
    """A connection to a process 0 that is about to listen."""
    for _ in range(500):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("localhost", port))
        time.sleep(0.01)
    raise AssertionError("nothing listens")


def test_what_is_no_process_of_a_run_does_not_disturb_it() -> None:
    port = processes.free_port()
    with waiting(place(0, 2, port)) as joining:
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100_000, b'{"kind": "hello"}\n', b""):
            with knocking(port) as stranger:
                stranger.sendall(words)
        with waiting(place(1, 2, port)) as other:
            assert joining[0].result() and other[0].result()


def test_after_the_first_computation_it_is_too_late() -> None:
    tiny.fit(tiny.experiment(num_steps=1))
    with pytest.raises(jn.ConfigError, match="a backend of JAX runs already"):
        start_processes(place(0, 2, processes.free_port()))


# --- gone ---


@pytest.mark.parametrize("killed", [1, 0])
@pytest.mark.parametrize("doing", [COMPUTE, WAIT])
def test_who_is_killed_is_named_by_the_other_who_ends_resumably(killed: int, doing: str) -> None:
    advised = "when_lost('go on with --resume runs/x')"
    with processes.start(f"{QUICKLY}{advised}\ntotal(1.0)\nsay('here')\n{doing}") as running:
        running.wait_for("here")
        running.signal(killed)
        since = time.monotonic()
        done = running.finish()
    other = done[1 - killed]
    assert time.monotonic() - since < 10
    assert done[killed].status == -signal.SIGKILL and other.status == 75
    assert other.err.startswith(f"error: process {killed} on ") and other.err.count("\n") == 1
    assert other.err.endswith(" is gone (its connection closed): go on with --resume runs/x.\n")


def test_a_process_that_nobody_listens_to_ends_too() -> None:
    deaf = "ends = os.pipe()\nos.close(ends[0])\nos.dup2(ends[1], 1)\nos.dup2(ends[1], 2)\n"
    with processes.start(f"{QUICKLY}say('here')\n{deaf}time.sleep(1)\n{WAIT}") as running:
        running.wait_for("here")
        running.signal(0)
        done = running.finish()
    assert done[1].status == 75


def test_who_falls_silent_is_gone_after_the_bound() -> None:
    with processes.start(f"{QUICKLY}total(1.0)\nsay('here')\n{COMPUTE}", flags={"lost_after": 1.5}) as running:
        running.wait_for("here")
        running.signal(1, signal.SIGSTOP)
        running.processes[0].wait(20)
        running.signal(1)
        done = running.finish()
    assert done[0].status == 75 and "process 1 on " in done[0].err
    assert "is gone (nothing was heard of it for 1.5 s): what was saved before is intact" in done[0].err


@pytest.mark.slow
def test_of_four_one_is_killed_and_three_end() -> None:
    with processes.start(f"{QUICKLY}total(1.0)\nsay('here')\n{COMPUTE}", 4) as running:
        running.wait_for("here")
        running.signal(2)
        done = running.finish()
    assert [process.status for process in done] == [75, 75, -signal.SIGKILL, 75]
    assert all("process 2 on " in done[rank].err and done[rank].err.count("\n") == 1 for rank in (0, 1, 3))


def test_one_that_is_killed_while_the_other_is_done_is_not_waited_for() -> None:
    with processes.start(f"{QUICKLY}total(1.0)\nsay('here')\nif rank == 1: {WAIT}") as running:
        running.wait_for("here")
        running.signal(1)
        done = running.finish()
    assert done[0].status == 75 and "process 1 on " in done[0].err


@pytest.mark.parametrize("failing", [1, 0])
def test_a_mistake_of_one_process_ends_all_with_its_sentence(failing: int) -> None:
    code = f"total(1.0)\nif rank == {failing}: raise jn.DataError('no data here.')\n{COMPUTE}"
    done = processes.run(QUICKLY + code)
    assert [process.status for process in done] == [2, 2]
    assert done[failing].err == "error: no data here.\n"
    assert done[1 - failing].err == f"error: process {failing} failed: no data here.\n"


def test_a_mistake_of_all_is_said_by_each_and_no_more() -> None:
    done = processes.run("total(1.0)\nraise jn.TrainingError('the loss is no longer finite at step 3.')")
    assert [(process.status, process.err) for process in done] == [
        (1, "error: the loss is no longer finite at step 3.\n")
    ] * 2


def test_a_defect_in_one_process_keeps_its_traceback_and_ends_the_other() -> None:
    done = processes.run(f"{QUICKLY}total(1.0)\nif rank == 1: 1 / 0\n{COMPUTE}")
    assert [process.status for process in done] == [1, 1]
    assert "Traceback" in done[1].err and done[1].err.endswith("ZeroDivisionError: division by zero\n")
    assert done[0].err == "error: process 1 failed: ZeroDivisionError.\n"


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
        (["--distributed", *FLAGS], "--distributed finds out by itself what --coordinator .* say: give it or them"),
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
from jaxnn.cli.cluster import processes
from jaxnn.cli.errors import sentences
from jaxnn.cli.script import parse
from jaxnn.parallel.processes import from_leader
from tests import tiny
with sentences():
    config, options, cluster = parse(tiny.experiment(), sys.argv[1:])
    with processes(cluster):
        found = options.run_dir or f"resumed {options.resume}"
        told = (cluster.process_id, found, config.num_steps, jax.process_count(), from_leader(lambda: "led"))
        # At once, for all write to one pipe.
        os.write(1, (" ".join(map(str, told)) + chr(10)).encode())
sys.exit(config.seed)
"""
# The same, until one process is told to stop.
ENDLESS = """
        import signal
        from jaxnn.parallel.processes import StopVote, barrier
        asked, vote, window = [], StopVote(), 0
        signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
        os.write(1, b"trains" + bytes([10]))
        while not vote.poll(window, bool(asked)):
            barrier("window")
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
    given = {variable["name"]: variable["value"] for variable in container["env"]}
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
