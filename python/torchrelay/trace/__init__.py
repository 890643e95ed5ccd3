"""What ran when in a pipeline, drawn beside the plan.

with torchrelay.trace.record(model) as timeline:
    for images, labels in some_batches:
        loss_function(model(images), labels).backward()
print(timeline)
timeline.save("timeline.html")
"""

from torchrelay.trace.record import record
from torchrelay.trace.timeline import RecordedHalf, RecordedStep, RecordedTask, Timeline

__all__ = ["RecordedHalf", "RecordedStep", "RecordedTask", "Timeline", "record"]
