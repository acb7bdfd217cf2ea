"""Programs that change something between calls, at random, beside eager PyTorch.

What forward reads of Python (globals, closures, configurations, classes, hooks, modes, flags), and
what a user does to a model between steps: `python -m tests.fuzz.changes SEED` replays one case, and
`--count N` runs many.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import linecache
import random
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxshard
from fxshard.errors import FxshardError, PassError, VerifyError
from tests.fuzz.change_parts import ACTIONS, CALLS, PARTS, STRUCTURAL, Part
from tests.fuzz.many import quiet
from tests.fuzz.train import Seen, full, parts

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


@dataclasses.dataclass(frozen=True)
class Script:
    """Attributes:
    code: what defines `Model` and what it reads.
    events: lines of code, in order; a call of the model is the tuple of how, and of its arguments.
    options: of `fxshard.compile`.
    """

    seed: int
    code: str
    events: tuple[str | tuple[str, str], ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        lines = [each if isinstance(each, str) else f"{each[0]}: {each[1]}" for each in self.events]
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
    events: list[str | tuple[str, str]] = [("train", "batch(4, 1)")]
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
    return valid(Script(seed, code, tuple(events), options))


def valid(script: Script) -> Script:
    """Without the events that eager PyTorch refuses."""
    kept: list[str | tuple[str, str]] = []
    for event in script.events:
        try:
            list(played(dataclasses.replace(script, events=(*kept, event)), [0]))
        except Exception:
            continue
        kept.append(event)
    return dataclasses.replace(script, events=tuple(kept))


class Side:
    """A model in a module of its own; eager PyTorch's or fxshard's."""

    def __init__(self, script: Script, name: str, rank: int) -> None:
        path = f"<{name}>"
        linecache.cache[path] = (
            len(script.code), None, script.code.splitlines(keepends=True), path,
        )  # fmt: skip
        module = sys.modules[name] = types.ModuleType(name)
        self.space: dict[str, Any] = module.__dict__
        exec(compile(script.code, path, "exec"), self.space)
        torch.manual_seed(0)
        self.space["model"] = self.space["Model"]()
        self.space["rank"] = rank
        self.space["renew"] = self.renew
        self.rank = rank
        self.last: Tensor | None = None
        self.renew()

    @property
    def model(self) -> nn.Module:
        return self.space["model"]  # type: ignore[no-any-return]

    def renew(self) -> None:
        """An optimizer for the parameters that there are now."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.5)

    def forward(self, how: str, text: str) -> Seen:
        """A call, and its backward where it trains."""
        torch.manual_seed(1000 + self.rank)
        random.seed(1000 + self.rank)
        with torch.no_grad() if how == "evaluate" else torch.enable_grad():
            out = eval(text if "model" in text else f"model({text})", self.space)
            seen: Seen = {
                key: value.detach().clone() if isinstance(value, Tensor) else value
                for key, value in parts(out, "output")
            }
            if how == "train":
                loss = out.float().square().mean()
                loss.backward()
        return seen

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.model.parameters()]

    def step(self) -> Seen:
        seen: Seen = {
            f"gradient {name}": None if p.grad is None else full(p.grad)
            for name, p in self.model.named_parameters()
        }
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seen

    def states(self) -> Seen:
        seen = {name: full(p) for name, p in self.model.named_parameters()}
        return seen | {name: full(b) for name, b in self.model.named_buffers()}


def played(script: Script, ranks: Sequence[int], ours: Any = None) -> Iterator[Seen]:
    """What is seen after each event: of eager PyTorch of all `ranks`, or of fxshard of the one.

    Args:
        ours: the number of ranks, or `torchrun`'s.
    """
    kept = torch.get_default_dtype()
    env, dt = dict(__import__("os").environ), torch.are_deterministic_algorithms_enabled()
    try:
        sides = [Side(script, f"changes_{ours or 'eager'}_{rank}", rank) for rank in ranks]
        if ours is not None:
            fxshard.compile(sides[0].model, world_size=ours, **script.options)
            sides[0].renew()
        for event in script.events:
            if isinstance(event, str):
                for side in sides:
                    exec(event, side.space)
                yield [{} for _ in sides] if ours is None else {}
                continue
            seen = [side.forward(*event) for side in sides]
            if event[0] == "train":
                average([side.gradients() for side in sides])
                for side, each in zip(sides, seen, strict=True):
                    each |= side.step()
            for side, each in zip(sides, seen, strict=True):
                each |= side.states()
            yield seen if ours is None else seen[0]
    finally:
        torch.set_default_dtype(kept)
        torch.use_deterministic_algorithms(dt)
        torch.set_grad_enabled(True)
        torch.set_float32_matmul_precision("highest")
        environ = __import__("os").environ
        environ.clear()
        environ.update(env)
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
            getattr(nn.modules.module, name).clear()


def average(gradients: list[list[Tensor | None]]) -> None:
    if len(gradients) == 1:
        return
    for each in zip(*gradients, strict=True):
        there = [g for g in each if g is not None]
        if there:
            mean = sum(there) / len(each)
            for g in there:
                g.copy_(mean)


@dataclasses.dataclass
class Verdict:
    kind: str
    reason: str = ""
    detail: str = ""


def _close(ours: Any, theirs: Any) -> bool:
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)):
        return not isinstance(ours, Tensor) and not isinstance(theirs, Tensor) and ours == theirs
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    half = ours.dtype in (torch.bfloat16, torch.float16)
    return torch.allclose(ours, theirs, *((3e-2, 3e-2) if half else (1e-4, 1e-5)), equal_nan=True)


def judged(script: Script, ranks: int = 1, rank: int = 0, ours: Any = 2) -> Verdict:
    """How far fxshard comes beside eager PyTorch."""
    theirs = [each for each in played(script, range(ranks))]
    done = 0
    try:
        for event, seen, want in zip(
            script.events, played(script, [rank], ours), theirs, strict=True
        ):
            done += 1
            wanted = want[rank]
            apart = [
                k for k in dict.fromkeys([*wanted, *seen]) if not _close(seen.get(k), wanted.get(k))
            ]
            if apart:
                last = [e for e in script.events[:done] if isinstance(e, str)][-3:]
                return Verdict(
                    "wrong", f"event {done - 1}: {apart[0]} after {last}",
                    "\n".join(f"{k}: {seen.get(k)} for {wanted.get(k)}" for k in apart),
                )  # fmt: skip
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        event = script.events[done] if done < len(script.events) else "?"
        said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        refused = isinstance(error, FxshardError) and not isinstance(
            error, (VerifyError, PassError)
        )
        last = [e for e in script.events[:done] if isinstance(e, str)][-2:]
        return Verdict("refused" if refused else "crash", f"{said} [at {event} after {last}]", text)
    return Verdict("right")


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
