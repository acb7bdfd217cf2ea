"""Models whose calls take different ways, the batches of ranks, and their eager reference."""

import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.config.checked import Config
from fxshard.ir.splitting import configured_units
from fxshard.verify.certificate import collectives
from tests.fsdp2 import full
from tests.oracles import count_collectives

WIDTH = 8


def some(rank: int, step: int, columns: int) -> Tensor:
    """f32[4, columns], another for each rank and step."""
    return torch.randn(4, columns, generator=torch.Generator().manual_seed(100 * step + rank))


class Towers(nn.Module):
    """An image tower and a text tower, of which a batch may lack one; both share a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.text = nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.audio = nn.Linear(4, WIDTH)  # which no batch has

    def forward(
        self, image: Tensor | None = None, text: Tensor | None = None, audio: Tensor | None = None
    ) -> Tensor:
        found = []
        if image is not None:
            found.append(self.shared(self.image(image)))
        if text is not None:
            found.append(self.shared(self.text(text)))
        if audio is not None:
            found.append(self.audio(audio))
        return self.head(torch.stack(found).sum(0)).square().mean()


def modalities(rank: int, step: int) -> dict[str, Any]:
    """The image is missing on one rank, the text on another, in turn; some have both."""
    both = {"image": some(rank, step, 6), "text": some(rank, step, 5)}
    left_out = ("image", "text", "")[(rank + step) % 3]
    return {name: value for name, value in both.items() if name != left_out}


class Experts(nn.Module):
    """Two layers of four experts; one whose flag is down has no tokens, and is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(
        self, x: Tensor, route: Sequence[Tensor], has_tokens: Sequence[tuple[bool, ...]]
    ) -> Tensor:
        for experts, expert_of, flags in zip(self.layers, route, has_tokens, strict=True):
            y = x
            for number, (expert, flag) in enumerate(zip(experts, flags, strict=True)):
                if flag:
                    y = y + expert(x) * (expert_of == number).unsqueeze(1)
            x = y.tanh()
        return self.head(x).square().mean()


def tokens(rank: int, step: int) -> dict[str, Any]:
    """Routing that is given in the batch, with a flag per expert that Python can read."""
    generator = torch.Generator().manual_seed(7 * rank + 31 * (step % 2))
    route = [torch.randint(0, 3, (4,), generator=generator) for _ in range(2)]
    flags = [tuple(bool((r == i).any()) for i in range(4)) for r in route]
    return {"x": some(rank, step, WIDTH), "route": route, "has_tokens": flags}


class Layers(nn.Module):
    """Residual layers, called in the order that is given: some are skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for i in order:
            x = x + self.layers[i](x).tanh()
        return self.head(x).square().mean()


def skipping(rank: int, step: int) -> dict[str, Any]:
    """Each rank skips another layer; the last one is skipped by all."""
    left_out = (rank + step) % 4
    return {"x": some(rank, step, WIDTH), "order": tuple(i for i in range(3) if i != left_out)}


def turned(rank: int, step: int) -> dict[str, Any]:
    """Ranks call layers in orders that contradict each other, and one of them twice."""
    order = ((0, 1, 2), (2, 1, 0, 1), (1, 0), (3, 0, 3))[(rank + step) % 4]
    return {"x": some(rank, step, WIDTH), "order": order}


class Mixed(nn.Module):
    """Tied, shared and bare parameters, norms and a checkpoint, in any order and any number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i % 2 == 0) for i in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.v = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, way: tuple[int, ...], embeds: bool, heads: bool) -> Tensor:
        x = self.embed(x) if embeds else F.one_hot(x % WIDTH, WIDTH).float()
        for k in way:
            if k < 4:
                x = x + self.layers[k](x)
            elif k < 6:
                x = self.norms[k - 4](x)
            elif k == 6:
                x = x @ self.w
            elif k == 7:
                x = x @ torch.cat([self.w, self.v])[:WIDTH] + x @ self.v
            else:
                x = checkpoint(self.layers[0], x, use_reentrant=False)
        return (self.head(x) if heads else x).square().mean()


def wandering(rank: int, step: int) -> dict[str, Any]:
    """Any way, and any number of tokens."""
    rng = random.Random(100 * step + rank)
    way = tuple(rng.choices(range(9), k=rng.randint(1, 5)))
    embeds, heads = rng.random() < 0.7, rng.random() < 0.7
    return {
        "x": torch.arange(rng.randint(2, 6)),
        "way": (*way, 0),  # so that something is trained
        "embeds": embeds,
        "heads": heads,
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its units, and the batch of a rank in a step."""

    build: Callable[[], nn.Module]
    units: list[str]
    batch: Callable[[int, int], dict[str, Any]]


CASES = {
    "towers": Case(Towers, ["image.*", "text.*", "head", "audio"], modalities),
    "experts": Case(Experts, ["layers.*.*"], tokens),
    "skipped": Case(Layers, ["layers.*"], skipping),
    "turned": Case(Layers, ["layers.*"], turned),
    "mixed": Case(Mixed, ["layers.*", "norms.*"], wandering),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].build()


def by_fully_shard(model: nn.Module, name: str, **options: Any) -> Any:
    """`fully_shard` on what the units of a case name, and then on the model."""
    for unit in configured_units(model, Config(units=CASES[name].units))[1:]:
        fxshard.fully_shard(model.get_submodule(unit.fqn), **options)
    return fxshard.fully_shard(model, ranks_may_differ=True, **options)


@dataclasses.dataclass
class Trained:
    """What training left on one rank: `counts` has the collectives of each forward and backward."""

    counts: list[list[str]]
    sequences: list[list[str]]  # of each program that was completed


def trained(
    rank: int,
    world_size: int,
    name: str,
    model: Any,
    *,
    steps: int = 3,
    micro_batches: int = 1,
    no_sync: bool = False,
    sums: bool = False,
    clips: bool = False,
    close: dict[str, float] | None = None,
) -> Trained:
    """Train `model`, on this rank, beside eager PyTorch on the mean of the losses of all ranks.

    Gradients, None included, are compared before each optimizer step, and parameters after it.

    Args:
        rank, world_size: of this rank.
        name: of the case.
        model: sharded.
        steps, micro_batches, no_sync: of the loop; without the last of a step if `no_sync`.
        sums: gradients of ranks are added, not averaged.
        clips: clip the norm of gradients.
        close: tolerances.
    """
    case, reference = CASES[name], built(name)
    optimizer = None
    if model._fxshard.config.optimizer is None:
        optimizer = Adam(model.parameters(), lr=0.05)
    theirs = Adam(reference.parameters(), lr=0.05)
    divisor, counts = (1 if sums else world_size), []
    for step in range(steps):
        for micro in range(micro_batches):
            number = step + 5 * micro
            waits = no_sync and micro < micro_batches - 1
            with model.no_sync() if waits else contextlib.nullcontext():
                with count_collectives() as seen:
                    loss = model(**case.batch(rank, number))
                    loss.backward()
                counts.append([f"{each.kind} {each.nbytes}" for each in seen.calls])
            expected = reference(**case.batch(rank, number))
            assert_close(
                loss.detach(), expected.detach(), check_dtype=close is None, **(close or {})
            )
            total = sum(reference(**case.batch(other, number)) for other in range(world_size))
            (total / divisor).backward()
        pairs = list(zip(model.named_parameters(), reference.parameters(), strict=True))
        for (fqn, ours), eager in pairs:
            if optimizer is not None:
                assert (ours.grad is None) == (eager.grad is None), f"{fqn} in step {step}"
            if optimizer is not None and eager.grad is not None:
                assert_close(full(ours.grad), eager.grad, msg=_named(fqn), **(close or {}))
        if clips:
            ours = model.clip_grad_norm_(0.05)
            eager = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            assert_close(full(ours), eager, **(close or {}))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        theirs.step()
        theirs.zero_grad()
        for (fqn, ours), eager in pairs:
            if close is None:
                assert_close(full(ours).detach(), eager.detach(), msg=_named(fqn))
            else:  # what rounding has added up to is not the question
                eager.data.copy_(full(ours).detach())
    completed = [v.program for v in model._fxshard.variants.values() if v.program.common]
    return Trained(counts, [collectives(program) for program in completed])


def _named(fqn: str) -> Callable[[str], str]:
    return lambda text: f"{fqn}: {text}"


def compiled(name: str, **options: Any) -> Any:
    """The model of a case, compiled for ranks that differ."""
    return fxshard.compile(
        copy.deepcopy(built(name)), units=CASES[name].units, ranks_may_differ=True, **options
    )
