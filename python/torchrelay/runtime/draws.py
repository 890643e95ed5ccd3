"""What one half of a step draws from generators that partitions share, and what has been found out about it.

1. A partition's first task in a half always takes its turn on the generators within its reach, and shows which of them
   it touches: draws from, or sets (a layer that checkpoints itself sets the generator in backward, even if it draws
   nothing there).
2. Its other tasks take turns on what the first one touched. If that is nothing they wait for nobody; should one of them
   draw all the same it takes its turn then (see `demand`), and so do the partition's later ones from their beginning.
3. They are watched besides, since not all can be seen: Python code that sets a generator, or an operation that draws
   from torch's generator and does not say so. Should the caller's generator not be after the half where it was before,
   or (where tasks cannot take a turn later) a task leave it at another place than the first one of as many rows, then
   something may have used it out of turn. So in the next step every task of that half takes its turn and shows what it
   touches, which goes on for as long as layers draw so; and there is a warning, at once or when that is known. (It may
   also have been a thread that loads data, a hook of a parameter, or a layer whose input says how often it draws.)

The watch is no proof: it sees a use between two turns, but not every one within the turn of another partition.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from torchrelay.runtime.demand import Note, is_available, refuse_within_checkpoint, run_free, sees
from torchrelay.runtime.failure import layer_under_way
from torchrelay.runtime.generators import Source, Turn, sets

__all__ = ["Drawn", "HalfDraws", "HalfWatch"]

T = TypeVar("T")

_CPU = torch.device("cpu")

Drawn = Mapping[torch.device, tuple[int, ...] | None]
"""How far each generator of a turn has gone since it was seeded; None if nothing was drawn."""


class HalfWatch:
    """What has been found out about one half of a pipeline's steps; kept from step to step."""

    def __init__(self) -> None:
        # What each partition's first task touched, in the step that gave cause to suspect others.
        self.suspected: Sequence[set[torch.device]] | None = None
        self.layers_draw_late = False
        self.is_cleared = False  # it was not a layer: there is no need to ask again
        # Whether anything drew in the last step, as far as is known: else nobody is harmed by who sets a generator.
        self.draws = True
        # Whether layers set a generator and put it back, as those do that checkpoint themselves.
        self.sets = False

    @property
    def every_task(self) -> bool:
        """Whether every task is to take its turn."""
        return self.suspected is not None or self.layers_draw_late


class HalfDraws:
    """The draws of one half of one step.

    Args:
        half: "forward" or "backward".
        devices: one for each partition.
        sources: the generators.
        seed_of: the seed of a task, by micro-batch and partition.
        rows: of each micro-batch; those with as many draw as often.
        watch: what is known of the half.
        others_draw: something draws besides this half's own tasks, so that it matters who sets a generator.

    Attributes:
        can_demand: whether a task of each partition can take its turn when it is about to draw.
        free: whether the next task of each partition takes no turn.
        drew: what each partition drew from.
        touched: what each partition takes turns on.
    """

    def __init__(
        self,
        half: str,
        devices: Sequence[torch.device],
        sources: Mapping[torch.device, Source],
        seed_of: Callable[[int, int], int],
        rows: Sequence[int],
        watch: HalfWatch,
        *,
        others_draw: bool = False,
    ) -> None:
        self._half = half
        self._sources = sources
        self._mine = [{_CPU, device} & sources.keys() for device in devices]
        self._seed_of = seed_of
        # In backward, an accelerator's operations are called by a thread of torch's, for which all lanes wait.
        self.can_demand = [is_available() and (half == "forward" or device.type == "cpu") for device in devices]
        self._rows = rows
        self._watch = watch
        self._every_task = watch.every_task
        self._asks_who_sets = watch.draws or others_draw or not is_available()
        self._late: _Place | None = None  # where a generator is touched that the partition's first task did not touch
        self._found_set: _Place | None = None  # where one was drawn from that somebody had set out of turn
        self.free = [False] * len(devices)
        self._begun = [False] * len(devices)
        self._state_tells = [True] * len(devices)
        self.drew: list[set[torch.device]] = [set() for _ in devices]
        self.touched: list[set[torch.device]] = [set() for _ in devices]
        self._places: list[dict[tuple[torch.device, int], tuple[int, ...] | None]] = [{} for _ in devices]
        self._strangers: set[torch.device] = set()
        self._between_turns = False
        self._marks: dict[torch.device, tuple[bytes, int]] = {}

    # ---- tasks

    def run(self, i: int, j: int, task: Callable[[], T], note: Note | None = None) -> T:
        """Run partition `j`'s task for micro-batch `i` with the numbers of its own; tell `note` what it drew."""
        if self.free[j]:
            return self.run_free(i, j, task, note)

        def found(drawn: Drawn) -> None:
            self._compare(i, j, drawn)
            if note is not None:
                note(i, j, drawn)

        seed = self._seed_of(i, j)
        if self._begun[j] and not self._every_task:
            return self.in_turn(self.touched[j], seed, task, found)
        return self._watched(i, j, seed, task, found)

    def run_free(self, i: int, j: int, task: Callable[[], T], note: Note | None = None) -> T:
        """Run a task of a partition that is :attr:`free`; it takes its turn if it draws, and tells `note` then."""
        return run_free(self, i, j, note, task) if self.can_demand[j] else task()

    def begun(self, i: int, j: int) -> tuple[Sequence[Source], int]:
        """For `demand`."""
        refuse_within_checkpoint(i, j)
        return [source for device, source in self._sources.items() if device in self._mine[j]], self._seed_of(i, j)

    def took(self, i: int, j: int, turns: Sequence[Turn]) -> None:
        """For `demand`: somebody may have set a generator before that, without a turn; this layer itself, perhaps."""
        for turn in turns:
            if turn.device in self._marks and not turn.found(self._marks[turn.device]):
                self._strangers.add(turn.device)
                self._found_set = self._found_set or _Place(i, j, layer_under_way())

    def noted(self, i: int, j: int, turns: Sequence[Turn], note: Note | None) -> None:
        """For `demand`."""
        drawn = {turn.device: turn.drawn() for turn in turns}
        drew = {device for device, place in drawn.items() if place is not None}
        self.drew[j] |= drew
        self.touched[j] |= drew
        self.free[j] = not drew
        if note is not None and drew:
            note(i, j, drawn)

    def _watched(self, i: int, j: int, seed: int, task: Callable[[], T], found: Callable[[Drawn], None]) -> T:
        mine = self._mine[j]
        drew: set[torch.device] = set()
        touched: set[torch.device] = set()
        drew_unseen: set[torch.device] = set()

        def asking() -> T:
            if not self._asks_who_sets:
                result, has_drawn = sees(task)
                drew_unseen.update(mine if has_drawn else ())
                # Where free tasks set the generator, as may be now, what has become of it since tells nothing.
                self._state_tells[j] = has_drawn or not self._watch.sets
                return result
            result, generators = sets(task)
            self._watch.sets = self._watch.sets or bool(generators)
            touched.update(d for d in mine if generators is None or self._sources[d].generator in generators)
            return result

        def ask(drawn: Drawn) -> None:
            if not self._state_tells[j]:
                drawn = dict.fromkeys(drawn)
            drew.update(device for device, place in drawn.items() if place is not None)
            found(drawn)

        result = self.in_turn(mine, seed, asking, ask)
        # What it drew and the state does not show, it drew from a seed of its own, which others must not come between.
        touched |= drew or drew_unseen
        if self._begun[j] and not touched <= self.touched[j]:
            self._late = self._late or _Place(i, j, None)
        self.drew[j] |= drew
        self.touched[j] |= touched
        self._begun[j] = True
        self.free[j] = not (self.touched[j] or self._every_task)
        return result

    def in_turn(
        self, devices: set[torch.device], seed: int, task: Callable[[], T], found: Callable[[Drawn], None] | None
    ) -> T:
        """Run a task in turns on these devices' generators, each seeded; tell `found` what it drew."""
        # One order for all, so that nobody waits crosswise.
        return self._within([device for device in self._sources if device in devices], {}, seed, task, found)

    def _within(
        self,
        devices: Sequence[torch.device],
        turns: Mapping[torch.device, Turn],
        seed: int,
        task: Callable[[], T],
        found: Callable[[Drawn], None] | None,
    ) -> T:
        """Take a turn on each of `devices`, besides those that are taken, and run the task."""
        if devices:
            first, rest = devices[0], devices[1:]
            return self._sources[first].in_turn(
                seed, lambda turn: self._within(rest, {**turns, first: turn}, seed, task, found)
            )
        result = task()
        if found is not None:
            found({device: turn.drawn() for device, turn in turns.items()})
        return result

    def _compare(self, i: int, j: int, drawn: Drawn) -> None:
        if all(self.can_demand):
            return  # whoever drew had a turn
        for device, place in drawn.items():
            if self._places[j].setdefault((device, self._rows[i]), place) != place:
                self._strangers.add(device)

    # ---- before and after them

    def look(self, source: Source) -> None:
        """Before the first task, in a turn."""
        self._marks[source.device] = source.mark()

    def settle(self, source: Source) -> None:
        """After the last task, in a turn."""
        if source.device not in self._marks or source.is_at(self._marks[source.device]):
            return
        if self._watch.sets and not self._asks_who_sets and not any(self.touched):
            source.go_back(self._marks[source.device])  # two of them put back what each other had set
        else:
            self._strangers.add(source.device)
            self._between_turns = True

    def drawn_from(self) -> set[torch.device]:
        """What any partition drew from."""
        return set().union(*self.drew)

    def learn(self) -> None:
        """After a half that did not fail: judge what has been watched."""
        watch = self._watch
        watch.draws = any(self.drew)
        if not self._every_task:
            if self._strangers and not watch.is_cleared:
                watch.suspected = self.touched
            if self._found_set is not None and not watch.is_cleared:
                _warn(
                    f"{self._found_set} began to draw random numbers in this {self._half}, and found that somebody had "
                    f"set the generator meanwhile who had no turn: if it was the layer itself, what it set was not "
                    f"heeded; if it was another partition, the result depended on timing. The next step will tell. "
                    f"{_REMEDY}"
                )
            elif self._between_turns and not watch.is_cleared:
                _warn(
                    f"something drew random numbers on {min(map(str, self._strangers))} out of turn in this "
                    f"{self._half}, or set the generator: if that was a layer which did not for the first micro-batch, "
                    f"the result depended on timing. The next step will tell which. {_REMEDY}"
                )
            return
        before, watch.suspected = watch.suspected, None
        watch.layers_draw_late = self._late is not None
        if before is None:
            return
        changed = [j for j, (now, then) in enumerate(zip(self.touched, before, strict=True)) if now - then]
        if self._late is not None or changed:
            where = self._late or f"a layer of partition {changed[0]}"
            _warn(
                f"{where} drew random numbers in this {self._half}, or set the generator, though its partition had "
                f"not for the first micro-batch of the step before: that step's result depended on timing. This one's "
                f"does not, nor will later ones while it goes on, but now all tasks take turns. {_REMEDY}"
            )
        else:
            watch.is_cleared = True


class _Place(NamedTuple):
    """Where something happened."""

    microbatch: int
    partition: int
    layer: str | None

    def __str__(self) -> str:
        layer = "a layer" if self.layer is None else f"layer {self.layer!r}"
        return f"{layer} of partition {self.partition}, for micro-batch {self.microbatch},"


_REMEDY = (
    "Let the layer draw for every micro-batch or for none, draw from a torch.Generator of its own, or leave torch's "
    "generator as it is"
)


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
