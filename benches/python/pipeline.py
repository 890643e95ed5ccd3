"""What pipelining costs: paced layers over the ideal wavefront, and tiny layers over the same tasks without threads.

    python benches/python/pipeline.py [--rounds N]

Paced layers sleep, so that two cores can show the quality of a schedule of eight partitions. Tiny layers show the
overhead of a task. Absolute times are noise on a shared machine; every figure is a ratio or a difference of steps that
were interleaved in one run. Where torchgpipe is installed, its tiny layers run beside ours.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrelay import GPipe
from torchrelay.schedules import Costs

try:
    import torchgpipe  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    torchgpipe = None

FORWARD, BACKWARD = 5e-3, 10e-3  # seconds a paced task takes


class _Pace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD)
        return gradient.clone()


class Paced(nn.Module):
    """A layer that takes a fixed time, whatever else the machine does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Pace.apply(x * self.weight)


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def build(layer: Callable[[], nn.Module], n: int, m: int, executor: str, checkpoint: str = "never") -> GPipe:
    torch.manual_seed(0)
    return GPipe(
        nn.Sequential(*(layer() for _ in range(n))),
        [1] * n,
        devices=["cpu"] * n,
        chunks=m,
        checkpoint=checkpoint,  # type: ignore[arg-type]
        executor=executor,  # type: ignore[arg-type]
    )


def peer(layer: Callable[[], nn.Module], n: int, m: int) -> dict[str, nn.Module]:
    """The same in torchgpipe, where it is at hand."""
    if torchgpipe is None:
        return {}
    torch.manual_seed(0)
    layers = nn.Sequential(*(layer() for _ in range(n)))
    return {"torchgpipe": torchgpipe.GPipe(layers, [1] * n, devices=["cpu"] * n, chunks=m, checkpoint="never")}


def step(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    start = time.perf_counter()
    y = model(x)
    middle = time.perf_counter()
    y.backward(torch.ones_like(y))
    return middle - start, time.perf_counter() - middle


def interleaved(models: dict[str, nn.Module], x: Tensor, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Steps of each model, in random order within each round."""
    for model in models.values():
        for _ in range(3):
            step(model, x)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    order, dice = list(models), random.Random(0)
    for _ in range(rounds):
        dice.shuffle(order)
        for name in order:
            for parameter in models[name].parameters():
                parameter.grad = None
            times[name].append(step(models[name], x))
    return times


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def paced(rounds: int, checkpoint: str) -> None:
    print(
        f"paced layers ({FORWARD * 1e3:.0f} ms forward, {BACKWARD * 1e3:.0f} ms backward), checkpoint={checkpoint!r}: "
        f"makespan / the plan's, of tasks that take as long as the plain layers did in the same rounds (and of tasks "
        f"that take just the pace)"
    )
    for n, m in (2, 8), (4, 16), (8, 32):
        model = build(Paced, n, m, "auto", checkpoint)
        plain = model.plain()
        x = torch.ones(m, 4)
        found: list[tuple[tuple[float, float], tuple[float, float]]] = []
        for _ in range(rounds + 2):
            # Once through the plain layers: what a task of this pace takes on this machine, at this time.
            unit = step(plain, x[:1])
            found.append((step(model, x), unit))
        taken = [median([taken[way] for taken, _ in found[2:]]) for way in range(2)]
        units = [median([unit[way] / n for _, unit in found[2:]]) for way in range(2)]
        fair, bare = ideal(model, m, *units), ideal(model, m, FORWARD, BACKWARD)
        row = [
            f"{name} {taken[way] / fair[way]:.3f} ({taken[way] / bare[way]:.3f})"
            for way, name in enumerate(("forward", "backward"))
        ]
        print(f"  {n} partitions x {m:2} micro-batches: {', '.join(row)}")


def ideal(model: GPipe, m: int, forward: float, backward: float) -> tuple[float, float]:
    """What forward and backward take if nothing costs time but the layers; a backward begins when it is asked for."""
    schedule = model.plan.schedule(m, recompute=model.checkpoint)
    after = schedule.simulate(Costs(forward=0.0, backward=backward, recompute=forward)).makespan
    return (len(model.partitions) + m - 1) * forward, after


def overhead(rounds: int) -> None:
    print("tiny layers: microseconds a task over the same plan in the caller's thread (and absolute)")
    for n, m in (2, 8), (4, 16), (8, 32):
        executors = ("auto", "lanes", "serial")
        models = {executor: build(tiny, n, m, executor) for executor in executors} | peer(tiny, n, m)
        times = interleaved(models, torch.ones(2 * m, 4), rounds)
        print(f"  {n} partitions x {m:2} micro-batches")
        for way, name in enumerate(("forward", "backward")):
            taken = {key: [1e6 * t[way] / (n * m) for t in found] for key, found in times.items()}
            row = []
            for executor in executors[:2]:
                extra = median([a - b for a, b in zip(taken[executor], taken["serial"], strict=True)])
                row.append(f"executor={executor!r} {extra:+.1f} ({median(taken[executor]):.1f})")
            row.append(f"serial {median(taken['serial']):.1f}")
            if "torchgpipe" in taken:
                ratio = median([a / b for a, b in zip(taken["auto"], taken["torchgpipe"], strict=True)])
                row.append(f"torchgpipe {median(taken['torchgpipe']):.1f} ('auto' over it: {ratio:.2f})")
            print(f"    {name}: {', '.join(row)}")


class Drawing(nn.Module):
    """A layer with random numbers of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.dropout = layer, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.layer(x))


def drawing(layer: Callable[[], nn.Module], which: range) -> Callable[[], nn.Module]:
    """Makes layers, of which those with numbers in `which` draw."""
    numbers = iter(range(10**6))
    return lambda: Drawing(layer()) if next(numbers) in which else layer()


def randomness(rounds: int) -> None:
    n, m = 4, 16
    print(
        f"random numbers, {n} partitions x {m} micro-batches: paced layers, makespan over that of layers that draw none"
    )
    kinds = {"none draws": range(0), "one draws": range(1, 2), "all draw": range(n)}
    models = {kind: build(drawing(Paced, which), n, m, "lanes") for kind, which in kinds.items()}
    times = interleaved(models, torch.ones(m, 4), max(rounds // 5, 3))
    for kind in list(kinds)[1:]:
        ratios = [
            median([a[way] / b[way] for a, b in zip(times[kind], times["none draws"], strict=True)]) for way in range(2)
        ]
        print(f"  {kind}: forward {ratios[0]:.3f}, backward {ratios[1]:.3f}")
    tasks = n * m
    pairs = {
        f"{name}, {kind}": model
        for kind in ("none draws", "all draw")
        for name, model in (
            ("gpipe", build(drawing(tiny, kinds[kind]), n, m, "serial")),
            ("plain", build(drawing(tiny, kinds[kind]), n, m, "serial").plain()),
        )
    }
    inputs = torch.ones(m, 4)
    found: dict[str, list[float]] = {name: [] for name in pairs}
    for _ in range(rounds):
        for name, model in pairs.items():
            start = time.perf_counter()
            for part in [inputs] if name.startswith("gpipe") else inputs.chunk(m):
                model(part)
            found[name].append((time.perf_counter() - start) / tasks * 1e6)
    extra = {
        name: median([a - b for a, b in zip(found[f"{name}, all draw"], found[f"{name}, none draws"], strict=True)])
        for name in ("gpipe", "plain")
    }
    print(f"  tiny layers, microseconds of drawing in a forward task: {extra['gpipe']:.1f}; plain {extra['plain']:.1f}")


def one_partition(rounds: int) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    models = {"plain": layers, "gpipe": GPipe(layers, [8], devices=["cpu"], chunks=1, checkpoint="never")}
    times = interleaved(models, torch.ones(64, 256), rounds)
    ratio = median([sum(a) / sum(b) for a, b in zip(times["gpipe"], times["plain"], strict=True)])
    print(f"one partition, one micro-batch, 8 x Linear(256), over the plain module: {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="steps of each kind (paced: a fifth of that)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for checkpoint in ("never", "always"):
        paced(max(rounds // 5, 3), checkpoint)
    overhead(rounds)
    randomness(rounds)
    one_partition(rounds)


if __name__ == "__main__":
    main()
