"""Whether and how much a rank takes part in a backward, and whether the others go about it in the same way."""

from collections.abc import Callable

import torch

from torchrelay.data_parallel.averaging import Averager
from torchrelay.data_parallel.comm_hook import CommHook
from torchrelay.data_parallel.modes import Mode, Modes
from torchrelay.data_parallel.reduction.progress import Progress
from torchrelay.data_parallel.reduction.rounds import Rounds
from torchrelay.data_parallel.switches import Switches
from torchrelay.data_parallel.uneven import Round
from torchrelay.data_parallel.waiting import Place, Watch
from torchrelay.data_parallel.weights import Part, Scale, Share
from torchrelay.errors import RankMismatchError, ReductionError

__all__ = ["Participation"]


class Participation:
    """Of one rank, in the backwards that begin from now on.

    Args:
        switches: Whether they are reduced, and with which weight.
        average: Knows the group.
        watch: What waits for the other ranks.
        progress: Of this rank.
        device: One that the group can send from.
        hook: The communication hook, if there is one.
        modes: How the ranks have gone about a backward so far.

    Attributes:
        rounds: What is announced inside `join`.
        modes: As given.
    """

    def __init__(
        self,
        switches: Switches,
        average: Averager,
        watch: Watch,
        progress: Progress,
        device: torch.device,
        hook: CommHook | None,
        modes: Modes,
    ) -> None:
        self.rounds = Rounds()
        self.modes = modes
        self._switches = switches
        self._average = average
        self._watch = watch
        self._progress = progress
        self._device = device
        self._hook = hook

    def meet(self) -> ReductionError | None:
        """A backward begins: what there is to say if the other ranks go about it in another way.

        Raises:
            ReductionError: It is not the one that was announced inside `join`; or an earlier one, whose hook failed,
                was not brought to an end.
        """
        if self._switches.joining:
            self.rounds.check(reduces=self._switches.enabled, weighted=self._switches.weight is not None)
        if not self._switches.enabled:
            return None
        if self._hook is not None:
            self._hook.begin()
        try:
            self.modes.begin(self._mode, self._progress.backward)
        except ReductionError as error:
            return error
        return None

    def follow(self, expected: Round) -> None:
        """The same for a backward of other ranks, inside `join`, by one that is through.

        Raises:
            ReductionError: This rank has another hook, or an earlier backward was not brought to an end.
        """
        if self._hook is not None:
            self._hook.begin()
        self.modes.begin(self._mode._replace(weighted=expected.weighted), self._progress.backward)

    @property
    def _mode(self) -> Mode:
        return Mode(self._switches.weight is not None, None if self._hook is None else self._hook.name)

    def share(self) -> Part | None:
        """How much its gradients count, unless it is as much as any other's."""
        factor = self.rounds.take()
        if self._switches.weight is not None:
            return self.weigh(self._switches.weight)
        return None if factor is None else Scale(factor)

    def meets_others(self, mismatch: ReductionError) -> bool:
        """Whether a rank that goes about it in another way can send what the others wait for, with nothing in it.

        Not if they are not there, or have another hook, which sends other things.
        """
        return isinstance(mismatch, RankMismatchError) and self.modes.common.hook == self._mode.hook

    def weigh(self, weight: float) -> Share:
        """A share with this weight; every rank takes one."""
        place = Place(self._progress.backward, -1, f"the weights for backward {self._progress.backward}")
        wait: Callable[..., None] = self._watch.wait
        return Share(self._average.group, weight, self._device, lambda work: wait(work, self._device, place))
