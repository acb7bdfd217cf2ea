"""Programs that change something between calls, at random, beside eager PyTorch.

What forward reads of Python (globals, closures, configurations, classes, hooks, modes, flags), and
what a user does to a model between steps: `python -m tests.fuzz.changes SEED` replays one case, and
`--count N` runs many.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import linecache
import os
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from tests.fuzz.change_parts import ACTIONS, CALLS, PARTS, STRUCTURAL, Part
from tests.fuzz.judge import Verdict, of_error
from tests.fuzz.many import quiet
from tests.fuzz.train import Seen, full, states

HEAD = """
import abc, argparse, collections, contextlib, contextvars, copy, dataclasses, enum, functools
import itertools, math, operator, os, pickle, random, threading, types, typing, weakref
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
"""
BODY = """
class Block(nn.Module):
{block_class}
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
{block_init}

    def forward(self, x):
        h = self.linear(x)
{block_forward}
        return x + torch.tanh(h) + self.norm(h)

    def again(self, x):
        return self.linear(x) * 2


class Model(nn.Module):
{model_class}
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.act = nn.Tanh()
        self.drop = nn.Dropout(0.0)
        self.register_buffer("count", torch.zeros(()))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)
{model_init}

    def forward(self, x, scale=1.0, more=None, flag=False):
        h = self.drop(self.act(self.first(x))) * scale
        if more is not None:
            h = h + more
        if flag:
            h = h.abs()
{model_forward}
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def batch(n=4, seed=0):
    g = torch.Generator().manual_seed(seed + 1000 * rank)
    return torch.randn(n, 3, generator=g)
"""

OF_THE_PROCESS = ("nn.modules.module", "torch.set_", "torch.use_", "os.environ")


@dataclasses.dataclass(frozen=True)
class Script:
    """Attributes:
    code: what defines `Model` and what it reads.
    events: lines of code, in order; a call of the model is the tuple of how, of its arguments, and
        of what is changed between its forward and its backward.
    options: of `fxshard.compile`.
    """

    seed: int
    code: str
    events: tuple[str | tuple[str, ...], ...]
    options: dict[str, Any]

    def at(self, number: int) -> str:
        """Where an event is, for a verdict."""
        before = [event for event in self.events[:number] if isinstance(event, str)]
        return f" [event {number}: {self.events[number]}, after {before[-3:]}]"

    def __str__(self) -> str:
        lines = [
            each if isinstance(each, str) else ": ".join(each[:2]) + "; then ".join(["", *each[2:]])
            for each in self.events
        ]
        said = "\n".join(f"    {i}. {line}" for i, line in enumerate(lines))
        return f"# seed {self.seed}, options {self.options}\n{self.code}\n# events\n{said}"


def _indented(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.strip("\n").split("\n")) if text else ""


def _part(part: Part, i: int) -> Part:
    """With names of its own."""
    texts = {
        field.name: getattr(part, field.name).replace("§", str(i))
        for field in dataclasses.fields(part)
        if isinstance(getattr(part, field.name), str)
    }
    changes = tuple(each.replace("§", str(i)) for each in part.changes)
    return dataclasses.replace(part, **texts, changes=changes)


def drawn(seed: int) -> Script:
    rng = random.Random(seed)
    picked = [_part(part, i) for i, part in enumerate(rng.sample(PARTS, rng.randint(1, 4)))]
    places = [rng.choice(("block", "model")) for _ in picked]
    fields: dict[str, list[str]] = collections.defaultdict(list)
    changes: list[str] = []
    for part, place in zip(picked, places, strict=True):
        fields[f"{place}_class"].append(_indented(part.in_class, 4))
        fields[f"{place}_init"].append(_indented(part.init, 8))
        fields[f"{place}_forward"].append(_indented(part.forward, 8))
        owner = "model" if place == "model" else "model.blocks[1]"
        cls = "Model" if place == "model" else "Block"
        changes += [each.replace("@", owner).replace("CLS", cls) for each in part.changes]
    structural = [*STRUCTURAL, *(each for each in changes if "renew()" in each)]
    changes = [each for each in changes if "renew()" not in each] or ["pass"]
    texts = {
        f"{place}_{what}": "\n".join(each for each in fields[f"{place}_{what}"] if each.strip())
        for place in ("block", "model")
        for what in ("class", "init", "forward")
    }
    texts = {k: v or (" " * (8 if "class" not in k else 4) + "pass") for k, v in texts.items()}
    code = HEAD + "\n".join(part.defines for part in picked) + BODY.format(**texts)
    calls = [("train", "batch(4, {s})")] * 6 + [("evaluate", "batch(4, {s})")] * 2 + CALLS
    if "register_buffer('r" in code or "track_running_stats" in code:
        # a recomputed forward would write its buffers again, and read what it wrote before
        calls = [call for call in calls if "checkpoint" not in call[1]]
    events: list[str | tuple[str, ...]] = [("train", "batch(4, 1)")]
    for s in range(2, 2 + rng.randint(3, 6)):
        for _ in range(rng.choice((1, 1, 2))):
            r = rng.random()
            events.append(rng.choice(changes if r < 0.6 else ACTIONS if r < 0.97 else structural))
        how, text = rng.choice(calls)
        events.append((how, text.format(s=s)))
    if not isinstance(events[-1], tuple) or events[-1][0] != "train":
        events.append(("train", "batch(4, 99)"))
    options: dict[str, Any] = {"max_variants": 64}
    if rng.random() < 0.2:
        options["strategy"] = "shard_grad_op"
    if rng.random() < 0.2:
        options["checkpoint"] = "full"
    events = with_changes_between(random.Random(f"{seed}, between"), events, [*changes, *ACTIONS])
    return valid(Script(seed, code, tuple(events), options))


def with_changes_between(
    rng: random.Random, events: Sequence[str | tuple[str, ...]], changes: Sequence[str]
) -> list[str | tuple[str, ...]]:
    """Some of the steps change something between their forward and their backward.

    What is recomputed in backward reads what has been changed, in eager PyTorch. And what is of the
    whole process would be changed between the forwards of ranks that are played in one.
    """
    changes = [each for each in changes if not any(name in each for name in OF_THE_PROCESS)]
    return [
        (*event, rng.choice(changes))
        if event[0] == "train" and "checkpoint" not in event[1] and rng.random() < 0.3
        else event
        for event in events
    ]


def valid(script: Script) -> Script:
    """Without the events that eager PyTorch refuses."""
    kept: list[str | tuple[str, ...]] = []
    for event in script.events:
        try:
            list(played(dataclasses.replace(script, events=(*kept, event)), [0]))
        except Exception:
            continue
        kept.append(event)
    return dataclasses.replace(script, events=tuple(kept))


class Side:
    """A model in a file of its own."""

    def __init__(self, script: Script, rank: int) -> None:
        name = f"changes_{rank}"
        path = f"<{name}>"
        lines = script.code.splitlines(keepends=True)
        linecache.cache[path] = (len(script.code), None, lines, path)
        module = sys.modules[name] = types.ModuleType(name)
        self.space: dict[str, Any] = module.__dict__
        exec(compile(script.code, path, "exec"), self.space)
        torch.manual_seed(0)
        self.space |= {"model": self.space["Model"](), "rank": rank, "renew": self.renew}
        self.rank = rank

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.space["model"]
        return model

    def renew(self) -> None:
        """An optimizer for the parameters that there are now."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.5)

    def called(self, how: str, text: str, change: str = "") -> Seen:
        """A call, and its backward where it trains, after a change."""
        torch.manual_seed(1000 + self.rank)
        with torch.no_grad() if how == "evaluate" else torch.enable_grad():
            out = eval(text if "model" in text else f"model({text})", self.space)
            if change:
                exec(change, self.space)
            if how == "train":
                out.float().square().mean().add(1e-3).sqrt().backward()
        return {"output": out.detach().clone()}

    def stepped(self) -> Seen:
        """The gradients, which the optimizer then takes."""
        named = self.model.named_parameters()
        seen = {f"gradient {name}": None if p.grad is None else full(p.grad) for name, p in named}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seen


def played(
    script: Script, ranks: Sequence[int], prepare: Callable[[nn.Module], None] | None = None
) -> Iterator[list[Seen]]:
    """What is seen after each event, of each rank.

    Args:
        ranks: with more than one, all of them: gradients are averaged over them.
        prepare: called with each model before the first event.
    """
    with as_before():
        sides = [Side(script, rank) for rank in ranks]
        for side in sides:
            if prepare is not None:
                prepare(side.model)
            side.renew()
        for event in script.events:
            if isinstance(event, str):
                for side in sides:
                    torch.manual_seed(0)  # new parameters are equal on all sides
                    exec(event, side.space)
                yield [{} for _ in sides]
                continue
            seen = [side.called(*event) for side in sides]
            if event[0] == "train":
                average([[p.grad for p in side.model.parameters()] for side in sides])
                for side, each in zip(sides, seen, strict=True):
                    each |= side.stepped()
            yield [each | states(side.model) for side, each in zip(sides, seen, strict=True)]


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """What scripts set for the whole process is put back after the block."""
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    try:
        with torch.random.fork_rng(), pytest.MonkeyPatch.context() as patch:
            for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
                patch.setattr(nn.modules.module, name, collections.OrderedDict())
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        os.environ.clear()
        os.environ.update(environment)


def average(gradients: list[list[Tensor | None]]) -> None:
    if len(gradients) == 1:
        return
    for each in zip(*gradients, strict=True):
        there = [g for g in each if g is not None]
        if there:
            mean = sum(there) / len(each)
            for g in there:
                g.copy_(mean)


def judged(script: Script, ranks: int = 1, rank: int = 0, world_size: int | None = 2) -> Verdict:
    """How fxshard comes out beside eager PyTorch.

    Args:
        ranks: as many batches are there for each call; of the ranks of the process group.
        rank: this one.
        world_size: of `fxshard.compile`; None on real ranks.
    """
    theirs = list(played(script, range(ranks)))
    ours: list[list[Seen]] = []
    error: Exception | None = None
    try:
        ours += played(script, [rank], lambda model: compiled(model, script, world_size))
    except Exception as raised:
        error = raised
    for number, (seen, wanted) in enumerate(zip(ours, theirs, strict=False)):
        mine, their = seen[0], wanted[rank]
        apart = [key for key in {**their, **mine} if not close(mine.get(key), their.get(key))]
        if apart:
            lines = [f"{key}: {mine.get(key)} for {their.get(key)}" for key in apart]
            return Verdict("wrong", f"{apart[0]}{script.at(number)}", "\n".join(lines))
    if error is None:
        return Verdict("right")
    found = of_error(error)
    return dataclasses.replace(found, reason=f"{found.reason}{script.at(len(ours))}")


def compiled(model: nn.Module, script: Script, world_size: int | None) -> None:
    fxshard.compile(model, world_size=world_size, **script.options)


def close(ours: Any, theirs: Any) -> bool:
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)):
        return not isinstance(ours, Tensor) and not isinstance(theirs, Tensor) and ours == theirs
    same = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    return same and torch.allclose(ours, theirs, 1e-4, 1e-5)


def on_rank(rank: int, world_size: int, seeds: Sequence[int]) -> list[Verdict]:
    """What a rank says of each case, all of which have a batch of their own on each."""
    return [judged(drawn(seed), world_size, rank, None) for seed in seeds]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.changes", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="replay this case")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    args = parser.parse_args()
    quiet()
    if args.seed is not None:
        script = drawn(args.seed)
        print(script)
        verdict = judged(script)
        print(verdict.kind, verdict.reason, verdict.detail, sep="\n")
        return
    counts: dict[str, int] = collections.Counter()
    for seed in range(args.start, args.start + args.count):
        verdict = judged(drawn(seed))
        counts[verdict.kind] += 1
        if verdict.kind != "right":
            print(seed, verdict.kind, verdict.reason[:400].replace("\n", " "), flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
