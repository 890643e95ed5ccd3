"""The `torchrelay` command: what it prints, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torchrelay
from torchrelay.cli import main

MODELS = """
import torch
from torch import nn

not_callable = 3

def small():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))

def huge():
    return nn.Linear(1_000_000, 1_000_000)

def reads_a_value():
    layer = nn.Linear(2, 2)
    layer.scale = layer.weight.sum().item()
    return layer

def breaks():
    raise RuntimeError("no\\nsuch luck")

def interrupts():
    exec("raise KeyboardInterrupt")

def no_module():
    return [nn.Linear(2, 2)]

def lazy():
    return nn.LazyLinear(3)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with factories, in the folder that the command runs in."""
    name = f"models_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "torchrelay", *words], capture_output=True, text=True, timeout=60)


def assert_one_sentence(errors: str) -> None:
    assert errors.startswith("torchrelay: ")
    assert errors.count("\n") == 1
    assert errors.endswith("\n")


def test_a_command_that_is_interrupted_ends_with_a_status_and_not_by_the_signal(models: str) -> None:
    done = run("buckets", "--model", f"{models}:interrupts")
    assert done.returncode == 130
    assert done.stderr == "torchrelay: interrupted\n"


def test_it_is_there_under_both_its_names() -> None:
    script = Path(sys.executable).with_name("torchrelay")
    for command in ([str(script)], [sys.executable, "-m", "torchrelay"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True)
        assert (done.stdout, done.stderr, done.returncode) == (f"torchrelay {torchrelay.__version__}\n", "", 0)


def test_without_words_it_says_what_it_can(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr()
    assert not said.err
    assert all(command in said.out for command in ("buckets", "demo", "schedule"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["frobnicate"], "frobnicate"),
        (["schedule", "--colour"], "--colour"),
        (["schedule", "--ranks", "two"], "--ranks"),
        (["schedule", "--ranks", "0"], "ranks must be at least 1"),
        (["schedule", "--microbatches", "-1"], "micro-batches"),
        (["schedule", "--ranks", "9" * 30], "64 bits"),
        (["schedule", "--kind", "gpip"], "gpipe"),
        (["schedule", "--draw", "--json"], "--json"),
        (["schedule", "--csv", "--json"], "--csv"),
        (["schedule", "--kind", "interleaved_1f1b", "--microbatches", "9"], "with 8 or 10 it can"),
        (["schedule", "--memory", "3"], "rank 0"),
        (["schedule", "--costs", "no such file"], "no such file cannot be read"),
        (["schedule", "--html", "/no such folder/page.html"], "cannot be written"),
        (["schedule", "verify", "no such file"], "no such file cannot be read"),
        (["schedule", "search", "--placement", "w"], "placement"),
        (["schedule", "search", "--memory", "0.5"], "no schedule was found within the memory limit"),
        (["buckets"], "--model"),
        (["buckets", "--sizes", "1", "--model", "a:b"], "--sizes"),
        (["buckets", "--sizes", "1,,2"], "number 1"),
        (["buckets", "--sizes", "1,-2"], "'-2'"),
        (["buckets", "--sizes", "9" * 30], "64 bits"),
        (["buckets", "--sizes", "1", "--dtype", "int3"], "float32"),
        (["buckets", "--sizes", "1", "--cap-mb", "nan"], "--cap-mb"),
        (["buckets", "--sizes", "1", "--cap-mb", "-1"], "--cap-mb"),
        (["buckets", "--model", "nocolon"], "MODULE:FACTORY"),
        (["buckets", "--model", "no.such.package:f"], "No module named"),
        (["buckets", "--model", "torch.nn:Nope"], "Nope"),
        (["demo", "--epochs", "0"], "--epochs"),
        (["demo", "--microbatches", "5"], "divide"),
    ],
)
def test_a_user_error_is_one_sentence_and_status_2(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(words) == 2
    said = capsys.readouterr()
    assert not said.out
    assert_one_sentence(said.err)
    assert named in said.err


def test_a_user_error_in_a_process_of_its_own() -> None:
    done = run("schedule", "--ranks", "0")
    assert (done.stdout, done.returncode) == ("", 2)
    assert_one_sentence(done.stderr)


def test_schedule_prints_what_it_is_and_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--kind", "gpipe", "--ranks", "2", "--microbatches", "3"]) == 0
    out = capsys.readouterr().out
    assert "gpipe: 2 ranks, 2 stages, 3 micro-batches" in out
    # m(F+B) = 9 of work on each rank, (n-1)(F+B) = 3 of waiting.
    assert "makespan 12, bubble 25.0%" in out


def test_schedule_draws_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--ranks", "3", "--microbatches", "4", "--draw"]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if "|" in line]
    assert len(rows) == 3
    assert all(f"F{microbatch}" in row and f"B{microbatch}" in row for row in rows for microbatch in range(4))
    assert max(map(len, out.splitlines())) <= 80


def test_schedule_as_json_says_what_it_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"forward": 2, "input_grad": [2, 2, 2, 2], "transfer": 0.5}')
    words = ["--kind", "zb_v", "--ranks", "2", "--microbatches", "3", "--costs", str(costs), "--json"]
    assert main(["schedule", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    schedule = torchrelay.schedules.make("zb_v", ranks=2, microbatches=3)
    simulation = schedule.simulate(torchrelay.schedules.Costs(2, [2] * 4, transfer=0.5))
    assert (said["kind"], said["ranks"], said["microbatches"]) == ("zb_v", 2, 3)
    assert said["makespan"] == simulation.makespan
    assert said["bubble_rate"] == simulation.bubble_rate
    assert said["peak_memory"] == simulation.peak_memory
    assert said["actions"] == [[str(action) for action in schedule.actions(rank)] for rank in range(2)]


@pytest.mark.parametrize("form", ["json", "csv"])
@pytest.mark.parametrize("kind", ["1f1b", "v_half", "dualpipe_v"])
def test_what_is_printed_can_be_verified_and_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str, kind: str
) -> None:
    file = tmp_path / f"{kind}.{form}"
    assert main(["schedule", "--kind", kind, "--ranks", "2", "--microbatches", "4", f"--{form}"]) == 0
    file.write_text(capsys.readouterr().out)
    assert main(["schedule", "verify", str(file)]) == 0
    assert f"{kind}: 2 ranks, " in capsys.readouterr().out
    assert main(["simulate", str(file)]) == 0
    makespan = torchrelay.schedules.make(kind, ranks=2, microbatches=4).simulate().makespan
    assert f"makespan {makespan:g}, " in capsys.readouterr().out


def test_compare_has_a_line_for_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "compare", "--ranks", "4", "--microbatches", "7", "--memory", "4"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {"schedule", *torchrelay.schedules.names()}
    assert lines["zb_v"].endswith("ok")
    assert lines["gpipe"].endswith("too much memory on rank 0: 7 of 4")
    assert "needs at least as many micro-batches as stages (8)" in lines["dualpipe_v"]


def test_search_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "search", "--ranks", "3", "--microbatches", "6", "--memory", "5"]) == 0
    out = capsys.readouterr().out
    assert "peak memory 5" in out
    assert "proven to be the best that there is" in out
    assert main(["schedule", "search", "--ranks", "2", "--microbatches", "4", "--placement", "v", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [{int(action[0]) for action in rank} for rank in said["actions"]] == [{0, 3}, {1, 2}]
    assert said["lower_bound"] <= said["cost"] <= said["makespan"]


@pytest.mark.parametrize("name", ["page.html", "picture.svg"])
def test_schedule_is_drawn_to_a_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    words = ["--kind", "dualpipe_v", "--ranks", "2", "--microbatches", "4", "--html", str(file)]
    assert main(["schedule", *words]) == 0
    text = file.read_text()
    assert "forward of micro-batch 3 on stage 2: " in text
    assert text.startswith("<!DOCTYPE html>" if name == "page.html" else "<svg ")


@pytest.mark.parametrize(
    "words", [["schedule", "--draw"], ["buckets", "--sizes", "1,2"], ["--version"], ["demo", "--help"]]
)
def test_what_needs_no_torch_does_not_wait_for_it(words: list[str]) -> None:
    code = f"import sys; from torchrelay.cli import main; main({words!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_a_reader_that_stops_early_gets_no_traceback() -> None:
    command = f"{sys.executable} -m torchrelay schedule --ranks 64 --microbatches 2000 --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_buckets_of_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    # Two float64 of 100 reach 1600 bytes, the limit of the first bucket; the third fills no second one.
    mib = 1600 / (1 << 20)
    words = ["--sizes", "100,100,50", "--dtype", "float64", "--first-mb", str(mib), "--cap-mb", str(mib)]
    assert main(["buckets", *words]) == 0
    head, _, first, second = capsys.readouterr().out.splitlines()
    assert "3 gradients" in head
    assert "2 buckets" in head
    assert first.split()[0:3] == ["0", "400", "B"], "what is defined last is reduced first"
    assert second.split()[0:3] == ["1", "1.562", "KiB"]


def test_buckets_of_a_model_names_its_parameters(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buckets", "--model", f"{models}:small"]) == 0
    out = capsys.readouterr().out
    assert "4 gradients" in out
    assert "1.bias" in out


def test_buckets_of_a_model_larger_than_memory(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buckets", "--model", f"{models}:huge"]) == 0
    assert "3.638 TiB" in capsys.readouterr().out


def test_buckets_of_a_model_that_cannot_be_built_without_values(
    models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["buckets", "--model", f"{models}:reads_a_value"]) == 0
    assert "2 gradients" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        ("breaks", "RuntimeError: no such luck"),
        ("no_module", "list"),
        ("not_callable", "int"),
        ("lazy", "lazy"),
        ("missing", "missing"),
    ],
)
def test_a_model_that_is_none_is_one_sentence(
    factory: str, named: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["buckets", "--model", f"{models}:{factory}"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert_one_sentence(said.err)
    assert named in said.err


def test_the_folder_that_one_stands_in_is_searched(models: str) -> None:
    script = Path(sys.executable).with_name("torchrelay")
    done = subprocess.run([str(script), "buckets", "--model", f"{models}:small"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
