"""The training loop, and what it sees; the same for fxshard and for eager PyTorch."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.fuzz.case import Case

Seen = dict[str, Any]  # what -> tensor, None, or text


def initial(space: dict[str, Any]) -> nn.Module:
    """The model that every side starts from."""
    torch.manual_seed(0)
    model: nn.Module = space["Model"]()
    return model


def parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Tensors in a structure, and everything else as text, each with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from parts(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        yield f"{path} kind", type(value).__name__
        for i, item in enumerate(value):
            yield from parts(item, f"{path}[{i}]")
    elif hasattr(value, "__dataclass_fields__"):
        yield f"{path} kind", type(value).__name__
        for key, item in vars(value).items():
            yield from parts(item, f"{path}.{key}")
    else:
        yield path, repr(value)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in parts(value, "") if isinstance(leaf, Tensor)]


def full(t: Tensor) -> Tensor:
    """A copy of the full tensor."""
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).clone()


def forward_backward(
    call: Callable[..., Any], batch: dict[str, Any], loss_of: Callable[[Any], Tensor], label: str
) -> Seen:
    """One micro-batch: outputs, loss, gradients of inputs, and inputs, which forward may write."""
    seen: Seen = {}
    before = [t.detach().clone() for t in tensors(batch)]
    out = call(**batch)
    for path, value in parts(out, f"output {label}"):
        if isinstance(value, Tensor):
            seen[path] = value.detach().clone()
            seen[f"{path} requires grad"] = str(value.requires_grad)
        else:
            seen[path] = value
    loss = loss_of(out)
    seen[f"loss {label}"] = loss.detach().clone()
    loss.backward()
    for (path, value), was in zip(
        ((p, v) for p, v in parts(batch, "") if isinstance(v, Tensor)), before, strict=True
    ):
        if value.requires_grad:
            grad = value.grad
            seen[f"input gradient {label} {path}"] = None if grad is None else grad.clone()
        if not torch.equal(was, value.detach()):
            seen[f"written input {label} {path}"] = value.detach().clone()
    return seen


def states(model: nn.Module, whole: Callable[[Tensor], Tensor] = full) -> Seen:
    """Parameters and buffers."""
    seen: Seen = {f"parameter {name}": whole(p) for name, p in model.named_parameters()}
    return seen | {f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()}


def seed_of(rank: int, step: int, micro: int) -> int:
    return 10_000 * step + 100 * micro + rank


def train(case: Case, rank: int, world_size: Any) -> Seen:
    """What fxshard gives on `rank`."""
    import fxshard

    space = case.program.space()
    options = case.evaluated(space)
    if "memory_budget" in options:
        options["kwargs"] = space["batch"](rank, 0)
    source = initial(space)
    if case.whole:
        return train_in_whole_steps(case, rank, world_size, source, space, options)
    model: Any = fxshard.compile(source, world_size=world_size, **options)
    params = list(model.parameters())
    optimizer = None if case.in_backward else eval(case.optimizer, space)(params)
    seen: Seen = {}
    for step in range(case.steps):
        for micro in range(case.micro_batches):
            waits = case.no_sync and micro < case.micro_batches - 1
            torch.manual_seed(seed_of(rank, step, micro))
            batch = space["batch"](rank, step * case.micro_batches + micro)
            with model.no_sync() if waits else contextlib.nullcontext():
                seen |= forward_backward(model, batch, space["loss_of"], f"{step}.{micro}")
        if optimizer is not None:
            for name, p in model.named_parameters():
                seen[f"gradient {step} {name}"] = None if p.grad is None else full(p.grad)
            optimizer.step()
            optimizer.zero_grad()
    return seen | at_the_end(case, rank, model, space)


def train_in_whole_steps(
    case: Case, rank: int, world_size: Any, source: nn.Module, space: Any, options: Any
) -> Seen:
    """The same by `fxshard.compile_step`, which leaves losses, norms and what has changed."""
    import fxshard

    make = eval(case.optimizer, space)
    made = make(list(source.parameters())) if case.seed % 2 else make
    step: Any = fxshard.compile_step(
        source, space["loss_of"], made, max_norm=math.inf, world_size=world_size, **options
    )
    seen: Seen = {}
    for number in range(case.steps):
        torch.manual_seed(seed_of(rank, number, 0))
        batch = space["batch"](rank, number)
        before = [t.detach().clone() for t in tensors(batch)]
        seen[f"loss {number}.0"] = step(**batch)
        seen[f"norm {number}"] = step.grad_norm
        paths = ((p, v) for p, v in parts(batch, "") if isinstance(v, Tensor))
        for (path, value), was in zip(paths, before, strict=True):
            if not torch.equal(was, value.detach()):
                seen[f"written input {number}.0 {path}"] = value.detach().clone()
    return seen | at_the_end(case, rank, step.model, space)


def at_the_end(case: Case, rank: int, model: Any, space: Any) -> Seen:
    """Parameters and buffers after all steps; and what a call in eval mode gives."""
    seen = states(model)
    if case.evaluates:
        model.eval()
        torch.manual_seed(seed_of(rank, case.steps, 0))
        with torch.no_grad():
            out = model(**space["batch"](rank, 99))
        seen |= {path: copy.copy(value) for path, value in parts(out, "evaluated")}
        seen |= {f"{k} evaluated": v for k, v in states(model).items() if k.startswith("buffer")}
    return seen
