"""A timeline in the format that Perfetto and Chrome read: one process is what was measured, the other the plan.

Source: the "Trace Event Format" document of the Chromium project; times are microseconds.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrelay.trace.timeline import RecordedHalf, RecordedTask, Timeline

__all__ = ["events"]

_MEASURED, _PLAN = 0, 1  # processes
_STEPS = 0  # the thread that shows the halves; partition j is thread j + 1


def events(timeline: "Timeline") -> str:
    """The JSON text."""
    found = list(_names(timeline))
    flow = 0
    for step in timeline.steps:
        for half in step.halves:
            about = {"step": step.number}
            found.append(
                _complete(_MEASURED, _STEPS, f"step {step.number}: {half.name}", "step", half.start, half.end, about)
            )
            for process, tasks in ((_MEASURED, half.tasks), (_PLAN, half.planned)):
                found += [_task(process, task, about) for task in tasks]
            for source, target in _hand_overs(half):
                flow += 1
                shared = {"cat": "value", "name": "value", "id": flow, "pid": _MEASURED}
                found.append({**shared, "ph": "s", "tid": source.partition + 1, "ts": 1e6 * source.start})
                found.append({**shared, "ph": "f", "bp": "e", "tid": target.partition + 1, "ts": 1e6 * target.start})
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _names(timeline: "Timeline") -> Iterator[dict[str, Any]]:
    for process, name in ((_MEASURED, "measured"), (_PLAN, "plan, with the times that tasks took")):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
        if process == _MEASURED:
            yield _thread(process, _STEPS, "steps")
        for partition in timeline.plan.partitions:
            yield _thread(process, partition.index + 1, f"partition {partition.index} ({partition.device})")


def _thread(process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _task(process: int, task: "RecordedTask", about: dict[str, Any]) -> dict[str, Any]:
    from torchrelay.trace.timeline import KINDS

    args = {**about, "partition": task.partition, "micro-batch": task.microbatch}
    if task.failed:
        args["failed"] = True
    name = f"{task.kind}{task.microbatch}"
    return _complete(process, task.partition + 1, name, KINDS[task.kind], task.start, task.end, args)


def _complete(
    process: int, thread: int, name: str, category: str, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": round(1e6 * start, 3),
        "dur": round(1e6 * (end - start), 3),
        "args": args,
    }


def _hand_overs(half: "RecordedHalf") -> Iterator[tuple["RecordedTask", "RecordedTask"]]:
    """What was measured, from each task to the one that takes what it gives."""
    by_place = {(task.kind, task.partition, task.microbatch): task for task in half.tasks}
    for (kind, partition, microbatch), task in by_place.items():
        onward = {"F": 1, "B": -1}.get(kind)
        if onward is not None and (target := by_place.get((kind, partition + onward, microbatch))) is not None:
            yield task, target
