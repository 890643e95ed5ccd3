"""What is done to a model between steps: saved, loaded, copied, changed."""

import copy
import io
import pickle
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from gpipe_support import mlp, rows, split
from torch import Tensor, nn
from torchrelay import GPipe

pytestmark = pytest.mark.timeout(60)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()


def pipe(executor: str, mode: str = "always") -> GPipe:
    return GPipe(net(), [2, 2], devices=["cpu"] * 2, chunks=3, checkpoint=mode, executor=executor)


def step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    output = model(rows(6, 3))
    output.square().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


def assert_bitwise(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def through_torch_save(model: GPipe) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("when", ["before any step", "after a step", "between forward and backward"])
def test_a_copy_goes_on_bitwise_as_the_model_does(executor: str, way: str, mode: str, when: str) -> None:
    model = pipe(executor, mode)
    if when != "before any step":
        step(model)
    pending = model(rows(6, 3)) if when.startswith("between") else None
    copied = COPIES[way](model)
    if pending is not None:
        pending.sum().backward()
    for _ in range(2):
        assert_bitwise(step(copied), step(model))
    assert {(copied.chunks, copied.checkpoint, copied.executor)} == {(3, mode, executor)}


@pytest.mark.parametrize(("name", "value"), [("checkpoint", "sometimes"), ("executor", "magic"), ("batch_dim", -1)])
def test_an_option_that_is_changed_later_is_looked_at_as_well(executor: str, name: str, value: object) -> None:
    model = pipe(executor)
    with pytest.raises(ValueError, match=name):
        setattr(model, name, value)
    step(model)


def test_options_may_be_changed_between_steps(executor: str) -> None:
    model = pipe(executor, "never")
    expected = step(model)[:-3]  # without the buffers
    for other in ("lanes", "serial", "auto"):
        for mode in ("never", "except_last", "always"):
            model.executor, model.checkpoint = other, mode
            assert_bitwise(step(model)[:-3], expected)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_keys_of_the_plain_module_are_loaded(executor: str, assign: bool, strict: bool) -> None:
    module, model = net(), pipe(executor)
    step(model)
    result = model.load_state_dict(copy.deepcopy(module.state_dict()), assign=assign, strict=strict)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_bitwise(step(model), step(pipe(executor)))
    assert model.plain().state_dict().keys() == module.state_dict().keys()


def test_what_is_missing_is_named_as_in_the_pipeline(executor: str) -> None:
    state = net().state_dict()
    del state["0.weight"]
    state["9.weight"] = torch.zeros(1)
    result = pipe(executor).load_state_dict(dict(state), strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["partitions.0.0.weight"], ["9.weight"])
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "partitions\.0\.0\.weight"'):
        pipe(executor).load_state_dict(dict(state))


def test_a_layer_called_partitions() -> None:
    module = nn.Sequential(OrderedDict(partitions=nn.Linear(3, 3), other=nn.Linear(3, 3)))
    model = split(module, [1, 1])
    for state in (module.state_dict(), copy.deepcopy(model.state_dict())):
        model[0].weight.data.zero_()
        model.load_state_dict(state)
        assert torch.equal(model[0].weight, module[0].weight)


def test_hooks_of_saving_and_loading_are_called_once(executor: str) -> None:
    model, log = pipe(executor), []
    model.register_state_dict_pre_hook(lambda *_: log.append("before saving"))
    model.register_state_dict_post_hook(lambda *_: log.append("after saving"))
    model.register_load_state_dict_pre_hook(lambda *_: log.append("before loading"))
    model.register_load_state_dict_post_hook(lambda *_: log.append("after loading"))
    model.load_state_dict(model.state_dict())
    assert log == ["before saving", "after saving", "before loading", "after loading"]


def test_extra_state_and_a_pipeline_inside_a_module(executor: str) -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    module = nn.Sequential(Counting(3, 3), nn.Tanh(), nn.Linear(3, 3))
    module[0].count = 5
    state = module.state_dict()
    outer = nn.ModuleDict({"body": split(module, [1, 2], executor=executor)})
    outer["body"][0].count = 0
    outer.load_state_dict({f"body.{key}": value for key, value in state.items()})
    assert outer["body"][0].count == 5


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("meta")])
def test_to_empty_on_a_device_is_a_type_error(executor: str, device: Any) -> None:
    model = pipe(executor)
    with pytest.raises(TypeError, match="devices of their own"):
        model.to_empty(device=device)
    assert model.to_empty(device=None) is model
    assert model[0].weight.device.type == "cpu"


def test_a_pipeline_on_the_meta_device(executor: str) -> None:
    module = nn.Sequential(nn.Linear(3, 4, device="meta"), nn.Linear(4, 2, device="meta"))
    model = GPipe(module, [1, 1], devices=["meta"] * 2, chunks=2, executor=executor)
    output = model(torch.empty(5, 3, device="meta"))
    assert output.shape == (5, 2)
    output.sum().backward()
    assert model[0].weight.grad.device.type == "meta"


def test_dropped_models_leave_no_threads() -> None:
    before = threading.active_count()
    for _ in range(20):
        step(pipe("lanes"))
    assert threading.active_count() == before


def test_shared_memory_and_apply_and_freezing(executor: str) -> None:
    model = split(mlp(3, 3, 3), [2, 2], chunks=2, executor=executor)
    model.share_memory()
    assert all(parameter.is_shared() for parameter in model.parameters())
    seen: list[str] = []
    model.apply(lambda module: seen.append(type(module).__name__))
    assert seen.count("Linear") == 2
    model.requires_grad_(False)
    assert not model(rows(4, 3)).requires_grad
    model.requires_grad_(True)
    model(rows(4, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
