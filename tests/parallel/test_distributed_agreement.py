"""What processes decide alike, tested in real ones: values, errors, meetings, and the window to stop at."""

from __future__ import annotations

import json

import pytest

from jaxnn.parallel import StopVote, all_agree, broadcast_from_primary
from tests import processes

TRIED = """
def tried(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def raising(error):
    raise error
"""


def answers(code: str, count: int = 2) -> list[list[str]]:
    """The lines that each process says, all having ended well."""
    done = processes.run(TRIED + code, count)
    assert [process.status for process in done] == [0] * count, done
    assert not any(process.err for process in done)
    return [[line for line in process.out.splitlines() if "[Gloo]" not in line] for process in done]


def test_a_single_process_agrees_with_itself() -> None:
    all_agree("config", {"seed": 1})
    assert broadcast_from_primary(lambda: (1, 2)) == (1, 2)
    vote = StopVote()
    assert not vote.poll(0, False) and vote.poll(1, True)


def test_a_value_of_the_leader_is_that_of_all_and_computed_once() -> None:
    leader, other = answers(
        """
calls = []
found = broadcast_from_primary(lambda: calls.append(rank) or {"dir": "runs/x", "steps": (1, 2), "rate": 0.1})
say(json.dumps(found), calls)
""".replace("json.dumps(found)", "sorted(found.items())")
    )
    assert leader == ["[('dir', 'runs/x'), ('rate', 0.1), ('steps', [1, 2])] [0]"]
    assert other == ["[('dir', 'runs/x'), ('rate', 0.1), ('steps', [1, 2])] []"]


def test_an_error_of_the_leader_is_that_of_all() -> None:
    leader, other = answers(
        """
say(tried(lambda: broadcast_from_primary(lambda: raising(jn.DataError("the file is not there.")))))
say(tried(lambda: broadcast_from_primary(lambda: raising(jn.RecordError("the folder is taken.")))))
say(tried(lambda: broadcast_from_primary(lambda: 1 / 0)))
say(tried(lambda: broadcast_from_primary(object)))
say(tried(lambda: broadcast_from_primary(lambda: time.sleep(1) if rank == 0 else None, seconds=0.2)))
"""
    )
    assert leader[:2] == ["DataError: the file is not there.", "RecordError: the folder is taken."] == other[:2]
    assert leader[2] == "ZeroDivisionError: division by zero"
    assert other[2] == "TrainingError: process 0 failed (ZeroDivisionError: division by zero): look at what it says."
    assert leader[3].startswith("TypeError") and other[3].startswith("TrainingError: process 0 failed (TypeError: ")
    assert other[4] == "TrainingError: process 1 waited 0.2 s for process 0, in vain: look at what that says."


def test_agreement_waits_for_all_and_names_who_does_not_come() -> None:
    first, second, late = answers(
        """
since = time.monotonic()
time.sleep(0.5 * rank)
all_agree("together", {})
say(time.monotonic() - since >= 0.9)
time.sleep(2 * (rank == 2))
say(tried(lambda: all_agree("apart", {}, 0.5)))
all_agree("together again", {})
""",
        count=3,
    )
    assert first[0] == second[0] == late[0] == "True"
    said = "waited 0.5 s for all (apart), and process 2 did not come: look at what it says."
    assert first[1:] == [f"TrainingError: process 0 {said}"] and second[1:] == [f"TrainingError: process 1 {said}"]
    assert late[1:] == ["TrainingError: process 2 came too late (apart): the others waited 0.5 s for it."]


def test_processes_started_with_different_configs_say_which_and_how() -> None:
    said = answers(
        """
all_agree("config", {"seed": 1, "features": [2, 3]})
say(tried(lambda: all_agree("config", {"seed": 1, "learning_rate": 0.1 * (rank + 1)})))
say(tried(lambda: all_agree("options", {"devices": 2, **({"mesh": "data=2"} if rank else {})})))
"""
    )
    rate = "process 1 was started with another config (learning_rate is 0.2, and 0.1 in process 0): start all alike."
    mesh = "process 1 was started with another options (mesh is 'data=2', and None in process 0): start all alike."
    assert said == [[f"ConfigError: {rate}", f"ConfigError: {mesh}"]] * 2


ROUNDS = 60
# Windows as the loop has them: before a poll one is begun, and the one before it is waited for.
WINDOWS = f"""
import random
stops = []
for run in range({ROUNDS}):
    shared, own = random.Random(run), random.Random(1000 * run + rank)
    asked = {{other: shared.randrange(10) for other in range(count) if shared.random() < 0.7}}
    vote, before = StopVote(), None
    for window in range(14):
        under_way = begin(1.0)
        if before is not None:
            before.block_until_ready()
        before = under_way
        time.sleep(own.choice((0, 0, 0.003)))
        if vote.poll(window, window >= asked.get(rank, 99)):
            break
    stops.append([min(asked.values(), default=None), window])
say(stops)
"""


def test_all_stop_at_the_same_window_whoever_is_asked_and_whenever() -> None:
    said = answers(WINDOWS, count=2)
    stops = json.loads(said[0][0].replace("None", "null"))
    assert said[0] == said[1] and len(stops) == ROUNDS
    for first, stop in stops:
        assert stop == (13 if first is None else first + 2)


@pytest.mark.slow
def test_four_processes_stop_at_the_same_window() -> None:
    said = answers(WINDOWS, count=4)
    assert said == [said[0]] * 4
