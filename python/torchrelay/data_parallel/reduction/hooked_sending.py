"""Sends buckets by a communication hook of the user's, which may fail in ways of its own.

If the hook has failed, what it has sent is not known: nothing more is sent in this backward, since it would not meet
what the others send; the other ranks are told (see `hook_failures`), and the hook keeps the memory that it was given.
"""

import sys

from torchrelay.data_parallel.comm_hook import CommHook
from torchrelay.data_parallel.overflow import Overflow
from torchrelay.data_parallel.reduction.sending import Parts, Sender
from torchrelay.data_parallel.storage import BucketStorage
from torchrelay.errors import CommHookError, RankMismatchError, ReductionError
from torchrelay.planning.bucket_plan import Bucket

__all__ = ["HookedSender"]


class HookedSender(Sender):
    """As `Sender`; a bucket is given to `hook`, when its future of the bucket before is done."""

    def __init__(self, parts: Parts, hook: CommHook) -> None:
        super().__init__(parts)
        self._hook = hook
        self._overflow = Overflow(parts.progress.rank, parts.progress.ranks)

    def launch_ready(self, stop: int) -> None:
        """A bucket whose turn has not come by the hook's rules goes with the next news, or at the end."""
        while self._launched < stop and not self._hook.busy:
            self._launch_next(frozenset())

    def launch_rest(self) -> None:
        """As without a hook."""
        unused = self._arrivals.unused()
        while self._launched < self._memory.size:
            self._drain()
            self._launch_next(unused)

    def _drain(self) -> None:
        """Waits for the hook of the bucket before."""
        try:
            self._hook.drain()
        except CommHookError:
            self._mute(self._progress.plan.buckets[self._launched - 1], raised=False)
            raise

    def _send(self, storage: BucketStorage) -> None:
        sent = self._watch.sent
        try:
            storage.send(self._average, self.share)
        except RankMismatchError:  # while it waited for the others' weights, with nothing sent
            self._launched -= 1
            raise
        except BaseException as error:
            if sent is not None and sent == self._watch.sent:
                self._launched -= 1  # it is given another try in `give_up`, so that the others do not wait in vain
            else:
                self._mute(storage.bucket, raised=True)
            if sys.version_info >= (3, 11):
                where = self._progress.words(storage.bucket)
                error.add_note(f"raised by the communication hook {self._hook.name} {where}")
            raise

    def _mute(self, bucket: Bucket, *, raised: bool) -> None:
        self.muted = True
        self._hook.failures.tell(bucket.index, raised=raised)
        self._memory.allocate()

    def finish(self) -> None:
        """Waits for what the hooks have started; only then is sent what travels with the last bucket otherwise."""
        problem: Exception | None = None
        self._drain()
        try:
            self.wait()
        except ReductionError as error:
            problem = error
        words, storages = self._memory.words, self._memory.storages
        if problem is not None:
            words.say_failed()
        for place, storage in enumerate(storages):
            if storage.was_finite is not None:
                words.finite[place] = storage.was_finite
        try:
            self._hook.failures.meet()
        except CommHookError:
            if problem is None:
                raise
        storages[-1].send_tail(self._average)
        alarm, self._watch.alarm = self._watch.alarm, self._hook.failures.look
        try:
            self._wait(storages[-1])
        except Exception:
            if problem is None:
                raise
        finally:
            self._watch.alarm = alarm
        if problem is not None:  # the first one is what there is to tell
            try:
                raise problem
            finally:
                del problem  # which holds this frame

    def inspect(self) -> None:
        """Whether the hook has made something of the gradients that is not finite."""
        memory = self._memory
        self._overflow.look(memory.words.finite, memory.storages, self._hook.name, self._progress.backward)

    def send_nothing(self) -> None:
        """As without a hook."""
        storages = self._memory.storages
        for storage in storages[self._launched :]:
            storage.gather_nothing()
            self._hook.drain()
            self._launched += 1
            storage.send(self._average, None)
        self._hook.drain()
        self._memory.words.finite.fill_(1)
        self._hook.failures.say_count()
        storages[-1].send_tail(self._average)

    def _could_not_tell(self) -> None:
        """The hook fails once more."""
        self._mute(self._progress.plan.buckets[self._launched - 1], raised=not self._hook.lost)

    def give_up(self, error: BaseException) -> None:
        """As without a hook, unless the others' hooks have failed, and know."""
        if self._hook.failures.left_waiting and not self.muted:
            self._mute(self._progress.plan.buckets[-1], raised=False)
        super().give_up(error)

    def _owes(self, error: BaseException) -> bool:
        """Also if the hook has raised, with nothing sent: the others' hooks have not."""
        return self.left > 0
