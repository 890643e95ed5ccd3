"""`torchrelay balance`: what it prints, and how it ends."""

import sys
from pathlib import Path

import pytest
from torchrelay.cli import main

MODELS = """
from torch import nn

def equal():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

def huge():
    return nn.Sequential(nn.Linear(8, 1_000_000), nn.Linear(1_000_000, 1_000_000), nn.Linear(1_000_000, 8))

def no_sequential():
    return nn.Linear(8, 8)

def words():
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with factories, in the folder that the command runs in."""
    name = f"balanced_models_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_by_size(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balance", "--model", f"{models}:equal", "--input-shape", "16,8", "--chunks", "4"]) == 0
    said = capsys.readouterr().out
    # For each layer 4 rows of 8 numbers, and twice 8 * 8 + 8 parameters.
    assert said.splitlines() == [
        "partition 0: 2 layers, 0 to 1; 1,408 bytes",
        "partition 1: 2 layers, 2 to 3; 1,408 bytes",
        "largest: 1,408 bytes, 1.00 times the even share",
        "balance=[2, 2]",
    ]


def test_by_size_of_a_model_larger_than_memory(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balance", "--model", f"{models}:huge", "--input-shape", "16,8", "--partitions", "3"]) == 0
    assert "partition 1: 1 layer, 1; 8,000,072,000,000 bytes" in capsys.readouterr().out


def test_by_time(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input-shape", "16,8", "--by", "time", "--timeout", "0.05", "--device", "cpu", "--partitions", "4"]
    assert main(["balance", "--model", f"{models}:equal", *words]) == 0
    said = capsys.readouterr().out
    assert said.endswith("balance=[1, 1, 1, 1]\n")
    assert said.count(" ms") == 5


def test_an_input_of_another_dtype(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["balance", "--model", f"{models}:words", "--input-shape", "4,3", "--device", "cpu"]
    assert main([*words, "--input-dtype", "int64"]) == 0
    assert capsys.readouterr().out.endswith("balance=[1, 1]\n")
    assert main(words) == 2
    assert "layer '0', a Embedding" in capsys.readouterr().err or sys.version_info < (3, 11)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["equal", "--input-shape", "16,8", "--partitions", "5"], "4 layers cannot be divided into 5"),
        (["equal", "--input-shape", "16,x"], "--input-shape"),
        (["equal", "--input-shape", "16,8", "--by", "weight"], "--by"),
        (["equal", "--input-shape", "16,8", "--input-dtype", "float33"], "--input-dtype"),
        (["equal", "--input-shape", "16,7"], "layer"),
        (["no_sequential", "--input-shape", "16,8"], "torch.nn.Sequential"),
        (["missing", "--input-shape", "16,8"], "missing"),
    ],
)
def test_user_errors_are_one_sentence(
    words: list[str], said: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, *others = words
    assert main(["balance", "--model", f"{models}:{model}", *others]) == 2
    errors = capsys.readouterr().err
    assert said in errors or (said == "layer" and sys.version_info < (3, 11))
    assert errors.count("\n") == 1
