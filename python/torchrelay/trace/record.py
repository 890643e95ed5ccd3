"""Records a pipeline's steps for as long as a block lasts."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from torchrelay.gpipe.gpipe import GPipe
from torchrelay.runtime.device_clock import DeviceClock
from torchrelay.runtime.recording import Recording
from torchrelay.trace.timeline import Timeline

__all__ = ["record"]


@contextmanager
def record(model: nn.Module) -> Iterator[Timeline]:
    """Record the steps that `model` begins in the block, from whichever thread; nothing else of the process.

    A forward and a backward are recorded if they begin inside. Outside of a block nothing is recorded, which costs a
    task one branch. A step that raises stays in the timeline, as far as it came.

    Args:
        model: a :class:`torchrelay.GPipe`, or a module that holds one, such as a DistributedDataParallel around it.

    Raises:
        ValueError: no pipeline in `model`, or several.
        RuntimeError: the pipeline is being recorded already.
    """
    pipeline = _pipeline(model)
    recorder = pipeline._recorder
    if recorder.recording is not None:
        raise RuntimeError("this pipeline is being recorded already: end that block first")
    streams = pipeline._streams
    clock = None if streams is None else DeviceClock(streams.backend, streams.indices)
    recorder.recording = recording = Recording()
    try:
        yield Timeline(recording, pipeline.plan, clock)
    finally:
        recorder.recording = None


def _pipeline(model: nn.Module) -> GPipe:
    if isinstance(model, GPipe):  # pipelines that are layers of it are part of its tasks
        return model
    found = [module for module in model.modules() if isinstance(module, GPipe)]
    inner = {id(part) for pipeline in found for part in pipeline.modules() if part is not pipeline}
    outermost = [pipeline for pipeline in found if id(pipeline) not in inner]
    if len(outermost) != 1:
        raise ValueError(
            f"model must be a GPipe or hold one, but this {type(model).__name__} holds {len(outermost)}"
            + (": record one of them" if outermost else "")
        )
    return outermost[0]
