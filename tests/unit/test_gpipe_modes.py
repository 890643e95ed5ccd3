"""What the caller has active around a step (modes, hooks, profilers) sees all of it, however it is carried out."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpipe_support import WAYS, assert_close, assert_same_gradients, loss_of, mlp, rows
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torchrelay import GPipe

pytestmark = pytest.mark.timeout(60)

EVERY_WAY = pytest.mark.parametrize("way", WAYS)
EVERY_MODE = pytest.mark.parametrize("mode", ["never", "except_last", "always"])


def split_as(way: str, mode: str, module: nn.Sequential) -> GPipe:
    executor, balance, chunks = WAYS[way]
    return GPipe(
        copy.deepcopy(module),
        balance,
        devices=["cpu"] * len(balance),
        chunks=chunks,
        checkpoint=mode,
        executor=executor,
    )


def steps_of(way: str) -> range:
    """As "auto" begins in lanes and tries the caller's thread later on."""
    return range(7 if way == "auto" else 1)


def recomputed(way: str, mode: str) -> int:
    chunks = WAYS[way][2]
    return {"never": 0, "except_last": chunks - 1, "always": chunks}[mode]


def linear_flops(count: int) -> int:
    return 2 * count * 3 * 3


@EVERY_WAY
@EVERY_MODE
def test_a_flop_counter_counts_forward_backward_and_recomputation(way: str, mode: str) -> None:
    module = mlp(3, 3, 3)
    model = split_as(way, mode, module)
    each = 6 // WAYS[way][2]
    for _ in steps_of(way):
        with FlopCounterMode(display=False) as both:
            with FlopCounterMode(display=False) as forward:
                loss = loss_of(model(rows(6, 3, requires_grad=True)))
            with FlopCounterMode(display=False) as backward:
                loss.backward()
        again = recomputed(way, mode) * 2 * linear_flops(each)
        assert forward.get_total_flops() == 2 * linear_flops(6)
        assert backward.get_total_flops() == 2 * 2 * linear_flops(6) + again
        assert both.get_total_flops() == forward.get_total_flops() + backward.get_total_flops()


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


@EVERY_WAY
@EVERY_MODE
@pytest.mark.parametrize(("kind", "name"), [(Dispatched, "aten.tanh.default"), (Called, "tanh")])
def test_a_mode_of_the_users_sees_each_task(kind: Any, name: str, way: str, mode: str) -> None:
    module = mlp(3, 3, 3)
    model = split_as(way, mode, module)
    chunks = WAYS[way][2]
    for _ in steps_of(way):
        model.zero_grad(), module.zero_grad()
        with kind() as seen:
            loss = loss_of(model(rows(6, 3)))
            assert seen.counts[name] == 2 * chunks
        loss.backward()
        loss_of(module(rows(6, 3))).backward()
        assert_same_gradients(model, module)
        with kind() as seen:
            torch.autograd.backward(loss_of(model(rows(6, 3))))
            again = 2 * recomputed(way, mode) if kind is Dispatched else None
        if again is not None:  # torch itself switches function modes off around a backward
            assert seen.counts[name] == 2 * chunks + again
            assert seen.counts["aten.tanh_backward.default"] == 2 * chunks


@EVERY_WAY
@EVERY_MODE
@pytest.mark.parametrize("around", ["forward", "both"])
def test_saved_tensor_hooks_keep_what_layers_save(around: str, way: str, mode: str) -> None:
    """A checkpointed forward saves nothing, a recomputation as its forward would."""
    module = mlp(3, 3, 3)
    model = split_as(way, mode, module)
    chunks = WAYS[way][2]
    for _ in steps_of(way):
        packed: list[Tensor] = []
        unpacked: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, packed=packed: packed.append(t) or t.clone(), lambda t, unpacked=unpacked: unpacked.append(t) or t
        )
        model.zero_grad(), module.zero_grad()
        with hooks:
            output = model(rows(6, 3))
        loss = loss_of(output)
        assert sum(t.dim() == 2 and t.shape[1] == 3 and len(t) == 6 // chunks for t in packed) >= 2 * (
            chunks - recomputed(way, mode)
        )
        with hooks if around == "both" else contextlib.nullcontext():
            loss.backward()
        loss_of(module(rows(6, 3))).backward()
        assert_same_gradients(model, module)
        assert len(unpacked) == len(packed)


@EVERY_WAY
@EVERY_MODE
def test_saved_tensors_may_be_written_on_or_are_refused(way: str, mode: str) -> None:
    """Under torch's context for that, which clones what is written on, but knows a micro-batch by another name."""
    module = mlp(3, 3, 3)
    model = split_as(way, mode, module)
    is_plain = way == "one task" and mode != "always"
    for net in (module, model):
        value = rows(6, 3)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            output = net(value)
            loss = loss_of(output)
            output.detach().mul_(2)
            if net is module or is_plain:
                value.mul_(2)
            loss.backward()
    assert_same_gradients(model, module)
    if not is_plain:
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            loss = loss_of(model(value))
            value.mul_(2)
            with pytest.raises(RuntimeError, match=r"tensor 0 of the input was written on .* write on a clone"):
                loss.backward()


@EVERY_WAY
@EVERY_MODE
@pytest.mark.parametrize("profile", ["torch.profiler", "autograd.profiler"])
@pytest.mark.filterwarnings("ignore:torch's profiler records this thread only")
def test_a_profiler_has_a_range_for_each_task(profile: str, way: str, mode: str) -> None:
    model = split_as(way, mode, mlp(3, 3, 3))
    model(rows(6, 3)).sum().backward()
    if profile == "torch.profiler":
        profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    else:
        profiler = torch.autograd.profiler.profile(use_cpu=True)
    with profiler:
        model(rows(6, 3)).sum().backward()
    names = Counter(
        event.name if hasattr(event, "name") else event.key
        for event in (profiler.events() if profile == "torch.profiler" else profiler.function_events)
        if event.name.startswith("torchrelay ")
    )
    partitions, chunks = len(model.partitions), WAYS[way][2]
    tasks = [(kind, i) for kind in "FB" for i in range(chunks)] + [("R", i) for i in range(recomputed(way, mode))]
    assert names == Counter(
        f"torchrelay {kind} partition {j} micro-batch {i}" for kind, i in tasks for j in range(partitions)
    )


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, value: Tensor) -> Tensor:
        return checkpoint(self.inner, value, use_reentrant=self.reentrant)


@EVERY_WAY
@EVERY_MODE
def test_layers_that_checkpoint_themselves(way: str, mode: str) -> None:
    inner = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)]
    layers = [
        nn.Linear(3, 3),
        Checkpointed(inner[0], reentrant=False),
        nn.Tanh(),
        Checkpointed(inner[1], reentrant=False),
    ]
    module = nn.Sequential(*layers).double()
    model = split_as(way, mode, module)
    for _ in steps_of(way):
        model.zero_grad(), module.zero_grad()
        for net in (module, model):
            loss_of(net(rows(6, 3))).backward()
        assert_same_gradients(model, module)


@EVERY_WAY
@EVERY_MODE
def test_layers_that_checkpoint_themselves_reentrantly(way: str, mode: str) -> None:
    """torch refuses that where gradients of chosen tensors are asked for; one task is the plain module."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    module = nn.Sequential(nn.Linear(3, 3), Checkpointed(inner, reentrant=True), nn.Tanh(), nn.Tanh()).double()
    model = split_as(way, mode, module)
    loss = loss_of(model(rows(6, 3)))
    if way == "one task" and mode != "always":
        loss.backward()
        loss_of(module(rows(6, 3))).backward()
        assert_same_gradients(model, module)
        return
    with pytest.raises(RuntimeError, match="use_reentrant=False") as caught:
        loss.backward()
    assert "layer '1'" in str(getattr(caught.value, "__notes__", "layer '1'"))


@EVERY_WAY
@EVERY_MODE
def test_a_layer_that_uses_transforms(way: str, mode: str) -> None:
    """torch.func refuses the hooks of a checkpointed forward: an error with the remedy, and right without."""

    class Slope(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value * torch.func.grad(lambda v: v.sin().sum())(value)

    module = nn.Sequential(nn.Linear(3, 3), Slope(), nn.Linear(3, 3), Slope()).double()
    model = split_as(way, mode, module)
    for _ in steps_of(way):
        model.zero_grad(), module.zero_grad()
        if recomputed(way, mode):
            with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
                model(rows(6, 3))
            assert 'checkpoint="never"' in str(getattr(caught.value, "__notes__", 'checkpoint="never"'))
            continue
        loss_of(module(rows(6, 3))).backward()
        loss_of(model(rows(6, 3))).backward()
        assert_same_gradients(model, module)


@EVERY_WAY
@EVERY_MODE
def test_a_fork_of_the_generator_in_a_layer_and_around_the_step(way: str, mode: str) -> None:
    class Forks(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(5)
                return value * torch.rand(value.shape[1], dtype=value.dtype)

    module = nn.Sequential(nn.Linear(3, 3), Forks(), nn.Linear(3, 3), Forks()).double()
    model = split_as(way, mode, module)
    for _ in steps_of(way):
        model.zero_grad(), module.zero_grad()
        before = torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            loss_of(model(rows(6, 3))).backward()
        assert torch.equal(torch.get_rng_state(), before)
        loss_of(module(rows(6, 3))).backward()
        assert_same_gradients(model, module)


FLAGS: dict[str, Callable[[], Any]] = {
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "warn only": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
}


@EVERY_WAY
@EVERY_MODE
@pytest.mark.parametrize("flag", FLAGS)
def test_deterministic_algorithms(flag: str, way: str, mode: str) -> None:
    seen: list[tuple[bool, bool]] = []

    class Look(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            seen.append(
                (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
            )
            return value

    module = nn.Sequential(nn.Linear(3, 3), Look(), nn.Linear(3, 3), Look()).double()
    model = split_as(way, mode, module)
    try:
        FLAGS[flag]()
        outputs = [model(rows(6, 3)) for _ in steps_of(way)]
        for output in outputs:
            loss_of(output).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(seen) == {(True, flag == "warn only")}
    for output in outputs:
        assert_close(output, module(rows(6, 3)))
