"""`torchrelay schedule` and `simulate`: whatever they are given, an answer or one sentence; never a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torchrelay
from torchrelay import schedules
from torchrelay.cli import main
from torchrelay.schedules import Costs, Schedule

COMMAND = f"{sys.executable} -m torchrelay schedule"
FILES = {
    "empty": b"",
    "junk": bytes(range(256)),
    "zeros": b"\0\0\0",
    "deep_list": b"[" * 100_000,
    "deep_object": b'{"a":' * 100_000,
    "long_number": b'{"forward": ' + b"9" * 5000 + b"}",
    "words": b"hello, world",
    "list.json": b"[1, 2]",
    "nan.json": b'{"forward": NaN}',
    "infinite.json": b'{"forward": 1e999}',
    "large.json": b'{"forward": 1e308, "input_grad": 1e308, "weight_grad": 1e308}',
    "negative.json": b'{"forward": -1}',
    "text.json": b'{"forward": "fast"}',
    "unknown.json": b'{"speed": 1}',
    "null.json": b'{"forward": null}',
    "twice.json": b'{"forward": 1, "forward": 2}',
    "no_stages.json": b'{"forward": []}',
    "three_stages.json": b'{"forward": [1, 2, 3]}',
    "no_actions.json": b'{"kind": "x"}',
    "no_lists.json": b'{"kind": "x", "actions": [1]}',
    "no_ranks.json": b'{"kind": "x", "actions": []}',
    "no_texts.json": b'{"kind": "x", "actions": [["0F0", 3]]}',
    "two_in_one.json": b'{"kind": "x", "actions": [["0F0,0B0"]]}',
    "two_rows_in_one.json": b'{"kind": "x", "actions": [["0F0\\n0B0"]]}',
    "other_ranks.json": b'{"kind": "x", "ranks": 2, "actions": [["0F0", "0B0"]]}',
    "other_microbatches.json": b'{"kind": "x", "microbatches": 2, "actions": [["0F0", "0B0"]]}',
    "stage_twice.csv": b"0F0,1B0\n1F0,1F0\n",
    "too_large.csv": b"0F99999999999999999999\n",
}
NUMBERS = ["", "x", "nan", "-1", "-inf", "1e3", "9" * 40, "\N{FULLWIDTH DIGIT FOUR}", "65537"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with files that are not what they should be."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "a folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    """The one sentence that is answered."""
    assert main(words) == status, words
    said = capsys.readouterr()
    assert said.err.startswith("torchrelay: "), words
    assert said.err.count("\n") == 1, words
    assert said.err.endswith("\n")
    if status == 2:
        assert not said.out
    return said.err


@pytest.mark.parametrize("name", [*FILES, "a folder", "missing", "", "a\0b", "x" * 5000, "a/b/c"])
@pytest.mark.parametrize(
    "words",
    [
        ["schedule", "verify"],
        ["simulate"],
        ["schedule", "--costs"],
        ["schedule", "--json", "--costs"],
        ["schedule", "compare", "--costs"],
        ["schedule", "search", "--costs"],
    ],
    ids=" ".join,
)
def test_files_that_are_none(words: list[str], name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "large.json" and "compare" in words:  # a table has a line for each schedule all the same
        assert main([*words, name]) == 0
        assert capsys.readouterr().out.count("give them in a larger unit\n") == len(schedules.names())
        return
    refused([*words, name], capsys)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("option", ["--ranks", "--microbatches", "--memory", "--stages-per-rank", "--seconds"])
@pytest.mark.parametrize("command", [[], ["compare"], ["search"]], ids=["make", "compare", "search"])
def test_numbers_that_are_none(
    command: list[str], option: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some are numbers: then there is an answer, and nothing on stderr."""
    kind = [] if command else ["--kind", "interleaved_1f1b"]
    status = main(["schedule", *command, *kind, option, number])
    said = capsys.readouterr()
    assert status in (0, 2)
    assert said.err.count("\n") == (status != 0)
    assert bool(said.out) == (status == 0)
    large = {"1e3", "9" * 40, "65537"}
    # A table says who exceeds a limit, however low.
    meant = {"--memory": large | ({"-1"} if command == ["compare"] else set()), "--seconds": large}
    if status == 0:
        assert number in meant.get(option, {"65537"})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "zb_w"], "gpipe, 1f1b"),
        (["--kind", ""], "gpipe"),
        (["--kind", "gpipe", "--stages-per-rank", "2"], "gpipe needs exactly 1 stage on each rank"),
        (["--memory", "1_0"], "--memory must be a number, or one for each rank"),
        (["--memory", "3,3"], "--memory has 2 numbers, but there are 4 ranks"),
        (["--memory", "8,8,8,7"], "rank 3 would hold 8, more than its limit 7"),
        (["--costs", "three_stages.json"], "3 numbers for 4 stages"),
        (["--costs", "large.json"], "the costs are too large"),
        (["--html", "a folder"], "a folder cannot be written: Is a directory"),
        (["--html", "missing/x.svg"], "missing/x.svg cannot be written: No such file"),
        (["--html", "/dev/full"], "No space left on device"),
        (["--ranks", "8", "compare"], "--ranks must stand after compare"),
        (["compare", "--ranks", "0"], "the number of ranks must be at least 1"),
        (["compare", "--costs", "three_stages.json"], "the costs are for 3 stages, of which 4 ranks"),
        (["search", "--placement", "0,1"], "the placement must have a stage for each of the 4 ranks"),
        (["search", "--placement", "0,x"], "--placement must be loop, v, or the rank of each stage"),
        (["search", "--ranks", "999999999999"], "the number of ranks must be at most 65536"),
        (["search", "--seconds", "-1"], "must not be negative"),
        (["verify"], "Missing argument"),
        (["verify", "a", "b"], "unexpected extra argument"),
        (["verify", "other_ranks.json"], "other_ranks.json: ranks is 2, but the actions are of 1"),
        (["verify", "other_microbatches.json"], "microbatches is 2, but the actions are of 1"),
        (["verify", "junk"], "junk cannot be read: it is not text, but has a byte 0x80"),
        (["verify", "stage_twice.csv"], "stage_twice.csv: not a schedule: line 2, column 1: stage 1"),
    ],
)
def test_a_sentence_says_what_would_do(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(["schedule", *words], capsys)


def test_a_schedule_that_is_refused_is_shown_and_ends_with_status_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("early.csv").write_text("0B0,0F0\n")
    assert main(["schedule", "verify", "early.csv"]) == 1
    said = capsys.readouterr()
    assert said.err == "torchrelay: 0B0 (rank 0, position 0) needs 0F0, which comes later, at position 1\n"
    assert said.out.splitlines()[0] == "rank 0 | >0B0< (0F0)"
    Path("fine.csv").write_text("0F0,0B0\n")
    assert main(["schedule", "verify", "fine.csv", "--memory", "0.5"]) == 1
    assert "more than its limit 0.5" in capsys.readouterr().err


def test_the_keys_of_the_json_are_these(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--kind", "zb_v", "--ranks", "8", "--microbatches", "32", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said) == ["kind", "ranks", "microbatches", "makespan", "bubble_rate", "peak_memory", "actions"]
    assert (len(said["peak_memory"]), len(said["actions"])) == (8, 8)
    assert sum(map(len, said["actions"])) == 3 * 16 * 32


@pytest.mark.parametrize("name", schedules.names())
def test_json_and_csv_are_the_schedule(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule", "--kind", name, "--ranks", "2", "--microbatches", "4"]
    schedule = schedules.make(name, ranks=2, microbatches=4)
    assert main([*words, "--csv"]) == 0
    assert Schedule.from_csv(capsys.readouterr().out, name=name) == schedule
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    rows = [rank + [""] * (max(map(len, said["actions"])) - len(rank)) for rank in said["actions"]]
    assert Schedule.from_csv("\n".join(map(",".join, rows)), name=name) == schedule


def test_a_full_json_is_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = schedules.make("gpipe", ranks=2, microbatches=3, backward=False)
    file = schedule.save(tmp_path / "there.json", Costs(2))
    assert main(["schedule", "verify", str(file), "--costs", str(file)]) == 0
    assert capsys.readouterr().out.startswith("gpipe: 2 ranks, 2 stages, 3 micro-batches\nverified: ")


def test_what_is_lowered_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = schedules.make("1f1b", ranks=3, microbatches=5).lower().save(tmp_path / "lowered.csv")
    assert main(["schedule", "verify", str(file)]) == 0
    assert "3 ranks" in capsys.readouterr().out


def test_comparing_has_the_figures_of_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"forward": 4, "input_grad": 6, "weight_grad": 2, "transfer": 0.25, "forward_memory": 2}')
    assert main(["schedule", "compare", "--ranks", "4", "--microbatches", "8", "--costs", str(file)]) == 0
    rows = {line.split()[0]: line.split()[1:4] for line in capsys.readouterr().out.splitlines()[1:]}
    assert list(rows) == schedules.names()
    for name, (bubble, makespan, peak) in rows.items():
        schedule = schedules.make(name, ranks=4, microbatches=8)
        each = schedule.ranks / schedule.stages
        costs = Costs(4 * each, 6 * each, 2 * each, transfer=0.25, forward_memory=2 * each, weight_grad_memory=-each)
        simulation = schedule.simulate(costs)
        assert bubble == f"{simulation.bubble_rate:.1%}"
        assert makespan == f"{simulation.makespan:g}"
        assert peak == f"{max(simulation.peak_memory):g}"


def test_comparing_stages_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    stages = [1, 2, 3, 4, 5, 6, 7, 8]
    file.write_text(json.dumps({"forward": stages}))
    assert main(["schedule", "compare", "--ranks", "4", "--costs", str(file), "--memory", "9,9,9,1"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert "8 numbers for 4 stages" in rows["1f1b"]
    makespan = schedules.make("zb_v", ranks=4, microbatches=8).simulate(Costs(stages)).makespan
    assert rows["zb_v"].split()[2] == f"{makespan:g}"
    assert "too much memory on rank 3: " in rows["zb_v"]


def test_a_drawing_has_the_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"forward": 2, "weight_grad": 0, "transfer": 1}')
    assert main(["schedule", "--ranks", "2", "--microbatches", "2", "--costs", str(file), "--draw"]) == 0
    assert "rank 1 |  .  .  . F0 F0 F1 F1 B1 B0  .  ." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ending", "begin"), [("html", b"<!DOCTYPE html>"), ("SVG", b"<svg"), ("trace.json", b'{"trace')]
)
def test_a_picture_is_written_as_its_name_ends(
    ending: str, begin: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"there.{ending}"
    assert main(["schedule", "--html", str(file), "--csv"]) == 0
    assert file.read_bytes().startswith(begin)
    assert capsys.readouterr().out == schedules.make("gpipe", ranks=4, microbatches=8).to_csv()


def test_a_search_of_a_placement_and_limits_for_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "2", "--microbatches", "4", "--placement", "0,1,0,1", "--memory", "4,3", "--json"]
    assert main(["schedule", "search", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [{int(action[0]) for action in rank} for rank in said["actions"]] == [{0, 2}, {1, 3}]
    assert all(peak <= limit for peak, limit in zip(said["peak_memory"], [4, 3], strict=True))


def test_a_search_goes_on_until_it_is_proven(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule", "search", "--ranks", "3", "--microbatches", "4", "--memory", "3", "--exact"]
    assert main(words) == 0
    assert "proven to be the best that there is: none costs less than 14\n" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["proven"], said["gap"], said["cost"]) == (True, 0, said["lower_bound"])


def test_a_search_shows_progress_on_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "search", "--ranks", "3", "--memory", "3"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs terminals")
def test_a_search_on_a_terminal_says_that_it_goes_on() -> None:
    import pty

    master, slave = pty.openpty()
    words = ["schedule", "search", "--ranks", "8", "--memory", "8", "--placement", "v", "--exact", "--seconds", "1"]
    command = [sys.executable, "-m", "torchrelay", *words]
    environment = {**os.environ, "TERM": "xterm-256color"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=slave, timeout=60, env=environment)
    os.close(slave)
    said = os.read(master, 100_000).decode()
    os.close(master)
    assert done.returncode == 0
    assert "none below " in said
    assert "Ctrl-C for the best so far" in said
    assert b"the best that there is" in done.stdout


@pytest.mark.parametrize(
    ("line", "status", "errors"),
    [
        (f"{COMMAND} --ranks 64 --microbatches 2000 --json | head -c 10 >/dev/null; exit ${{PIPESTATUS[0]}}", 1, ""),
        (f"{COMMAND} compare | true; exit ${{PIPESTATUS[0]}}", 1, ""),
        (f"{COMMAND} compare >&-", 1, "torchrelay: the output cannot be written: it is closed\n"),
        (f"{COMMAND} compare >/dev/full", 1, "torchrelay: the output cannot be written: No space left on device\n"),
        (f"{COMMAND} --kind nothing 2>&-", 2, ""),
        (f"{COMMAND} verify <(printf '0F0,0B0')", 0, ""),
    ],
)
def test_an_output_that_is_closed(line: str, status: int, errors: str) -> None:
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (status, errors)


def test_an_error_of_our_own_is_a_sentence_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(torchrelay.schedules, "make", broken)
    monkeypatch.delenv("TORCHRELAY_TRACEBACK", raising=False)
    assert "ZeroDivisionError: by nothing (with TORCHRELAY_TRACEBACK=1" in refused(["schedule"], capsys, 70)
    monkeypatch.setenv("TORCHRELAY_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["schedule"])
