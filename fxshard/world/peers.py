"""The ranks of one process group, seen through its key-value store and never by a collective."""

from __future__ import annotations

import datetime
import hashlib
import json
import time
from collections.abc import Sequence

import torch.distributed as dist

from fxshard import compat
from fxshard.errors import RankDiedError, RankMismatchError
from fxshard.world import census

CENSUS_SECONDS = 5.0  # how long a survivor waits for the others before it calls them missing


class Peers:
    """Compares what ranks are about to do, and says who is dead or elsewhere when one fails."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.fake = dist.get_backend(group) == "fake"
        self.global_ranks = dist.get_process_group_ranks(group)
        if not self.fake:
            key = f"fxshard/identity/{self.rank}"
            compat.group_store(group).set(key, census.identity())

    def agree(self, lines: Sequence[str], what: str) -> None:
        """Compare `lines` with rank 0's, through the store; all ranks raise, or none.

        No collective is issued, so that ranks that disagree cannot hang in one.

        Raises:
            RankMismatchError: names the first rank that differs and its first differing line, or
                the ranks that never asked.
            RankDiedError: a rank died before it asked.
        """
        if self.fake or self.size == 1:
            return
        store = compat.group_store(self.group)
        # Each rank counts its own questions in the store: the n-th ones belong together.
        base = f"fxshard/agree/{store.add(f'fxshard/agree/rank{self.rank}', 1)}"
        text = "\n".join(lines)
        digest = hashlib.sha256(text.encode()).hexdigest()
        store.set(f"fxshard/reason/{self.rank}", f"waits for all ranks to agree on {what}")
        store.set(f"{base}/asked/{self.rank}", "")
        try:
            if self.rank == 0:
                store.set(f"{base}/text", text)
                store.set(f"{base}/digest", digest)
            store.wait([f"{base}/digest"], self._patience())
            if store.get(f"{base}/digest").decode() != digest:
                reference = store.get(f"{base}/text").decode()
                store.set(
                    f"{base}/differs/{self.rank}", json.dumps(first_difference(reference, text))
                )
            if store.add(f"{base}/seen", 1) == self.size:
                store.set(f"{base}/done", "1")
            store.wait([f"{base}/done"], self._patience())
        except RuntimeError as error:
            absent = [r for r in range(self.size) if not store.check([f"{base}/asked/{r}"])]
            here = f"{self._name(self.rank)} waited {self._patience()} to agree on {what}"
            gone = [rank for rank in absent if census.is_dead(self._told("identity", rank))]
            if gone:
                raise RankDiedError(f"{here}, but {self._names(gone)} died or left.") from error
            raise RankMismatchError(
                f"{here}; {self._names(absent)} never asked. Call the model on all ranks alike: "
                f"same arguments, train/eval and grad mode."
            ) from error
        store.set(f"fxshard/reason/{self.rank}", "")
        keys = {rank: f"{base}/differs/{rank}" for rank in range(self.size)}
        found = {r: json.loads(store.get(key)) for r, key in keys.items() if store.check([key])}
        if found:
            raise RankMismatchError(
                f"ranks differ in {what}. {self._difference(found)} "
                f"Build the same model and call it alike on every rank."
            )

    def _difference(self, found: dict[int, tuple[int, str, str]]) -> str:
        """The first line in which any rank differs from rank 0, and which ranks do.

        Args:
            found: per rank that differs, its `first_difference`.
        """
        first = min(at for at, _, _ in found.values())
        theirs = next(theirs for at, theirs, _ in found.values() if at == first)
        lines: dict[str, list[int]] = {}
        for rank, (at, _, ours) in found.items():
            if at == first:
                lines.setdefault(ours, []).append(rank)
        said = [f"{self._names(ranks)} '{ours}'" for ours, ranks in lines.items()]
        later = [rank for rank, (at, _, _) in found.items() if at != first]
        more = f" {self._names(later)} differs further down." if later else ""
        return (
            f"First difference, line {first + 1}: {self._name(0)} has '{theirs}', "
            f"{', '.join(said)}.{more}"
        )

    def _patience(self) -> datetime.timedelta:
        return compat.group_timeout(self.group)

    def _name(self, rank: int) -> str:
        """The rank as the user knows it: its number among all processes."""
        return f"rank {self.global_ranks[rank]}"

    def _names(self, ranks: Sequence[int]) -> str:
        return f"rank {', '.join(str(self.global_ranks[rank]) for rank in ranks)}"

    def explained(self, error: RuntimeError) -> RuntimeError:
        """The error of a failed collective, with the ranks that are dead or stuck elsewhere."""
        if self.fake:
            return error
        here = f"a collective failed on {self._name(self.rank)}"
        try:
            others = [rank for rank in range(self.size) if rank != self.rank]
            reasons = {rank: why for rank in others if (why := self._told("reason", rank))}
            if reasons:
                who = "; ".join(f"{self._name(rank)} {why}" for rank, why in reasons.items())
                return RankMismatchError(
                    f"{here} because the ranks did not do the same: {who}. Call the model on all "
                    f"ranks alike. Cause: {error}"
                )
            silent, dead = self._census(others)
        except RuntimeError:
            return RankDiedError(
                f"{here} and the store cannot be reached: the rank that hosts it (rank 0 unless "
                f"torchrun does) is gone. Cause: {error}"
            )
        alive = [rank for rank in silent if dead[rank] is False]
        if len(silent) > len(alive):
            gone = [rank for rank in silent if dead[rank]] or [r for r in silent if r not in alive]
            return RankDiedError(
                f"{here}: {self._names(gone)} of {self.size} died or left. Look at its log first; "
                f"restart from the last checkpoint. Cause: {error}"
            )
        if alive:
            return RankMismatchError(
                f"{here}: {self._names(alive)} of {self.size} is alive but did not take part. Call "
                f"the model on all ranks alike. Cause: {error}"
            )
        return error

    def _census(self, others: list[int]) -> tuple[list[int], dict[int, bool | None]]:
        """Sign; return who else has not after a while, and whether they are dead, if known."""
        store = compat.group_store(self.group)
        base = f"fxshard/census/{store.add(f'fxshard/census/rank{self.rank}', 1)}"
        store.set(f"{base}/{self.rank}", "")
        who = {rank: self._told("identity", rank) for rank in others}
        deadline = time.monotonic() + CENSUS_SECONDS
        while True:
            silent = [rank for rank in others if not store.check([f"{base}/{rank}"])]
            dead = {rank: census.is_dead(who[rank]) for rank in silent}
            if not silent or any(dead.values()) or time.monotonic() > deadline:
                return silent, dead
            time.sleep(0.05)

    def _told(self, what: str, rank: int) -> str:
        store = compat.group_store(self.group)
        key = f"fxshard/{what}/{rank}"
        return store.get(key).decode() if store.check([key]) else ""


def first_difference(reference: str, own: str) -> tuple[int, str, str]:
    """Number (from 0) of the first line in which two texts differ, and that line of each.

    Raises:
        ValueError: they are equal.
    """
    theirs, ours = reference.splitlines(), own.splitlines()
    for i in range(max(len(theirs), len(ours))):
        a = theirs[i] if i < len(theirs) else "(nothing)"
        b = ours[i] if i < len(ours) else "(nothing)"
        if a != b:
            return i, a, b
    raise ValueError("the texts are equal")
