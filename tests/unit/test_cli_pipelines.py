"""`torchrelay plan` and `torchrelay trace`: what they print and write, and how they end."""

import json
import sys
from pathlib import Path

import pytest
from torchrelay.cli import main

MODELS = """
import torch
from torch import nn

def equal():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

def huge():
    return nn.Sequential(nn.Linear(8, 1_000_000), nn.Linear(1_000_000, 1_000_000), nn.Linear(1_000_000, 8))

def words():
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))

def no_sequential():
    return nn.Linear(8, 8)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with factories, in the folder that the command runs in."""
    name = f"pipelined_models_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_a_plan_has_partitions_schedule_bubble_and_memory(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", f"{models}:equal", "--balance", "1,3", "--microbatches", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "partition 0 on cpu: layer 0; 72 parameters, 288 bytes",
        "partition 1 on cpu: layers 1, 2, 3; 216 parameters, 864 bytes",
        "balance=[1, 3]",
        "",
        "rank 0 | F0 F1 F2  .  . B2 R1 B1 R0 B0",
        "rank 1 |  . F0 F1 F2 B2 R1 B1 R0 B0  .",
        "(time runs to the right)",
        "",
        "verified: complete, in order, free of deadlock",
        "bubble: 21.4%, if all partitions take the same time and a backward that of two forwards",
        "memory: at most the activations of 1 of 3 micro-batches are kept, and the inputs alone of 2",
    ]


def test_a_plan_of_a_model_larger_than_memory_on_devices_that_are_not_there(
    models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--partitions", "3", "--devices", "cuda:0, cuda:1, cuda:7", "--checkpoint", "never"]
    assert main(["plan", "--model", f"{models}:huge", *words]) == 0
    said = capsys.readouterr().out
    assert "partition 2 on cuda:7: layer 2" in said
    assert "balance=[1, 1, 1]" in said
    assert "the activations of 4 of 4 micro-batches are kept\n" in said
    assert "streams, free of races" in said


@pytest.mark.parametrize("ending", ["html", "svg", "json"])
def test_a_trace_is_printed_and_written(
    models: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--input-shape", "8,8", "--devices", "cpu,cpu", "--steps", "2", "--output", f"there.{ending}"]
    assert main(["trace", "--model", f"{models}:equal", *words]) == 0
    said = capsys.readouterr().out
    assert [line.split()[:2] for line in said.splitlines()[1:3]] == [["0", "4"], ["1", "4"]]
    assert said.endswith(f"drawn beside the plan: there.{ending}\n")
    written = (tmp_path / f"there.{ending}").read_text(encoding="utf-8")
    if ending == "json":
        assert {event["args"]["step"] for event in json.loads(written)["traceEvents"] if event["ph"] == "X"} == {0, 1}
    else:
        assert "micro-batch 3, partition 1 (cpu)" in written


def test_a_trace_with_an_input_of_another_dtype(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "--model", f"{models}:words", "--input-shape", "4,3", "--devices", "cpu,cpu"]
    assert main([*words, "--input-dtype", "int64"]) == 0
    assert Path("timeline.html").exists()
    assert main(words) == 2
    assert "RuntimeError" in capsys.readouterr().err


TRACED = ["trace", "equal", "--input-shape", "8,8"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "no_sequential"], "torch.nn.Sequential"),
        (["plan", "equal", "--balance", "2,x"], "--balance must be numbers of layers"),
        (["plan", "equal", "--balance", "2,3"], "5"),
        (["plan", "equal", "--partitions", "5"], "4 layers cannot be divided into 5"),
        (["plan", "equal", "--checkpoint", "sometimes"], "--checkpoint must be one of always, except_last, never"),
        (["plan", "equal", "--devices", "cpu"], "devices"),
        (["plan", "equal", "--devices", "cpu,toaster"], "--devices"),
        (["plan", "equal", "--microbatches", "0"], "micro-batches"),
        ([*TRACED, "--output", "there.pdf"], "ends in .html, .svg, .json, and is 'there.pdf'"),
        ([*TRACED, "--output", "no/such/there.svg"], "there is no folder no/such"),
        ([*TRACED, "--balance", "1,1"], "balance"),
        ([*TRACED, "--devices", "cpu,toaster"], "toaster"),
        (["trace", "equal", "--input-shape", "8,7"], "shapes cannot be multiplied"),
        (["trace", "equal", "--input-shape", "8,y"], "--input-shape must be sizes"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    models: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, factory, *options = words
    assert main([command, "--model", f"{models}:{factory}", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torchrelay: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
