"""Ctrl-C as something is put back: that it is put back all the same."""

import pytest
import torch
from torchrelay.runtime import generators
from torchrelay.runtime.generators import Source, Turn
from torchrelay.runtime.recompute import checkpointed, is_checkpointing


def test_a_turn_is_given_back_though_its_end_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    end, calls = Turn.end, 0

    def interrupted(turn: Turn) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        end(turn)

    before = torch.get_rng_state()
    monkeypatch.setattr(Turn, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Source(torch.device("cpu")).in_turn(7, lambda _: torch.rand(3))
    assert not any(generators._QUEUES.values())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("place", ["exit of the hooks", "task"])
def test_a_checkpointed_forward_leaves_no_hooks_behind(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if place == "exit of the hooks":
        monkeypatch.setattr(torch.autograd.graph.saved_tensors_hooks, "__exit__", interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        checkpointed(interrupt if place == "task" else lambda: None)
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    assert top is None or top(True) is None
    assert not is_checkpointing()
