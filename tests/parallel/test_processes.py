"""Real processes start together, decide together and end together; and the scripts of the documentation start them."""

import contextlib
import json
import os
import re
import signal
import sys
import textwrap
from pathlib import Path

import jax
import pytest

import jaxnn as jn
from jaxnn.cli import ClusterOptions
from jaxnn.parallel import Place, StopVote, all_agree, broadcast_from_primary, joined
from tests import processes, shell, tiny

COMPUTE = "while True: total(1.0)"
WAIT = "time.sleep(60)"
# Process 1 polls process 0 without end; the others wait, and none computes.
POLL = f"""
vote = StopVote()
for window in range(6000 if rank == 1 else 0):
    vote.poll(window, False), time.sleep(0.01)
{WAIT}
"""
READY = "total(1.0)\nsay('here')\n"


def set_environment(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Sets ``variables`` and no other variable of a cluster."""
    for name in [name for name in os.environ if name.startswith(processes.FOREIGN)]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_single_process_agrees_with_itself():
    all_agree("config", {"seed": 1})
    assert broadcast_from_primary(lambda: (1, 2)) == (1, 2)
    vote = StopVote()
    assert not vote.poll(0, False) and vote.poll(1, True)
    assert jax.devices(), "starts a backend"
    with pytest.raises(jn.ConfigError, match="a backend of JAX runs already"), joined(Place("localhost:1", 2, 0)):
        pass


ROUNDS = 20
# Windows as in the training loop: before a poll one is started, and the one before it is waited for.
VOTES = f"""
import random
stops = []
for run in range({ROUNDS}):
    shared, own = random.Random(run), random.Random(1000 * run + rank)
    asked = {{other: shared.randrange(10) for other in range(count) if shared.random() < 0.7}}
    vote, before = StopVote(), None
    for window in range(14):
        in_flight = start_total(1.0)
        if before is not None:
            before.block_until_ready()
        before = in_flight
        time.sleep(own.choice((0, 0, 0.003)))
        if vote.poll(window, window >= asked.get(rank, 99)):
            break
    stops.append([min(asked.values(), default=None), window])
say(stops)
"""


DECISIONS = f"""
say(total(rank + 1.0), jax.device_count(), jax.local_device_count(), is_primary(), process_count())
calls = []
found = broadcast_from_primary(lambda: calls.append(rank) or {{"dir": "runs/x", "steps": (1, 2), "rate": 0.1}})
say(sorted(found.items()), calls)
say(error_of(broadcast_from_primary, lambda: fail(jn.DataError("the file is not there."))))
say(error_of(broadcast_from_primary, lambda: 1 / 0))
say(error_of(broadcast_from_primary, object))
say(error_of(broadcast_from_primary, lambda: time.sleep(0.6) if rank == 0 else None, 0.2))
all_agree("config", {{"seed": 1, "features": [2, 3]}})
say(error_of(all_agree, "config", {{"seed": 1, "rate": 0.1 * (rank + 1)}}))
say(error_of(all_agree, "options", {{"devices": 2, **({{"mesh": "data=2"}} if rank else {{}})}}))
{VOTES}
"""


def test_two_processes_share_devices_and_decisions():
    done = processes.run(DECISIONS, devices=2)
    assert [(process.status, process.err) for process in done] == [(0, "")] * 2, done
    first, second = (processes.words(process.out) for process in done)
    assert first[0] == "6.0 4 2 True 2" and second[0] == "6.0 4 2 False 2"
    value = "[('dir', 'runs/x'), ('rate', 0.1), ('steps', [1, 2])]"
    assert first[1] == f"{value} [0]" and second[1] == f"{value} []"
    assert first[2] == second[2] == "DataError: the file is not there."
    assert first[3] == "ZeroDivisionError: division by zero" and first[4].startswith("TypeError")
    assert "process 0 failed (ZeroDivisionError: division by zero)" in second[3] and "(TypeError: " in second[4]
    assert first[5] == "None" and second[5].startswith("TrainingError: process 1 waited 0.2 s for process 0")
    assert first[6] == second[6] and "another config (rate is 0.2, and 0.1 in process 0)" in first[6]
    assert first[7] == second[7] and "another options (mesh is 'data=2', and None in process 0)" in first[7]
    # Both stopped in each round two windows after the first request, or at the last window.
    stops = json.loads(first[8].replace("None", "null"))
    assert first[8] == second[8] and len(stops) == ROUNDS
    assert [stop for _, stop in stops] == [13 if asked is None else asked + 2 for asked, _ in stops]


def survivors(done: list[processes.Done], killed: int) -> list[processes.Done]:
    assert done[killed].status == -signal.SIGKILL
    others = [process for process in done if process.rank != killed]
    assert all(process.status == 75 and process.err.count("\n") <= 1 for process in others), others
    return others


# Process 2 comes too late.
LATE = """
since = time.monotonic()
time.sleep(0.3 * rank)
all_agree("together", {})
say(time.monotonic() - since >= 0.5)
time.sleep(1.5 * (rank == 2))
say(error_of(all_agree, "apart", {}, 0.5))
"""
# Most of these wait until their processes are ended from beside a main thread that waits: so they run side by side.
KILLED = [(2, 1, READY + COMPUTE), (3, 0, LATE + READY + POLL)]
PROXIES = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "grpc")}
# No one reads what process 1 prints.
DEAF = "ends = os.pipe()\nos.close(ends[0])\nos.dup2(ends[1], 1)\nos.dup2(ends[1], 2)"
SILENT = f"{READY}if rank == 1:\n{textwrap.indent(DEAF, '    ')}\n{COMPUTE}"


@pytest.mark.slow
def test_late_and_lost_processes_are_named_by_the_others_which_end_resumably():
    hint = "set_resume_hint('resume with --resume runs/x')\n"
    with contextlib.ExitStack() as stack:
        cases = [
            (stack.enter_context(processes.start(f"{hint}{code}", count, **PROXIES)), killed)
            for count, killed, code in KILLED
        ]
        silent = stack.enter_context(processes.start(SILENT, 3, flags={"lost_after": 4.0}))
        for running in (silent, *(running for running, _ in cases)):
            running.wait_for("here")
        silent.signal(2, signal.SIGSTOP)
        for running, killed in cases:
            running.signal(killed)
        for running, killed in cases:
            done = running.finish()
            for other in survivors(done, killed):
                assert other.err.startswith(f"error: process {killed} on ")
                assert other.err.endswith(" is gone (its connection closed): resume with --resume runs/x.\n")
        for process in done:
            waited, missed, _ = processes.words(process.out)
            others = f"process {process.rank} waited 0.5 s for all (apart), and process 2 did not"
            late = "process 2 came too late (apart): the others waited 0.5 s for it"
            assert waited == "True" and (late if process.rank == 2 else others) in missed
        for process in silent.processes[:2]:
            process.wait(30)
        silent.signal(2)
        first, _ = survivors(silent.finish(), 2)
    assert "process 2 on " in first.err and "is gone (nothing was heard of it for 4 s): what was saved" in first.err


ERRORS = [
    (f"if rank == 0: raise jn.DataError('\\x1b no.')\n{WAIT}", 2, [r"\x1b no.", r"process 0 failed: \x1b no."]),
    ("raise jn.TrainingError('the loss is nan.')", 1, ["the loss is nan."] * 2),
    (f"if rank == 1: 1 / 0\n{COMPUTE}", 1, ["process 1 failed: ZeroDivisionError.", None]),
]


@pytest.mark.slow
def test_error_or_signal_of_one_process_ends_all_with_its_status():
    with contextlib.ExitStack() as stack:
        cases = [stack.enter_context(processes.start(f"total(1.0)\n{code}")) for code, _, _ in ERRORS]
        stopped = stack.enter_context(processes.start(f"say('here')\n{WAIT}"))
        stopped.wait_for("here")
        stopped.signal(1, signal.SIGTERM)
        for running, (_, status, errors) in zip(cases, ERRORS, strict=True):
            done = running.finish()
            assert [process.status for process in done] == [status] * 2
            for process, message in zip(done, errors, strict=True):
                if message is None:
                    assert "Traceback" in process.err and process.err.endswith("Error: division by zero\n")
                else:
                    assert process.err == f"error: {message}\n"
        done = stopped.finish()
    assert [process.status for process in done] == [75, 75] and done[1].err.startswith("interrupted before"), done


FLAGS = "--coordinator node:1 --num-processes 2 --process-id"
WRONG_FLAGS = {
    "--distributed": "no cluster started this process; .*SLURM .*Open MPI.*Kubernetes.*Cloud TPU.*--coor",
    f"--distributed {FLAGS} 0": "--distributed detects the values of --coordinator .*: give either it or them",
    "--coordinator node:1": "--num-processes and --process-id must be given too: --coordinator HOST:PORT",
    f"{FLAGS} 2": "process_id is 2, and must be one of 0 to 1",
    f"{FLAGS} 0 --coordinator node": "coordinator is 'node', and must be HOST:PORT",
    f"{FLAGS} 0 --start-timeout 0": "start_timeout is 0.0 seconds, and must be more than 0",
    "sweep --seed 0 1 --distributed": "--distributed .*one run .*--shard I/N",
    "plan --process-id=1": "--process-id .*plan is for one",
}


def test_wrong_flags_are_named(capsys, monkeypatch):
    set_environment(monkeypatch)
    for flags, words in WRONG_FLAGS.items():
        message = shell.fails(capsys, lambda given: jn.main(tiny.experiment(), given), *flags.split())
        assert re.search(f"^error: .*{words}", message), message


def cluster(kind: str, port: int, rank: int, count: int) -> dict[str, str]:
    """The variables that a task of a cluster has, as far as JAX reads them; the port follows from them."""
    job = port - 61440
    if kind == "slurm":
        names = {"JOB_ID": job, "STEP_NODELIST": "localhost", "NTASKS": count, "PROCID": rank, "LOCALID": rank}
        return {f"SLURM_{name}": str(value) for name, value in names.items()}
    names = {"SIZE": count, "RANK": rank, "LOCAL_RANK": rank}
    uri = f"{4096 * job}.0;tcp://127.0.0.1:34911"
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {"OMPI_MCA_orte_hnp_uri": uri}


def test_clusters_give_their_tasks_a_place_or_are_named(monkeypatch):
    for kind in ("slurm", "open mpi"):
        set_environment(monkeypatch, **cluster(kind, 62000, 1, 3))
        place = ClusterOptions(distributed=True).place()
        assert place and (place.detected, place.port, place.num_processes, place.process_id) == (True, 62000, 3, 1)
    for variables, words in (
        (cluster("slurm", 62000, 0, 1), "num_processes is 1, and a run of several has at least 2"),
        (cluster("slurm", 62000, 0, 2) | {"SLURM_NTASKS": "2(x3)"}, "--distributed: invalid literal .*'2.x3.'"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "--distributed: Kubernetes environment detected, but the `kubern"),
    ):
        set_environment(monkeypatch, **variables)
        with pytest.raises(jn.ConfigError, match=words):
            ClusterOptions(distributed=True).place()


# Prints its place, and trains until one process gets a signal, or not at all if it has a seed.
SCRIPT = """
import os
import signal
import sys
import jax
from jaxnn.cli import exit_on_user_error, parse_run, processes
from jaxnn.parallel import StopVote, all_agree, broadcast_from_primary
from tests import tiny
with exit_on_user_error():
    config, options, cluster = parse_run(tiny.experiment(), sys.argv[1:])
    with processes(cluster):
        asked, vote, window = [], StopVote(), 0
        signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
        found = options.run_dir or f"resumed {options.resume}"
        words = (cluster.process_id, found, config.num_steps, jax.process_count(), broadcast_from_primary(lambda: "ok"))
        # In one call, as all write to one pipe.
        os.write(1, (" ".join(map(str, words)) + chr(10)).encode())
        while not (config.seed or vote.poll(window, bool(asked))):
            all_agree("window", {})
            window += 1
sys.exit(75)
"""


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """Stand-ins for the commands of clusters, and a script that joins and prints its place."""
    (tmp_path / "joins.py").write_text(SCRIPT)
    texts = {
        "srun": """
            test "$1" = --cpus-per-task=4 || exit 9
            shift
            test -n "$STATUS" && exit $STATUS
            SLURM_PROCID=0 SLURM_LOCALID=0 "$@" &
            SLURM_PROCID=1 SLURM_LOCALID=1 "$@"
            wait $!
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


@pytest.mark.slow
def test_slurm_script_starts_a_run_and_requeues_it_if_interrupted(commands):
    port = processes.free_port(61440, 65535)
    variables = environment(commands, **cluster("slurm", port, 0, 2), SLURM_CPUS_PER_TASK="4")
    with processes.started([["docs/slurm_run.sh", "--num-steps", 7, "--seed", 75]], **variables) as running:
        (done,) = running.finish()
    assert done.status == 75, done
    assert done.out.count(f"None {commands / 'a run'} 7 2 ok\n") == 2
    assert f"scontrol requeue {port - 61440}" in done.out
    with processes.started([["docs/slurm_run.sh"]], **variables, STATUS="2") as running:
        (done,) = running.finish()
    assert done.status == 2 and "scontrol" not in done.out


@pytest.mark.slow
def test_ssh_script_resumes_a_run_and_passes_on_signal_and_status(commands):
    tiny.fit(tiny.experiment(num_steps=1), commands / "a run")
    where = {"PORT": str(processes.free_port()), "PYTHON": sys.executable, "FOLDER": str(shell.ROOT)}
    variables = environment(commands, HOSTS="localhost 127.0.0.1", **where)
    resumed = f"resumed {commands / 'a run'} 9 2 ok\n"
    with processes.started([["docs/ssh_run.sh", "--num-steps", 9]], **variables) as running:
        running.wait_for(f"127.0.0.1: 1 {resumed}")
        running.wait_for(f"0 {resumed}")
        running.signal(0, signal.SIGTERM)
        done = running.finish()[0]
    assert done.status == 75 and done.err == "", done
    assert not list(shell.ROOT.glob(".ssh_run.*"))


def test_pods_of_the_job_find_process_0():
    import yaml

    service, job = yaml.safe_load_all((shell.ROOT / "docs" / "kubernetes_run.yaml").read_text())
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    given = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
    # Kubernetes names pod 0 JOB-0.SUBDOMAIN; the service of that name selects the job's pods.
    assert given["COORDINATOR"].startswith(f"{name}-0.{pod['subdomain']}:")
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["selector"] == {"job-name": name}
    assert int(given["NUM_PROCESSES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
