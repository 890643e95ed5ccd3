"""`torchrelay demo`: its parts, and the whole."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrelay.cli.demo import digits, training
from torchrelay.cli.demo.job import BALANCE, BATCH, Job, Outcome
from torchrelay.cli.demo.rank import GradientCheck
from torchrelay.cli.demo.verdict import faults

JOB = Job(epochs=2, seed=0, microbatches=4)
GOOD = Outcome(accuracy=0.98, step_seconds=0.01, gradient_error=1e-15, largest_gradient=1.0, checks=9)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "torchrelay", "demo", *words]


def processes_of_session(session: int) -> list[int]:
    """The process ids of a session, without zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def left_in_session(session: int) -> list[int]:
    """The processes that are still there when those that end with their parent had time to: multiprocessing's helper,
    say, which notices by a pipe that is closed.
    """
    deadline = time.monotonic() + 10
    while (left := processes_of_session(session)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.mark.parametrize(
    ("parallel", "plain", "named"),
    [
        (GOOD, GOOD, []),
        (replace(GOOD, accuracy=0.969), GOOD, ["parallel model reads 96.9%"]),
        (GOOD, replace(GOOD, accuracy=0.5), ["plain model reads 50.0%"]),
        (replace(GOOD, accuracy=float("nan")), GOOD, ["parallel"]),
        (replace(GOOD, gradient_error=1e-10), GOOD, ["differs"]),
        (replace(GOOD, gradient_error=float("nan")), GOOD, ["differs"]),
        (replace(GOOD, ranks_equal=False), GOOD, ["different parameters"]),
        (replace(GOOD, checks=0), GOOD, ["No gradient"]),
        (replace(GOOD, accuracy=0.1, gradient_error=1.0, ranks_equal=False), GOOD, ["10.0%", "differs", "different"]),
    ],
)
def test_the_verdict_names_each_fault(parallel: Outcome, plain: Outcome, named: list[str]) -> None:
    found = faults(parallel, plain)
    assert len(found) == len(named)
    assert all(name in sentence for name, sentence in zip(named, found, strict=True))


def test_the_data_is_split_into_two_without_overlap() -> None:
    data = digits.load()
    assert [len(images) for images, _ in (data.train, data.test)] == [1440, 357]
    every_image = torch.cat([data.train[0], data.test[0]]).flatten(1)
    from sklearn.datasets import load_digits

    # 1,797 images, as many different ones as there are in the original.
    assert len(every_image.unique(dim=0)) == len(torch.from_numpy(load_digits().data).unique(dim=0))


def test_batches_of_an_epoch_are_of_one_size_and_hold_no_image_twice() -> None:
    found = list(training.batches(JOB, 1, 1440))
    assert {len(batch) for batch in found} == {BATCH}
    assert len(torch.cat(found).unique()) == 1440 // BATCH * BATCH
    assert not torch.equal(found[0], next(iter(training.batches(JOB, 2, 1440))))


def test_the_balance_covers_the_model() -> None:
    assert sum(BALANCE) == len(training.make_model(JOB))


@pytest.mark.parametrize("spoil", [None, "wrong", "missing"])
def test_the_gradient_check_sees_one_wrong_element_and_a_missing_gradient(spoil: str | None) -> None:
    images, labels = digits.load().train
    model, batch = training.make_model(JOB), torch.arange(BATCH)
    check = GradientCheck(model, training.make_model(replace(JOB, seed=1)), images, labels)
    nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
    last = list(model.parameters())[-1]
    assert last.grad is not None
    if spoil == "wrong":
        last.grad[3] += 1e-6
    elif spoil == "missing":
        last.grad = None
    check(batch)
    assert check.checks == 1
    wanted = {None: 0.0, "wrong": 1e-6, "missing": float("inf")}[spoil]
    assert check.error == pytest.approx(wanted, abs=1e-12)


@pytest.mark.timeout(300)
def test_the_demo_shows_its_plan_trains_and_finds_no_difference(tmp_path: Path) -> None:
    done = subprocess.run(command(), capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    plan, _, trained = done.stdout.partition("epoch  1/12")
    assert "buckets" in plan
    assert "partition 1 on cpu: layers 3" in plan
    assert "F0 F1 F2 F3" in plan
    assert "B3 R2 B2 R1 B1 R0 B0" in plan
    assert "Predicted bubble: 16.7%" in plan
    page = tmp_path / "torchrelay-demo.html"
    assert f"Drawn beside the plan: {page}" in trained
    drawn = page.read_text(encoding="utf-8")
    assert "bubble: planned 16.7%" in drawn
    assert drawn.count("<section>") == 3
    assert 0 < float(re.findall(r"^Measured bubble: ([\d.]+)%", trained, re.M)[0]) < 100
    accuracies = [float(share) for share in re.findall(r"^test accuracy +([\d.]+)% +([\d.]+)% *$", trained, re.M)[0]]
    assert min(accuracies) >= 97
    assert float(re.findall(r"^  (\S+) \(the largest gradient is", trained, re.M)[0]) < 1e-10


@pytest.mark.timeout(300)
def test_a_demo_that_learned_too_little_fails(tmp_path: Path) -> None:
    page = tmp_path / "there.html"
    done = subprocess.run(
        command("--epochs", "1", "--timeline", str(page)), capture_output=True, text=True, timeout=280, cwd=tmp_path
    )
    assert done.returncode == 1
    assert list(tmp_path.iterdir()) == [page]
    assert "FAILED: The parallel model reads" in done.stdout


@pytest.mark.parametrize(
    ("path", "said"),
    [("page.pdf", "ends in .html, and is 'page.pdf'"), ("no/such/folder.html", "is its folder there?")],
)
def test_a_path_that_will_not_do_is_refused_before_the_training(path: str, said: str, tmp_path: Path) -> None:
    done = subprocess.run(command("--timeline", path), capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("until", ["torchrelay demo", "epoch  2"])
@pytest.mark.parametrize(("number", "to_all", "status"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)])
def test_a_demo_that_is_interrupted_leaves_no_process_behind(
    until: str, number: signal.Signals, to_all: bool, status: int
) -> None:
    demo = subprocess.Popen(
        command("--epochs", "1000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        text=True,
        start_new_session=True,
    )
    try:
        assert demo.stdout is not None
        assert any(until in line for line in demo.stdout)
        (os.killpg if to_all else os.kill)(demo.pid, number)
        _, errors = demo.communicate(timeout=120)
        assert demo.returncode == status
        assert "Traceback" not in errors
        assert left_in_session(demo.pid) == []
    finally:
        demo.kill()


@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_rank_that_dies_is_reported_and_the_others_end() -> None:
    demo = subprocess.Popen(
        command("--epochs", "1000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        text=True,
        start_new_session=True,
    )
    try:
        assert demo.stdout is not None
        assert any("epoch  2" in line for line in demo.stdout)
        ranks = [
            pid for pid in processes_of_session(demo.pid) if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        assert len(ranks) == 2
        os.kill(max(ranks), signal.SIGKILL)
        _, errors = demo.communicate(timeout=120)
        assert demo.returncode == 1
        assert errors.startswith("torchrelay: rank 1 was ended by SIGKILL")
        assert left_in_session(demo.pid) == []
    finally:
        demo.kill()
