"""The ranks of one process group, compared through its key-value store, without collectives."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from fxshard._torch import process_groups
from fxshard.errors import RankDiedError, RankMismatchError
from fxshard.runtime.world import census

CENSUS_SECONDS = 5.0  # how long a survivor waits for the others before it calls them missing
STOP_SECONDS = 10.0  # how long a rank that stopped waits for the others to stop alike
SLOTS = 4  # calls whose programs are kept
LOOK_SECONDS = 0.5  # a rank that waits checks the others at least so often

_BACKWARD = "backward"  # appended to the digest of its call

Leave = Callable[[str], None]  # closes the connections of this rank, for a reason
# Why no collective of a group will work any more: the class of the error, and the rest of its text.
Cause = tuple[type[RankDiedError | RankMismatchError], str]
_CAUSES = {each.__name__: each for each in (RankDiedError, RankMismatchError)}

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _reads(method: _Method) -> _Method:
    """Turn errors of reading entries of other ranks, which may be anything, into mismatches."""

    @functools.wraps(method)
    def read(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (ValueError, KeyError, TypeError) as error:
            raise RankMismatchError(
                f"an entry of the process group's store cannot be read ({type(error).__name__}: "
                f"{error}): the ranks run several versions of fxshard, or something else writes "
                f"keys that begin with 'fxshard/'. Run one version on all ranks, and start again "
                f"from the last checkpoint."
            ) from error

    return read  # type: ignore[return-value]


class Peers:
    """Compares what ranks are about to do, and finds dead or diverging ranks after a failure."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: Any = group
        self.size: int = group.size()
        self.rank: int = group.rank()
        self.fake: bool = dist.get_backend(group) == "fake"
        self.global_ranks: list[int] = dist.get_process_group_ranks(group)
        self.next_shard: int = (self.rank + 1) % self.size  # a rank of a group, with other rows
        self.alone: bool = self.fake or self.size == 1
        if not self.fake:
            store = process_groups.group_store(group)
            store.set(f"fxshard/identity/{self.rank}", census.identity())
            number = store.add(f"fxshard/worlds/{self.rank}", 1)  # the n-th ones belong together
            self._calls = f"calls/{number}"
            self._stopped = f"fxshard/stopped/{number}"
        self._stops = 0  # phases of this rank that ended with an exception, as on all others
        self.last: str | None = None  # digest of what this rank ran last
        self._said: dict[str, str] = {}  # texts of `exchange`, by their digest
        self._exchanges: list[str] = []  # keys of this rank in the last ones
        self._tells, self._counters = 0, ["", ""]  # see `tell`: how many, and the last two keys

    @_reads
    def note_call(
        self,
        number: int,
        digest: str,
        known: Mapping[str, Sequence[str]],
        leave: Leave,
    ) -> None:
        """Note in the store which program this rank runs in its call `number`; nobody answers.

        If all ranks know several programs, check what the next rank ran in the call before, and the
        next rank that holds other rows: ranks may diverge, and collectives of equal sizes would mix
        their parameters. The entry of the latter exists, as the collectives of that call are over;
        that of a replica may come later.

        Args:
            number: of the call.
            digest: of the program, a key of `known`.
            known: what all ranks have agreed on, by digest.
            leave: closes the connections of this rank, so that the ranks fail too that have seen no
                difference.

        Raises:
            RankMismatchError: it was another program.
        """
        if self.alone:
            return
        if len(known) > 1 and self.last is not None:
            for other in dict.fromkeys([self.next_shard, (self.rank + 1) % self.size]):
                call, _, ran = self._entry(self._slot(number - 1), other).partition(" ")
                if call == str(number - 1) and ran != self.last:
                    mixed = self._mixed(other, _ran(ran, known), _ran(self.last, known))
                    leave(f"ran another program than {self._name(other)} in the last call")
                    raise RankMismatchError(mixed)
        self._note(number, digest)

    def note_backward(self, number: int) -> None:
        """Note that this rank begins a backward with collectives; it counts as a call."""
        if not self.alone:
            self._note(number, f"{(self.last or '').partition(' ')[0]} {_BACKWARD}")

    def _note(self, number: int, digest: str) -> None:
        store = process_groups.group_store(self.group)
        store.set(f"fxshard/{self._slot(number)}/{self.rank}", f"{number} {digest}")
        self.last = digest

    def _slot(self, number: int) -> str:
        """The key of a call's entry; keys repeat, as no rank is two calls ahead of another."""
        return f"{self._calls}/{number % SLOTS}"

    def _mixed(self, other: int, reference: Sequence[str], own: Sequence[str]) -> str:
        at, there, here = first_difference("\n".join(reference), "\n".join(own))
        return (
            f"in the last call {self._name(other)} ran another program than "
            f"{self._name(self.rank)}, so that what they gathered and reduced is mixed: in line "
            f"{at + 1} it has '{there}', here it is '{here}'. Let all ranks take the same way "
            f"through the model, and start again from the last checkpoint."
        )

    def tell(self, flags: str) -> str:
        """Send flags to the other ranks; all ranks send in the same order.

        Args:
            flags: "0" or "1" each.

        Returns:
            The argument of `any_of`.
        """
        store = process_groups.group_store(self.group)
        if self._tells > 1:  # all have begun the one before, and so ended the one before that
            store.delete_key(f"{self._tale(self._tells - 2)}/{self.rank}")
            store.delete_key(f"{self._tale(self._tells - 2)}/{self._counters[0]}")
        base = self._tale(self._tells)
        self._tells += 1
        self._counters = [*self._counters[-1:], f"all/{_digest(flags)}"]
        store.set(f"{base}/{self.rank}", flags)
        store.add(f"{base}/{self._counters[-1]}", 1)
        return base

    def _tale(self, number: int) -> str:
        return f"fxshard/{self._calls}/told/{number}"

    @_reads
    def any_of(self, base: str, flags: str) -> str:
        """The flags, "1" if set on any rank of the group; waits for those of all ranks.

        Args:
            base: the result of `tell`.
            flags: of this rank.
        """
        store = process_groups.group_store(self.group)
        keys = [f"{base}/{rank}" for rank in range(self.size)]
        try:
            if store.add(f"{base}/all/{_digest(flags)}", 0) == self.size:
                return flags
            store.wait(keys, self._patience())
            sent = [value.decode() for value in store.multi_get(keys)]
        except RuntimeError as error:
            cause = self.cause_of_failure()
            raise (error if cause is None else self.failure(cause, error)) from error
        if not set("".join(sent)) <= {"0", "1"}:
            raise ValueError(f"{sent} for flags")
        return "".join(max(each) for each in zip(flags, *sent, strict=True))

    def drop(self) -> None:
        """Refer to the group no more."""
        self.group, self.alone = None, True

    def note_reason(self, reason: str) -> None:
        """Note why this rank may not take part in the next collective; empty: it will."""
        if not self.alone:
            process_groups.group_store(self.group).set(f"fxshard/reason/{self.rank}", reason)

    @_reads
    def agree(
        self,
        lines: Sequence[str],
        what: str,
        leave: Leave,
        call: int = 0,
        before: Collection[Sequence[str]] = (),
    ) -> None:
        """Compare `lines` with rank 0's, through the store; all ranks raise, or none.

        No collective is issued, so ranks that disagree cannot hang in one. A rank that runs this
        call of the model already, with a program that all ranks have agreed on, does not take part:
        it waits in a collective for this rank, until this one leaves.

        Args:
            lines: of this rank.
            what: the lines are about, for messages.
            leave: closes the connections of this rank.
            call: the number of this call of the model; 0: outside of a call, all ranks take part.
            before: lines that all have agreed on.

        Raises:
            RankMismatchError: names the first rank that differs and its first differing line, or
                the ranks that did not take part.
            RankDiedError: a rank died before it took part.
        """
        if self.alone:
            return
        store = process_groups.group_store(self.group)
        base = self._next_agreement()
        text = "\n".join(lines)
        digest = _digest(text)
        waits = f"waits for all ranks to agree on {what}"
        self.note_reason(waits)
        store.set(f"{base}/asked/{self.rank}", "")

        def wait(key: str) -> None:
            start, pause = time.monotonic(), 0.001
            while not store.check([key]):
                self._require_coming(base, start, what, leave, call, before, lines)
                time.sleep(pause)
                pause = min(2 * pause, LOOK_SECONDS)

        if self.rank == 0:
            store.set(f"{base}/text", text)
            store.set(f"{base}/digest", digest)
        wait(f"{base}/digest")
        if store.get(f"{base}/digest").decode() != digest:
            reference = store.get(f"{base}/text").decode()
            difference = json.dumps(first_difference(reference, text))
            store.set(f"{base}/differs/{self.rank}", difference)
        if store.add(f"{base}/seen", 1) == self.size:
            store.set(f"{base}/done", "1")
        wait(f"{base}/done")
        self.note_reason("")
        keys = {rank: f"{base}/differs/{rank}" for rank in range(self.size)}
        found = {r: json.loads(store.get(key)) for r, key in keys.items() if store.check([key])}
        if found:
            raise RankMismatchError(
                f"ranks differ in {what}. {self._difference(found)} "
                f"Build the same model, with the same options, and call it alike on every rank."
            )

    def _next_agreement(self) -> str:
        """The key of what all ranks agree on next.

        Each rank counts in the store what it takes part in: the n-th ones belong together.
        """
        store = process_groups.group_store(self.group)
        return f"fxshard/agree/{store.add(f'fxshard/agree/rank{self.rank}', 1)}"

    def _require_coming(
        self,
        base: str,
        start: float,
        what: str,
        leave: Leave,
        call: int,
        before: Collection[Sequence[str]],
        lines: Sequence[str],
    ) -> None:
        """Check that the ranks that this one waits for will take part.

        Args:
            base: the key of the agreement.
            start: since when it waits.
            what, leave, call, before, lines: as for `agree`.

        Raises:
            RankMismatchError, RankDiedError: some will not.
        """
        late = time.monotonic() - start > self._patience().total_seconds()
        if not (late or self._looks_wrong(base, call)):
            return
        store = process_groups.group_store(self.group)
        gone = self._gone(range(self.size))  # before `missing`: ranks may ask and end
        missing = [r for r in range(self.size) if not store.check([f"{base}/asked/{r}"])]
        ahead = [r for r in missing if call and self._call_of(r) >= call]
        gone = [r for r in gone if r in missing]
        error = self._failure(what, missing, ahead, gone, before, lines)
        store.set(f"{base}/failed", "")
        if ahead:
            leave(f"waits for all ranks to agree on {what}")
        raise error

    @_reads
    def exchange(self, text: str, what: str, leave: Leave, call: int) -> dict[str, list[int]]:
        """Send `text` to all ranks, through the store; returns those of all ranks.

        A text is sent once: from then on its digest is.

        Args:
            text: of this rank.
            what: the texts say, for messages.
            leave, call: as for `agree`.

        Returns:
            per text, the (global) ranks that sent it; the same on all ranks.

        Raises:
            RankMismatchError: some ranks do something else.
            RankDiedError: a rank died before it took part.
        """
        if self.alone:
            return {text: [self.global_ranks[self.rank]]}
        store, digest = process_groups.group_store(self.group), _digest(text)
        if digest not in self._said:
            self._said[digest] = text
            store.set(f"fxshard/said/{digest}", text)
        base = self._next_agreement()
        keys = [f"{base}/asked/{rank}" for rank in range(self.size)]
        if len(self._exchanges) > 1:  # all have begun the one before, and so ended this one
            store.delete_key(self._exchanges.pop(0))
        self._exchanges.append(keys[self.rank])
        store.set(keys[self.rank], digest)
        start = time.monotonic()
        while not _all_there(store, keys):
            cause = self.cause()
            if cause is not None:
                raise cause[0](f"{self._name(self.rank)} calls the model, in vain{cause[1]}")
            lines = [f"a call of the model that tells {what}"]
            known = [["a call of the model, or a backward"]]
            self._require_coming(base, start, what, leave, call, known, lines)
        found: dict[str, list[int]] = {}
        for rank, sent in enumerate(value.decode() for value in store.multi_get(keys)):
            if not sent:
                store.set(f"{base}/failed", "")
                does = self._entry("reason", rank) or "does something else with the model"
                raise RankMismatchError(
                    f"{self._name(self.rank)} calls the model, but {self._name(rank)} {does}. Call "
                    f"the model on all ranks the same number of times."
                )
            if sent not in self._said:
                self._said[sent] = store.get(f"fxshard/said/{sent}").decode()
            found.setdefault(self._said[sent], []).append(self.global_ranks[rank])
        return found

    def _difference(self, found: dict[int, tuple[int, str, str]]) -> str:
        """The first line in which any rank differs from rank 0, and which ranks do.

        Args:
            found: per rank that differs, its `first_difference`.
        """
        first = min(at for at, _, _ in found.values())
        reference = next(line for at, line, _ in found.values() if at == first)
        lines: dict[str, list[int]] = {}
        for rank, (at, _, line) in found.items():
            if at == first:
                lines.setdefault(line, []).append(rank)
        others = [f"{self._names(ranks)} '{line}'" for line, ranks in lines.items()]
        later = [rank for rank, (at, _, _) in found.items() if at != first]
        more = f" {self._names(later)} differs further down." if later else ""
        return (
            f"First difference, line {first + 1}: {self._name(0)} has '{reference}', "
            f"{', '.join(others)}.{more}"
        )

    def _looks_wrong(self, base: str, call: int) -> bool:
        """True if the next rank is dead, or in this call of the model without taking part.

        Each rank checks only the next one, to spare the store: of all waiting ranks, one is before
        a rank that does not take part. The rank that finds it notes the failure for the others.
        """
        store = process_groups.group_store(self.group)
        if store.check([f"{base}/failed"]):
            return True
        other = (self.rank + 1) % self.size
        wrong = bool(call) and self._call_of(other) >= call
        wrong = wrong or census.is_dead(self._entry("identity", other)) is True
        # Read last: a rank asks before it notes its call.
        return wrong and not store.check([f"{base}/asked/{other}"])

    def _failure(
        self,
        what: str,
        absent: list[int],
        ahead: list[int],
        gone: list[int],
        before: Collection[Sequence[str]],
        lines: Sequence[str],
    ) -> RuntimeError:
        """The error to raise if not all ranks take part.

        Args:
            absent: ranks that do not take part.
            ahead: those of them that are in this call already.
            gone: those of them that are dead.
        """
        here = f"{self._name(self.rank)} waited to agree on {what}"
        if ahead:
            return RankMismatchError(
                f"{self._name(self.rank)} would do something else in this call of the model than "
                f"{self._names(ahead)}, who run a program that all know: {_news(before, lines)}. "
                f"Let all ranks take the same way through the model; call it alike. This rank has "
                f"left the process group, so that the others fail too: start again from the last "
                f"checkpoint."
            )
        if gone:
            return RankDiedError(f"{here}, but {self._names(gone)} died or left.")
        why = f"{self._names(absent)} never asked" if absent else "another rank has given up"
        return RankMismatchError(
            f"{here}; {why}. Call the model on all ranks alike: same "
            f"arguments, train/eval and grad mode."
        )

    def _call_of(self, rank: int) -> int:
        entries = (self._entry(self._slot(i), rank) for i in range(SLOTS))
        return max(int(each.partition(" ")[0] or 0) for each in entries)

    def _patience(self) -> datetime.timedelta:
        return process_groups.group_timeout(self.group)

    def _name(self, rank: int) -> str:
        """The global rank, for messages."""
        return f"rank {self.global_ranks[rank]}"

    def _names(self, ranks: Sequence[int]) -> str:
        return f"rank {', '.join(str(self.global_ranks[rank]) for rank in ranks)}"

    # -- ranks that stop, leave or die ------------------------------------------------------------

    def failure(self, cause: Cause, error: RuntimeError | None = None) -> RuntimeError:
        """The error of a collective that failed for `cause`, or will never be over."""
        kind, text = cause
        seen = f" Cause: {error}" if error is not None else ""
        return kind(f"a collective failed on {self._name(self.rank)}{text}{seen}")

    @_reads
    def cause(self) -> Cause | None:
        """Why collectives of this group fail, if any rank has noted it."""
        if self.alone:
            return None
        store = process_groups.group_store(self.group)
        if not store.check(["fxshard/cause"]):
            return None
        return _cause(store.get("fxshard/cause"))

    def note_cause(self, cause: Cause) -> None:
        """Note why collectives of this group will fail from now on; the first note stays.

        Ranks that fail later, because a neighbour left after the first failure, would name that
        neighbour.
        """
        if not self.alone:
            text = json.dumps([cause[0].__name__, cause[1]])
            process_groups.group_store(self.group).compare_set("fxshard/cause", "", text)

    def note_left(self, why: str) -> None:
        """Note that this rank leaves the group, and why."""
        self.note_cause((RankMismatchError, self._unlike(f"{self._name(self.rank)} {why}")))

    def _unlike(self, who: str) -> str:
        return f" because the ranks did not do the same: {who}. Call the model on all ranks alike."

    def _died(self, ranks: list[int]) -> Cause:
        return RankDiedError, (
            f": {self._names(ranks)} of {self.size} died or left. Look at its log first; restart "
            f"from the last checkpoint."
        )

    @_reads
    def cause_of_failure(self) -> Cause | None:
        """Why a collective has failed, if that can be found.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        reasons = {rank: why for rank in others if (why := self._entry("reason", rank))}
        if reasons:
            who = "; ".join(f"{self._name(rank)} {why}" for rank, why in reasons.items())
            return RankMismatchError, self._unlike(who)
        silent, dead = self._census(others)
        alive = [rank for rank in silent if dead[rank] is False]
        if len(silent) > len(alive):
            gone = [rank for rank in silent if dead[rank]] or [r for r in silent if r not in alive]
            return self._died(gone)
        if alive:
            return RankMismatchError, (
                f": {self._names(alive)} of {self.size} is alive but did not take part. Call the "
                f"model on all ranks alike."
            )
        return None

    def _census(self, others: list[int]) -> tuple[list[int], dict[int, bool | None]]:
        """Report this rank; returns the ranks that do not report, and which ranks are dead."""
        store = process_groups.group_store(self.group)
        base = f"fxshard/census/{store.add(f'fxshard/census/rank{self.rank}', 1)}"
        store.set(f"{base}/{self.rank}", "")
        who = {rank: self._entry("identity", rank) for rank in others}
        deadline = time.monotonic() + CENSUS_SECONDS
        while True:
            # In this order: a rank that fails like this one reports first and then ends.
            dead = {rank: census.is_dead(who[rank]) for rank in others}
            silent = [rank for rank in others if not store.check([f"{base}/{rank}"])]
            if not silent or any(dead[r] for r in silent) or time.monotonic() > deadline:
                return silent, dead
            time.sleep(0.05)

    def _gone(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if census.is_dead(self._entry("identity", rank))]

    def note_stop(self, issued: int, what: str) -> None:
        """Note that a phase of this rank has ended with an exception, after `issued` collectives.

        Args:
            issued: how many this rank has launched by now, in all its calls.
            what: happened, for messages.
        """
        if self.alone:
            return
        self._stops += 1
        store, base = process_groups.group_store(self.group), self._stop_of(self._stops)
        text = json.dumps([issued, f"{self._name(self.rank)} {what}"])
        store.compare_set(f"{base}/first", "", text)
        store.add(f"{base}/at{issued}", 1)
        store.add(f"{base}/all", 1)  # last: it is never more than the sum of the others

    def note_over(self) -> None:
        """Note that all collectives that this rank launched before it stopped are over."""
        if not self.alone:
            process_groups.group_store(self.group).add(f"{self._stop_of(self._stops)}/over", 1)

    def stopped_alike(self, issued: int) -> bool | None:
        """Whether all ranks have stopped after `issued` collectives; None: not yet known."""
        if self.alone:
            return True
        store, base = process_groups.group_store(self.group), self._stop_of(self._stops)
        stopped = store.add(f"{base}/all", 0)
        if stopped > store.add(f"{base}/at{issued}", 0) or self.cause() is not None:
            return False
        return True if store.add(f"{base}/over", 0) == self.size else None

    @_reads
    def never_over(self, issued: int) -> Cause | None:
        """Why this rank would wait for ever, if it would.

        Either a rank has stopped after fewer collectives than `issued`, or the next rank is dead:
        of all waiting ranks, one is before a dead one.
        """
        if self.alone:
            return None
        store, first = (
            process_groups.group_store(self.group),
            f"{self._stop_of(self._stops + 1)}/first",
        )
        if store.check([first]):
            stopped, who = json.loads(store.get(first))
            if int(stopped) < issued:
                return RankMismatchError, self._unlike(who)
        other = (self.rank + 1) % self.size
        return self._died([other]) if census.is_dead(self._entry("identity", other)) else None

    def _stop_of(self, number: int) -> str:
        return f"{self._stopped}/{number}"

    def _entry(self, what: str, rank: int) -> str:
        store = process_groups.group_store(self.group)
        key = f"fxshard/{what}/{rank}"
        return store.get(key).decode() if store.check([key]) else ""


def _all_there(store: Any, keys: list[str]) -> bool:
    """Wait some time for keys; True if they are all there."""
    try:
        store.wait(keys, datetime.timedelta(seconds=LOOK_SECONDS))
    except RuntimeError:
        return bool(store.check(keys))
    return True


def _cause(text: bytes) -> Cause:
    kind, rest = json.loads(text)
    return _CAUSES[kind], rest


def _ran(entry: str, known: Mapping[str, Sequence[str]]) -> list[str]:
    """What a rank ran, from its entry: a digest, and whether it was the backward."""
    digest, _, phase = entry.partition(" ")
    return [*known.get(digest, (digest,)), phase]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _news(before: Collection[Sequence[str]], lines: Sequence[str]) -> str:
    """How `lines` differ from those lines in `before` that have the most in common with them."""
    found = [first_difference("\n".join(each), "\n".join(lines)) for each in before]
    at, reference, own = max(found)
    return f"in line {at + 1} they have '{reference}', it has '{own}'"


def first_difference(reference: str, own: str) -> tuple[int, str, str]:
    """Number (from 0) of the first line in which two texts differ, and that line of each.

    Raises:
        ValueError: they are equal.
    """
    one, other = reference.splitlines(), own.splitlines()
    for i in range(max(len(one), len(other))):
        a = one[i] if i < len(one) else "(nothing)"
        b = other[i] if i < len(other) else "(nothing)"
        if a != b:
            return i, a, b
    raise ValueError("the texts are equal")
