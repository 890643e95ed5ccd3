"""`torchrelay.cli.ranks`: the ranks of a job are heard, and none is left behind. The rules are those of its module."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torchrelay.cli.ranks import Link, RankFailure, started

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


def greet(link: Link, rank: int, count: int, word: str) -> None:
    link.send(f"{word} from {rank} of {count}")


def wait_then_greet(link: Link, rank: int, count: int) -> None:
    link.send("waiting")
    link.wait_for_go()
    link.send("gone")


def raise_on_rank_1(link: Link, rank: int, count: int) -> None:
    if rank == 1:
        raise ValueError("seven is not a digit")
    time.sleep(60)


def die_on_rank_1(link: Link, rank: int, count: int) -> None:
    if rank == 0:
        # As a rank does that loses its peer: it raises, and may be heard first.
        link.wait_for_go()
        raise ConnectionError("lost rank 1")
    print("about to be killed", flush=True)
    link.send("ready")
    time.sleep(60)


def exit_quietly_on_rank_1(link: Link, rank: int, count: int) -> None:
    if rank == 1:
        os._exit(3)
    time.sleep(60)


def sleep(link: Link, rank: int, count: int) -> None:
    link.send(os.getpid())
    time.sleep(60)


def is_alive(pid: int) -> bool:
    """A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int], seconds: float = 20) -> list[int]:
    """Those that are still there after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def test_every_rank_is_heard() -> None:
    with started(greet, 3, "hello") as ranks:
        assert sorted(map(str, ranks.messages())) == [f"hello from {rank} of 3" for rank in range(3)]


def test_a_rank_waits_for_go() -> None:
    with started(wait_then_greet, 2) as ranks:
        messages = ranks.messages()
        assert [next(messages), next(messages)] == ["waiting", "waiting"]
        ranks.go()
        assert list(messages) == ["gone", "gone"]


def test_a_rank_that_raises_is_named_with_its_traceback_and_the_others_end() -> None:
    wanted = r"(?s)^rank 1 raised:.*in raise_on_rank_1.*seven is not a digit$"
    with started(raise_on_rank_1, 2) as ranks, pytest.raises(RankFailure, match=wanted):
        list(ranks.messages())
    assert not wait_until_gone(ranks.pids, 0)


def test_a_rank_that_was_killed_comes_before_one_that_raised_for_want_of_it() -> None:
    with started(die_on_rank_1, 2) as ranks:
        messages = ranks.messages()
        assert next(messages) == "ready"
        ranks.go()
        os.kill(ranks.pids[1], signal.SIGKILL)
        with pytest.raises(RankFailure, match=r"(?s)^rank 1 was ended by SIGKILL.*about to be killed$"):
            list(messages)


def test_a_rank_that_exits_without_a_word_is_named() -> None:
    wanted = r"^rank 1 ended early with exit status 3, and had printed nothing$"
    with started(exit_quietly_on_rank_1, 2) as ranks, pytest.raises(RankFailure, match=wanted):
        list(ranks.messages())


def test_leaving_the_block_ends_the_ranks() -> None:
    with started(sleep, 2) as ranks:
        assert all(is_alive(pid) for pid in ranks.pids)
    assert not wait_until_gone(ranks.pids, 0)


def tell_what_is_held(link: Link, rank: int, count: int) -> None:
    link.send(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))


TELLER = """
from test_ranks import tell_what_is_held
from torchrelay.cli.ranks import started

if __name__ == "__main__":
    with started(tell_what_is_held, 2) as ranks:
        for held in ranks.messages():
            print(held == [2])
"""


def test_every_rank_holds_back_ctrl_c_from_its_first_moment(tmp_path: Path) -> None:
    script = tmp_path / "teller.py"
    script.write_text(TELLER)  # a process of its own: it has never started another one
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "True\nTrue\n", done.stderr


STARTER = """
import signal, sys
from test_ranks import sleep
from torchrelay.cli.ranks import started

def stop(number, frame):
    raise SystemExit(128 + number)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    with started(sleep, 2) as ranks:
        for pid in ranks.messages():
            print(pid, flush=True)
"""


@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize(
    ("number", "to_the_group"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)]
)
def test_no_rank_outlives_the_process_that_started_it(
    number: signal.Signals, to_the_group: bool, tmp_path: Path
) -> None:
    script = tmp_path / "starter.py"
    script.write_text(STARTER)
    starter = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert starter.stdout is not None
    pids = [int(starter.stdout.readline()) for _ in range(2)]
    (os.killpg if to_the_group else os.kill)(starter.pid, number)
    _, errors = starter.communicate(timeout=30)
    assert starter.returncode != 0
    assert not wait_until_gone(pids)
    assert errors.count("Traceback") <= 1, "a rank that is ended says nothing of its own"
