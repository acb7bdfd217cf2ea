"""One rank among others: what they compare before they communicate, and how it leaves them."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch.distributed as dist

from fxshard.errors import RankDiedError, RankMismatchError
from fxshard.runtime.world import peers as patience
from fxshard.runtime.world.peers import Cause, Peers

# What a rank does at the begin of a call, as ranks compare it.
_EXPECTED = "a call of the model, or a backward"
_BEFORE_BACKWARD = "a call of the model before the backward of the last one"
_AFTER_READS = "a call of the model, or a backward, after parameters were read"


class AgreeingRank:
    """What a world over process groups knows of its ranks as ranks, whatever they send each other.

    It counts calls, backwards and collectives, compares them through the stores of the groups,
    explains errors of a backend by what other ranks say, and leaves the process group where their
    collectives would not meet any more.

    Attributes:
        peers: by the names of groups.
    """

    _worlds: ClassVar[weakref.WeakSet[AgreeingRank]] = weakref.WeakSet()  # all of this process

    def __init__(self, everyone: Sequence[Peers], peers: Mapping[str, Peers]) -> None:
        """Args:
        everyone: groups that all ranks of the mesh are in: one, or one along each dimension.
        peers: by the names of groups.
        """
        self.peers: dict[str, Peers] = dict(peers)
        self._everyone = list(everyone)
        self._peers = list(dict.fromkeys([*everyone, *peers.values()]))
        self._calls = 0  # phases with collectives that this rank has begun: calls and backwards
        # By number, forwards whose backward has collectives and has not begun; a dead reference
        # means that it never will.
        self._due: dict[int, weakref.ref[Any]] = {}
        self._issued = 0  # collectives that this rank has launched
        self._read = ""  # digest of what it has read since the last call; empty: nothing
        self._left = ""  # why this rank has left the process group
        self._worlds.add(self)

    def _let_go(self) -> list[dist.Work]:
        """Forget what is in flight; returns it."""
        raise NotImplementedError

    def _forget_groups(self, why: str) -> None:
        self._left = why
        for peers in self._peers:
            peers.drop()

    def finish(self, work: dist.Work) -> None:
        """Wait for `work`; raise if another rank shows that it will never be over."""
        while not _over(work, patience.LOOK_SECONDS):
            cause = self._cause() or _first(p.never_over(self._issued) for p in self._everyone)
            if cause is not None:
                self._note_cause(cause)
                raise self._everyone[0].failure(cause)

    def explained(self, group: str) -> Explained:
        """An error of the backend in the block is raised as what other ranks say of it."""
        return Explained(self, group)

    def explain(self, group: str, error: RuntimeError) -> None:
        """Raise what other ranks say of an error of the backend, if they say anything."""
        if isinstance(error, RankDiedError | RankMismatchError):
            return
        if all(peers.alone for peers in self._peers):
            return
        try:
            cause = self._cause() or self._peers_of(group).cause_of_failure()
            if cause is not None:
                self._note_cause(cause)
                cause = self._cause()  # that of the first rank that noted one
        except RuntimeError:
            cause = (
                RankDiedError,
                " and the store cannot be reached: the rank that hosts it (rank 0 unless "
                "torchrun does) is gone.",
            )
        if cause is not None:
            raise self._peers_of(group).failure(cause, error) from error

    def _peers_of(self, group: str) -> Peers:
        """Of a group that the model makes itself nothing is known: those of all ranks."""
        return self.peers.get(group) or self._everyone[0]

    def _cause(self) -> Cause | None:
        """Why no collective works any more, if any rank has noted it."""
        return _first(peers.cause() for peers in self._peers)

    def _note_cause(self, cause: Cause) -> None:
        for peers in self._peers:
            peers.note_cause(cause)

    @contextlib.contextmanager
    def phase(self, name: str, communicates: bool) -> Iterator[None]:
        """Run a phase in the block. However it ends, nothing of it runs on afterwards.

        If it ends with an exception on all ranks after the same collective, the next call may run.
        Otherwise later collectives would not match: this rank leaves the process group, so that the
        others fail too, and the exception gets a note.

        Args:
            name: of the phase, for messages.
            communicates: it has collectives.

        Raises:
            RankMismatchError: this rank has left the process group before.
        """
        self.require_joined()
        if communicates and name == "backward":
            self._compare_reads()
            self._calls += 1
            for peers in self._everyone:
                peers.note_backward(self._calls)
        try:
            yield
        except BaseException as error:
            works = self._let_go()
            if communicates and not self._all_stopped(name, error, works):
                self._part(name, error, works)
            raise

    def _all_stopped(self, name: str, error: BaseException, works: list[dist.Work]) -> bool:
        """Wait for `works`; True if all ranks have stopped after the same collective."""
        if isinstance(error, RankDiedError | RankMismatchError):
            return False
        what = f"stopped in the middle of {name} ({_summary(error)})"
        pause, over = 0.001, 0.0  # seconds; when all works of this rank were over
        try:
            for peers in self._everyone:
                peers.note_stop(self._issued, what)
            while True:
                if not over and not (works := _pending(works)):
                    over = time.monotonic()
                    for peers in self._everyone:
                        peers.note_over()
                alike = [peers.stopped_alike(self._issued) for peers in self._everyone]
                if False in alike:
                    return False
                if over and None not in alike:
                    return True
                if over and time.monotonic() - over > patience.STOP_SECONDS:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        except (RuntimeError, KeyboardInterrupt):  # no store, or the user interrupts
            return False

    def _part(self, name: str, error: BaseException, works: list[dist.Work]) -> None:
        """Leave the process group after a phase that not all ranks stopped alike.

        The group is not closed while a work is in flight: that would wait for it.
        """
        why = f"stopped in the middle of {name} ({_summary(error)})"
        deadline = time.monotonic() + patience.CENSUS_SECONDS
        self._note_left(why)  # before it waits for works
        while (works := _pending(works)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not works:
            self._leave(why)
        self._left = why
        if not isinstance(error, RankDiedError | RankMismatchError):
            error.add_note(
                "fxshard: not all ranks stopped alike, so that their collectives would not meet "
                "any more. This rank has left the process group: start again from the last "
                "checkpoint."
            )

    def require_joined(self) -> None:
        """Check before a call of the model, and before each of its phases.

        Raises:
            RankMismatchError: this rank has left the process group.
        """
        if self._left:
            raise RankMismatchError(
                f"this rank has left the process group: it {self._left}. Start again from the "
                f"last checkpoint."
            )

    def run_call(self, digest: str, known: Mapping[str, Sequence[str]]) -> None:
        """Note a call whose program has collectives and all ranks know (see `Peers.note_call`).

        Calls without collectives are not counted: each rank may make any number. A call before the
        backward of an earlier one waits for all ranks: if only one rank left out its backward, it
        would gather while the others reduce. A forward that all ranks have dropped is forgotten.

        Raises:
            RankMismatchError: not all ranks run what this one does.
        """
        self._compare_reads()
        if self._due:
            lines = [_BEFORE_BACKWARD, f"backwards to come: {len(self._due)}"]
            self.agree(lines, "what they do to the model", [[_EXPECTED]])
            held = self.any_rank("".join("01"[ref() is not None] for ref in self._due.values()))()
            due = zip(self._due.items(), held, strict=True)
            self._due = {number: ref for (number, ref), flag in due if flag == "1"}
        self._calls += 1
        for peers in self._everyone:
            peers.note_call(self._calls, digest, known, self._leave)

    def await_backward(self, call: object) -> None:
        """Note that this call's backward has collectives; it cannot run once `call` is dead."""
        self._due[self._calls] = weakref.ref(call)

    def begin_backward(self, call: object) -> None:
        """Note that the backward of this call begins."""
        self._due = {number: ref for number, ref in self._due.items() if ref() is not call}

    @property
    def is_first(self) -> bool:
        """True on the first rank of those that the model is on; the global rank 0 may be none."""
        return all(peers.rank == 0 for peers in self._everyone)

    def together(self, what: str, having: Sequence[str] = ()) -> None:
        """Check that all ranks do `what` to the model, after the same call of it.

        Args:
            what: for messages.
            having: what else must be equal on all ranks.

        Raises:
            RankMismatchError: some ranks call the model, do something else, or ran another program.
        """
        self.require_joined()
        ran = next((f"after program {p.last}" for p in self._everyone if p.last), "before any call")
        lines = [what, ran, *having, *self._reads()]
        self.agree(lines, "what they do to the model", [["a call of the model"]])

    def read(self, what: str) -> None:
        """Before eager code gathers `what`, check that all ranks gather now, and none runs a call.

        They agree before the first such gather after a call; what they gather from then on is
        compared when the next call, backward or method begins. In between they only count.

        Raises:
            RankMismatchError: some ranks do something else.
        """
        self.require_joined()
        if not self._read:
            self.together("a read of sharded parameters (full_tensor(), norm(), tolist(), ...)")
        self._read = hashlib.sha256(f"{self._read} {what}".encode()).hexdigest()

    def _reads(self) -> list[str]:
        """For a comparison: what was read. It begins anew."""
        found, self._read = self._read, ""
        return [f"what was read before: digest {found}"] if found else []

    def _compare_reads(self) -> None:
        if self._read:
            lines = [_AFTER_READS, *self._reads()]
            self.agree(lines, "what they do to the model", [[_EXPECTED]])

    def any_rank(self, flags: str) -> Callable[[], str]:
        """Send flags ("0" or "1" each) to all ranks of the mesh.

        Call it on all ranks before a collective, and the returned function after it.

        Returns:
            A function that returns "1" for each flag that is set on any rank; call it on all ranks
            that have a "0".
        """
        groups = [peers for peers in self._everyone if not peers.alone]
        if "0" not in flags:
            for peers in groups:
                peers.tell(flags)
            return lambda: flags
        first = [peers.tell(flags) for peers in groups[:1]]

        def found() -> str:
            known = flags
            for i, peers in enumerate(groups):  # the second one gets what the first has found
                known = peers.any_of(first.pop() if i == 0 else peers.tell(known), known)
            return known

        return found

    def agree(
        self, lines: Sequence[str], what: str, before: Collection[Sequence[str]] = ()
    ) -> None:
        """Compare `lines` over all ranks of the mesh; all raise, or none (see `Peers.agree`).

        If no group has all ranks, the groups along one dimension of the mesh compare first, then
        those along the next, with the result of those before, and then all but the last again.
        """
        failed: RuntimeError | None = None
        for peers in [*self._everyone, *self._everyone[:-1]]:
            sent = lines if failed is None else [*lines, "another group of ranks does not agree"]
            try:
                peers.agree(sent, what, self._leave, self._calls + 1 if before else 0, before)
            except (RankMismatchError, RankDiedError) as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def exchange(self, text: str, what: str) -> dict[str, list[int]]:
        """Send a text to all ranks of the mesh, before a call of the model (see `Peers.exchange`).

        Args:
            text: of this rank.
            what: it says, for messages.

        Returns:
            per text, the (global) ranks that sent it; the same on all ranks.
        """
        found: dict[str, list[int]] = {}
        for number, peers in enumerate(self._everyone):
            sent = text if number == 0 else json.dumps(found, sort_keys=True)
            try:
                told = peers.exchange(sent, what, self._leave, self._calls + 1)
            except (RankMismatchError, RankDiedError) as error:
                if len(self._everyone) > 1:  # ranks of other groups wait for this one
                    self._leave(_summary(error))
                raise
            rows = [told] if number == 0 else list(map(json.loads, told))
            found = {}
            for each, ranks in sorted((e, r) for row in rows for e, r in row.items()):
                found[each] = sorted({*found.get(each, []), *ranks})
        return found

    def _leave(self, why: str) -> None:
        """Close the connections of this rank: others that wait for it in a collective fail now.

        gloo closes them when nothing refers to the process groups of any world any more.
        """
        self._note_left(why)
        for world in list(self._worlds):
            world._forget_groups(why)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _note_left(self, why: str) -> None:
        """Note that this rank leaves, in all stores that can be reached."""
        for peers in self._peers:
            with contextlib.suppress(RuntimeError):
                peers.note_left(why)


class Explained:
    """The context of `AgreeingRank.explained`; a generator costs five times as much to enter."""

    __slots__ = ("group", "rank")

    def __init__(self, rank: AgreeingRank, group: str) -> None:
        self.rank: AgreeingRank = rank
        self.group: str = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            self.rank.explain(self.group, error)


def _over(work: dist.Work, seconds: float) -> bool:
    """Wait for `work` for some seconds; True if it is over.

    ``is_completed`` is not right for all works of gloo.

    Raises:
        RuntimeError: it has failed.
    """
    start = time.monotonic()
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        if time.monotonic() - start < seconds:
            raise
        return False
    return True


def _pending(works: list[dist.Work]) -> list[dist.Work]:
    """The works that have neither failed nor ended."""
    pending = []
    for work in works:
        with contextlib.suppress(RuntimeError):
            if not _over(work, 0.01):
                pending.append(work)
    return pending


def _first(causes: Iterable[Cause | None]) -> Cause | None:
    return next((cause for cause in causes if cause is not None), None)


def _summary(error: BaseException) -> str:
    """Class and first line of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
