"""`torchrelay.trace`: what is recorded, what is made of it, and that it costs nothing and holds nothing."""

from __future__ import annotations

import copy
import gc
import json
import re
import threading
import time
import weakref
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrelay
from gpipe_support import Call, loss_of, mlp, rows
from torch import Tensor, nn
from torchrelay import GPipe, trace
from torchrelay.planning.partitions import plan_partitions
from torchrelay.runtime import recording
from torchrelay.runtime.order import Order
from torchrelay.runtime.recording import Half, Recording, TaskSpan
from torchrelay.trace import RecordedStep, Timeline, page, picture, summary

MODES = {"never": 0, "except_last": 3, "always": 4}  # of 4 micro-batches, how many are recomputed
SVG = "{http://www.w3.org/2000/svg}"


def pipe(n: int = 3, chunks: int = 4, **options: Any) -> GPipe:
    return GPipe(mlp(*[3] * (n + 1)), [2] * n, devices=["cpu"] * n, chunks=chunks, **options)


def recorded(model: GPipe, steps: int = 1) -> Timeline:
    with trace.record(model) as timeline:
        for _ in range(steps):
            loss_of(model(rows(8, 3))).backward()
    return timeline


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return gradient, None


# ---- what is recorded


@pytest.mark.parametrize("mode", MODES)
def test_every_task_of_the_plan_is_recorded_once_and_in_its_order(mode: str, executor: str) -> None:
    model = pipe(checkpoint=mode, executor=executor)
    timeline = recorded(model, steps=2)
    schedule = model.plan.schedule(4, recompute=mode)
    assert [step.number for step in timeline.steps] == [0, 1] == list(range(len(timeline)))
    for step in timeline.steps:
        assert [half.name for half in step.halves] == ["forward", "backward"]
        assert step.is_complete
        assert step.is_serial == (executor == "serial")
        for rank in range(schedule.ranks):
            ran = [task for half in step.halves for task in half.tasks if task.partition == rank]
            assert [f"{rank}{task.kind}{task.microbatch}" for task in ran] == list(map(str, schedule.actions(rank)))
            assert all(task.start <= task.end for task in ran)
            assert all(before.end <= after.start for before, after in pairwise(ran))
        assert sum(task.kind == "R" for half in step.halves for task in half.tasks) == 3 * MODES[mode]


def test_no_task_begins_before_what_it_needs_has_ended() -> None:
    (step,) = recorded(pipe(checkpoint="always")).steps
    for half in step.halves:
        for tasks in (half.tasks, half.planned):
            by_place = {(task.kind, task.partition, task.microbatch): task for task in tasks}
            for (kind, j, i), task in by_place.items():
                before = by_place.get((kind, j + {"F": -1, "B": 1, "R": 99}[kind], i))
                assert before is None or before.end <= task.start + 1e-9


def test_forwards_before_their_backwards_stay_steps_of_their_own() -> None:
    model = pipe()
    with trace.record(model) as timeline:
        first, second = model(rows(8, 3)), model(rows(6, 3))
        loss_of(first).backward(retain_graph=True)
        loss_of(second).backward()
        loss_of(first).backward()
    names = [[half.name for half in step.halves] for step in timeline.steps]
    assert names == [["forward", "backward", "backward"], ["forward", "backward"]]
    assert [step.microbatches for step in timeline.steps] == [4, 3]


def test_only_what_begins_in_the_block_is_recorded() -> None:
    model, other = pipe(), pipe()
    before = model(rows(8, 3))
    with trace.record(model) as timeline:
        loss_of(before).backward()
        loss_of(other(rows(8, 3))).backward()
        loss_of(copy.deepcopy(model)(rows(8, 3))).backward()
        after = model(rows(8, 3))
    loss_of(after).backward()
    assert [[half.name for half in step.halves] for step in timeline.steps] == [["backward"], ["forward"]]


def test_steps_of_other_threads_are_recorded() -> None:
    model = pipe()
    with trace.record(model) as timeline:
        thread = threading.Thread(target=lambda: loss_of(model(rows(8, 3))).backward())
        thread.start()
        thread.join()
    assert [step.is_complete for step in timeline.steps] == [True]


def test_a_timeline_is_read_while_it_is_recorded() -> None:
    model = pipe()
    with trace.record(model) as timeline:
        assert (len(timeline), repr(timeline)) == (0, "<Timeline: nothing recorded>")
        assert "nothing was recorded" in str(timeline)
        assert "<script>" not in timeline.to_html()
        model(rows(8, 3))
        assert len(timeline.steps) == 1


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_inference_has_a_forward_only(inference: Any) -> None:
    model = pipe().eval()
    with trace.record(model) as timeline, inference():
        model(rows(8, 3))
    (step,) = timeline.steps
    assert [half.name for half in step.halves] == ["forward"]
    assert step.is_complete
    assert step.planned_bubble == pytest.approx(2 / 6)


def test_a_backward_of_some_parameters_counts_the_lanes_that_it_needs() -> None:
    model = pipe(checkpoint="never")
    with trace.record(model) as timeline:
        torch.autograd.grad(loss_of(model(rows(8, 3))), list(model.partitions[2].parameters()))
    _, backward = timeline.steps[0].halves
    assert {task.partition for task in backward.tasks} == {task.partition for task in backward.planned} == {2}
    assert timeline.steps[0].is_complete


def test_a_wrapped_pipeline_is_found_and_a_pipeline_in_a_pipeline_is_not_another() -> None:
    inner = pipe()
    model = GPipe(nn.Sequential(inner, nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=2)
    with trace.record(nn.ModuleDict({"body": model})) as timeline:
        model(rows(8, 3))
    assert len(timeline.plan.partitions) == 2
    assert len(timeline) == 1


def test_what_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match="this Linear holds 0"), trace.record(nn.Linear(1, 1)):
        pass
    model = pipe()
    with (
        pytest.raises(ValueError, match="this ModuleList holds 2: record one"),
        trace.record(nn.ModuleList([model, pipe()])),
    ):
        pass
    with trace.record(model), pytest.raises(RuntimeError, match="recorded already"), trace.record(model):
        pass
    with trace.record(model):  # the refusal ended nothing and began nothing
        pass


# ---- steps that fail


FAILURES = {
    "forward": lambda step: Call(lambda x: 1 / 0 if step() else x),
    "recomputation": lambda step: Call(lambda x: 1 / 0 if step() and torchrelay.is_recomputing() else x),
    "backward": lambda step: Call(lambda x: _Backward.apply(x, lambda: 1 / 0 if step() else None)),
}


@pytest.mark.parametrize("where", FAILURES)
def test_a_step_that_fails_leaves_a_readable_timeline(where: str, executor: str) -> None:
    failing: list[bool] = []
    layers = nn.Sequential(nn.Linear(3, 3), FAILURES[where](lambda: bool(failing)), nn.Linear(3, 3)).double()
    model = GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=4, executor=executor, checkpoint="always")
    with trace.record(model) as timeline:
        loss_of(model(rows(8, 3))).backward()
        failing.append(True)
        with pytest.raises(ZeroDivisionError):
            loss_of(model(rows(8, 3))).backward()
        failing.clear()
        loss_of(model(rows(8, 3))).backward()
    good, bad, later = timeline.steps
    assert (good.is_complete, bad.is_complete, later.is_complete) == (True, False, True)
    assert (bad.bubble, bad.replayed_bubble, bad.planned_bubble) == (None, None, None)
    failed = [task for half in bad.halves for task in half.tasks if task.failed]
    assert [(task.kind, task.partition) for task in failed] == [
        ({"recomputation": "R"}.get(where, where[0].upper()), 1)
    ]
    failure = next(half.failure for half in bad.halves if half.failure is not None)
    assert failure.startswith("ZeroDivisionError: division by zero")
    assert "ZeroDivisionError" in str(timeline)
    assert "1 not complete" in repr(timeline)
    assert timeline.to_html().count("FAILED: ZeroDivisionError") == 1
    ElementTree.fromstring(timeline.to_svg(1))
    assert sum(event.get("args", {}).get("failed", False) for event in parsed(timeline)) == 1


def test_a_step_that_is_interrupted_is_not_complete(executor: str) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), Call(lambda x: interrupt()), nn.Linear(3, 3)).double()

    def interrupt() -> None:
        raise KeyboardInterrupt

    model = GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=4, executor=executor)
    with trace.record(model) as timeline, pytest.raises(KeyboardInterrupt):
        model(rows(8, 3))
    (step,) = timeline.steps
    assert (step.is_complete, step.bubble) == (False, None)
    assert "KeyboardInterrupt" in summary.described(step)
    assert 'class="failed"' in timeline.to_html()


def test_an_error_in_the_block_ends_the_recording() -> None:
    model = pipe()
    with pytest.raises(KeyError), trace.record(model) as timeline:
        raise KeyError
    model(rows(8, 3))
    assert len(timeline) == 0


# ---- what it costs


@pytest.mark.parametrize("executor", ["lanes", "serial"])
def test_without_a_recording_no_clock_is_read(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("nobody asked for a recording")

    monkeypatch.setattr(recording, "timed", refuse)
    monkeypatch.setattr(recording.time, "perf_counter_ns", refuse)
    loss_of(pipe(executor=executor)(rows(8, 3))).backward()


def test_a_timeline_holds_nothing_of_its_steps() -> None:
    outputs: list[weakref.ref[Tensor]] = []

    def watch(x: Tensor) -> Tensor:
        y = x.tanh()
        outputs.append(weakref.ref(y))
        return y

    layers = nn.Sequential(nn.Linear(3, 3), Call(watch), nn.Linear(3, 3)).double()
    model = GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=4)
    gc.collect()
    gc.disable()
    try:
        with trace.record(model) as timeline:
            loss_of(model(rows(8, 3))).backward()
            assert outputs
            assert all(output() is None for output in outputs)
            model_is = weakref.ref(model)
            del model, layers
        assert model_is() is None
        assert timeline.steps[0].is_complete
    finally:
        gc.enable()


# ---- bubbles


def by_hand(spans: str, *, recompute: str = "never", microbatches: int = 2) -> RecordedStep:
    """A step of two equal partitions out of "kind stage micro-batch start end" in seconds, separated by commas."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plan = plan_partitions(layers, [1, 1], [torch.device("cpu")] * 2)
    schedule = plan.schedule(microbatches, recompute=recompute)
    made, step = Recording(), object()
    made.start = 0
    for kinds in ("F", "RB"):
        programs = [[Order.of(a) for a in schedule.actions(rank) if a.kind in kinds] for rank in range(2)]
        half = Half(step, schedule, programs)
        for kind, stage, microbatch, start, end in map(str.split, spans.split(",")):
            if kind in kinds:
                times = int(float(start) * 1e9), int(float(end) * 1e9)
                half.spans.append(
                    TaskSpan(kind, int(stage), int(microbatch), int(stage), *times, f"lane {stage}", False, 0)
                )
        half.start = min(span.start for span in half.spans)
        made.halves.append(half)
    return Timeline(made, plan).steps[0]


def test_bubbles_are_shares_of_the_lanes_time_in_which_they_compute_nothing() -> None:
    # Forward: 4 seconds of 2 lanes, 4 of work. Backward: 8 of 2 lanes, 10 of work. In between, nobody counts.
    step = by_hand("F 0 0 0 1, F 0 1 1 2, F 1 0 2 3, F 1 1 3 4, B 1 1 10 12, B 1 0 12 14, B 0 1 13 16, B 0 0 16 18")
    assert step.time == pytest.approx(12)
    assert step.bubble == pytest.approx((4 + 7) / 24)
    # As soon as possible: forward in 3 seconds; backward 2, then 3 beside 2, then 2: in 7, with 9 of work.
    assert step.replayed_bubble == pytest.approx((2 + 5) / 20)
    assert step.planned_bubble == pytest.approx(1 / 3)


def test_a_recomputation_is_no_bubble() -> None:
    step = by_hand(
        "F 0 0 0 1, F 0 1 1 2, F 1 0 1 2, F 1 1 2 3, B 1 1 3 5, R 1 0 5 6, B 1 0 6 8, B 0 1 5 7, R 0 0 7 8, B 0 0 8 10",
        recompute="except_last",
    )
    assert step.bubble == step.replayed_bubble == step.planned_bubble == pytest.approx((2 + 4) / 20)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 4), (4, 3)])
def test_the_planned_bubble_is_that_of_the_formula(n: int, m: int) -> None:
    model = pipe(n, m, checkpoint="never")
    with trace.record(model) as timeline:
        loss_of(model(rows(2 * m, 3))).backward()
    (step,) = timeline.steps
    assert step.planned_bubble == pytest.approx((n - 1) / (m + n - 1))
    assert 0 <= step.replayed_bubble <= step.bubble < 1


def test_waiting_for_a_turn_on_the_generator_is_told_apart(executor: str) -> None:
    def draw(x: Tensor) -> Tensor:
        time.sleep(0.005)  # within the turn, for which the other lane has to wait
        return x + torch.rand_like(x)

    layers = nn.Sequential(Call(draw), Call(draw))
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=4, executor=executor)
    with trace.record(model) as timeline, torch.no_grad():
        model(rows(8, 3))
    (step,) = timeline.steps
    tasks = step.halves[0].tasks
    waited = sum(task.waited for task in tasks)
    assert all(task.busy >= 0.005 for task in tasks)
    if executor == "serial":
        assert waited == 0
        return
    assert waited > 0.004
    assert step.bubble == pytest.approx(1 - sum(task.busy for task in tasks) / (2 * step.time))
    assert "waited for its turn" in timeline.to_svg()
    assert "waiting for a turn" in timeline.to_html()


# ---- pictures and files


def parsed(timeline: Timeline) -> list[dict[str, Any]]:
    return json.loads(timeline.to_perfetto())["traceEvents"]


def bars(text: str) -> list[tuple[str, float, float]]:
    """The (title, place, width) of each task, in percent."""
    found = []
    for task in ElementTree.fromstring(text).iter(f"{SVG}g"):
        title, bar = task.find(f"{SVG}title"), task.find(f"{SVG}rect")
        assert title is not None
        assert bar is not None
        found.append((str(title.text), *(float(bar.attrib[name].rstrip("%")) for name in ("x", "width"))))
    return found


@pytest.mark.parametrize("width", [200, 1000, 4000])
def test_a_picture_has_each_task_twice_inside_its_bounds(width: int) -> None:
    timeline = recorded(pipe(checkpoint="always"))
    drawn = bars(timeline.to_svg(width=width))
    assert len(drawn) == 2 * 3 * 4 * 3
    assert all(x >= 0 and length >= 0 and x + length <= 100.001 for _, x, length in drawn)
    titles = [title for title, _, _ in drawn]
    assert sum("measured: " in title for title in titles) == 36
    assert all("\nplan: " in title for title in titles)
    assert "recomputation of micro-batch 3, partition 2 (cpu)" in {title.partition("\n")[0] for title in titles}


def test_tasks_of_a_row_do_not_cover_each_other() -> None:
    root = ElementTree.fromstring(recorded(pipe()).to_svg())
    by_row: dict[str, list[tuple[float, float]]] = {}
    for task in root.iter(f"{SVG}g"):
        bar = task.find(f"{SVG}rect")
        assert bar is not None
        x, width = (float(bar.attrib[name].rstrip("%")) for name in ("x", "width"))
        by_row.setdefault(bar.attrib["y"], []).append((x, x + width))
    assert len(by_row) == 2 * 3
    for places in by_row.values():
        assert all(end <= start + 2e-4 for (_, end), (start, _) in pairwise(sorted(places)))


@pytest.mark.parametrize(
    ("first", "shown"), [("F 0 0 0 1, F 0 1 1 2, F 1 0 1 2", 16), ("F 0 0 -999 1, F 0 1 1 2, F 1 0 1 2", 0)]
)
def test_numbers_are_shown_unless_they_fit_in_few_tasks_only(first: str, shown: int) -> None:
    step = by_hand(f"{first}, F 1 1 2 3, B 1 1 3 5, B 1 0 5 7, B 0 1 5 7, B 0 0 7 9")
    plan = plan_partitions(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], [torch.device("cpu")] * 2)
    texts = ElementTree.fromstring(picture.standalone(plan, step, 1000)).iter(f"{SVG}text")
    assert sum(text.get("class") == "n" and text.get("visibility") is None for text in texts) == shown


def test_a_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    timeline = recorded(pipe(), steps=2)
    text = timeline.save(tmp_path / "timeline.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert re.findall(r"\b(?:src|href|url|import)\b\s*[=(]", text) == []
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert text.count("<section>") == 2
    for drawn in re.findall(r'<div class="chart">(<svg.*?</svg>)', text, re.DOTALL):
        ElementTree.fromstring(drawn)
    step = timeline.steps[0]
    for name, bubble in (
        ("planned", step.planned_bubble),
        ("replayed", step.replayed_bubble),
        ("measured", step.bubble),
    ):
        assert f"{name} {summary.share(bubble)}" in text


def test_a_page_has_finer_ticks_for_when_it_is_zoomed() -> None:
    text = recorded(pipe()).to_html()
    labels = {
        zoom: re.findall(r">([\d.]+ ms)<", ticks)
        for zoom, ticks in re.findall(r'<g class="z" data-z="(\d+)" visibility="hidden">(.*?)</g>', text, re.DOTALL)
    }
    assert list(labels) == ["8", "40"]
    assert len(labels["40"]) > 4 * len(labels["8"]) > 40


def test_what_a_layer_says_is_text_and_no_markup() -> None:
    def fail(_: Tensor) -> Tensor:
        raise ValueError("<script>alert(1)</script> & more")

    model = GPipe(nn.Sequential(Call(fail)), [1], devices=["cpu"])
    with trace.record(model) as timeline, pytest.raises(ValueError, match="alert"):
        model(torch.ones(2, 2))
    assert "<script>alert" not in timeline.to_html()
    assert "<script>alert(1)</script> & more" in bars(timeline.to_svg())[-1][0]


def test_the_last_steps_are_drawn_where_all_would_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_TASKS_DRAWN", 200)
    text = recorded(pipe(), steps=5).to_html()  # 66 elements a step: 2 x 3 x (4 + 4 + 3)
    assert re.findall(r"<h2>Step (\d)", text) == ["2", "3", "4"]
    assert "The last 3 of 5 steps are drawn." in text
    assert re.findall(r"<h2>Step (\d)", recorded(pipe(), steps=3).to_html(steps=1)) == ["2"]
    monkeypatch.setattr(page, "_TASKS_DRAWN", 1)
    assert re.findall(r"<h2>Step (\d)", recorded(pipe(), steps=2).to_html()) == ["1"]


def test_perfetto_is_given_each_task_where_it_ran_and_each_hand_over() -> None:
    timeline = recorded(pipe(checkpoint="always"))
    found = parsed(timeline)
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert names[0, 0] == "steps"
    assert [names[0, j + 1] for j in range(3)] == [names[1, j + 1] for j in range(3)]
    tasks = [event for event in found if event["ph"] == "X"]
    assert len(tasks) == 2 + 2 * 36
    assert all(event["dur"] >= 0 and (event["pid"], event["tid"]) in names for event in tasks)
    (step,) = timeline.steps
    measured = {event["name"] + str(event["tid"]): event for event in tasks if event["pid"] == 0}
    task = step.halves[0].tasks[0]
    assert measured["F01"]["ts"] == pytest.approx(1e6 * task.start, abs=1e-3)
    assert measured["F01"]["args"] == {"step": 0, "partition": 0, "micro-batch": 0}
    starts, ends = ({event["id"]: event for event in found if event["ph"] == ph} for ph in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 2 * 4
    assert all(starts[k]["ts"] <= ends[k]["ts"] and starts[k]["tid"] != ends[k]["tid"] for k in starts)


def test_a_file_is_written_as_its_name_ends(tmp_path: Path) -> None:
    timeline = recorded(pipe())
    assert timeline.save(tmp_path / "a.svg").read_text(encoding="utf-8").startswith("<svg ")
    assert json.loads(timeline.save(str(tmp_path / "a.json")).read_text(encoding="utf-8"))["displayTimeUnit"] == "ms"
    with pytest.raises(ValueError, match=r"\.html, \.svg, \.json, but is 'a.png'"):
        timeline.save(tmp_path / "a.png")
    with pytest.raises(IndexError, match="no step 1: 1 were recorded"):
        timeline.to_svg(1)
    assert timeline._repr_html_() == timeline.to_svg()


def test_the_figures_are_a_row_a_step_and_a_row_a_partition() -> None:
    lines, names = str(recorded(pipe(), steps=2)).splitlines(), ["planned", "replayed", "measured"]
    assert lines[0].split() == ["step", "micro-batches", "forward", "backward", "bubble", *names]
    assert [row.split()[0] for row in lines[1:3]] == ["0", "1"]
    assert lines[4].split() == ["partition", "device", "forward", "recomputation", "backward", "busy"]
    assert [row.split()[:2] for row in lines[5:]] == [[str(j), "cpu"] for j in range(3)]
    many = str(recorded(pipe(), steps=20)).splitlines()
    assert "(8 steps in between left out)" in many
    assert [row.split()[0] for row in many[1:13]] == [*"012345", *map(str, range(14, 20))]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "-"),
        (1.5e-6, "1.50 µs"),
        (9.996e-4, "1000 µs"),
        (0.01234, "12.3 ms"),
        (0.9999, "1000 ms"),
        (12.0, "12.0 s"),
        (250.0, "250 s"),
    ],
)
def test_durations_have_a_unit_in_which_they_are_read(seconds: float, text: str) -> None:
    assert summary.duration(seconds) == text
