"""Training loops as people write them: generators that train a model and yield (name, value).

What a loop yields is what it saw. `LOOPS` has them by name, in the order in which tests run them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils._pytree import tree_leaves
from transformers.utils.generic import ModelOutput

import fxshard
from tests.end_to_end.training_cases import (
    Net,
    Spare,
    Whole,
    batch,
    biases_frozen,
    first_units_frozen,
    grads_of,
    lora,
    loss_of,
    state_of,
    trainable,
    unit_frozen,
    whole_batch,
)
from tests.fsdp2 import full

Seen = Iterator[tuple[str, Any]]


@dataclasses.dataclass(frozen=True)
class Loop:
    """`train(model, rank)` on `build()`, whose children of `blocks` are units."""

    train: Callable[[Any, int], Seen]
    build: Callable[[], nn.Module] = Net


LOOPS: dict[str, Loop] = {}


def loop(build: Callable[[], nn.Module] = Net) -> Callable[..., Any]:
    """Register a loop under its name."""

    def register(train: Callable[[Any, int], Seen]) -> Callable[[Any, int], Seen]:
        LOOPS[train.__name__] = Loop(train, build)
        return train

    return register


def steps(
    model: Any,
    rank: int,
    optimizer: Optimizer,
    after: Callable[[], object] = lambda: None,
    count: int = 3,
) -> Seen:
    """The plain loop; `after` is called after every optimizer step."""
    for step in range(count):
        loss = loss_of(model(batch(rank, step)))
        loss.backward()
        yield f"loss {step}", loss.detach()
        yield f"grads {step}", grads_of(model)
        optimizer.step()
        after()
        optimizer.zero_grad()
    yield "parameters", state_of(model)


def made(name: str, how: str) -> Any:
    """The loop's model: "eager", "fsdp2", "ranks" (fxshard under a process group), "in_process"."""
    torch.manual_seed(0)
    model = LOOPS[name].build()
    if how == "fsdp2":
        for block in model.get_submodule("blocks").children():
            fully_shard(block)
        return fully_shard(model)
    if how == "eager":
        return model
    options: dict[str, Any] = {} if how == "ranks" else {"world_size": 3}
    return fxshard.compile(model, units=["blocks.*"], **options)


def seen(name: str, how: str, rank: int) -> dict[str, Any]:
    model = made(name, how)
    torch.manual_seed(1)
    return dict(LOOPS[name].train(model, rank))


def both(rank: int, world_size: int, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return seen(name, "ranks", rank), seen(name, "fsdp2", rank)


# -- what is trained ------------------------------------------------------------------------------


@loop(unit_frozen)
def frozen_unit(model: Any, rank: int) -> Seen:
    yield from steps(model, rank, AdamW(trainable(model), lr=1e-2))


@loop(first_units_frozen)
def frozen_first_units(model: Any, rank: int) -> Seen:
    yield from steps(model, rank, AdamW(trainable(model), lr=1e-2))


@loop(biases_frozen)
def frozen_inside_units(model: Any, rank: int) -> Seen:
    yield from steps(model, rank, AdamW(model.parameters(), lr=1e-2))


@loop(lora)
def adapters(model: Any, rank: int) -> Seen:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    yield from steps(model, rank, optimizer)
    yield "states", len(optimizer.state)


@loop()
def freezing_and_unfreezing(model: Any, rank: int) -> Seen:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    changes = [(model.blocks[0], False), (model.head, False), (model.blocks[0], True)]
    for step, (module, flag) in enumerate(changes):
        module.requires_grad_(flag)
        for name, value in steps(model, rank, optimizer, count=1):
            yield f"{step} {name}", value


@loop(unit_frozen)
def unfreezing_for_the_first_time(model: Any, rank: int) -> Seen:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for name, value in steps(model, rank, optimizer, count=1):
            yield f"{step} {name}", value
        model.requires_grad_(True)


@loop(Spare)
def unused_parameters(model: Any, rank: int) -> Seen:
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    yield from steps(model, rank, optimizer)
    yield "with a state", [param in optimizer.state for param in model.parameters()]


# -- what comes out and what goes in --------------------------------------------------------------


@dataclasses.dataclass
class Record:
    logits: Tensor
    hidden: Tensor
    extra: Any = None


@dataclasses.dataclass
class Output(ModelOutput):
    logits: Tensor | None = None
    hidden: Tensor | None = None
    states: tuple[Tensor, ...] | None = None


def a_tuple(net: Any, x: Tensor, y: Tensor) -> Any:
    return y, x, None, 3


def a_dict(net: Any, x: Tensor, y: Tensor) -> Any:
    return {"logits": y, "inner": {"hidden": [x, x.detach()], "name": "block"}}


def a_dataclass(net: Any, x: Tensor, y: Tensor) -> Any:
    return Record(y, x, {"kept": (x * 2,)})


def a_model_output(net: Any, x: Tensor, y: Tensor) -> Any:
    return Output(logits=y, states=(x, y.argmax(-1)))


def logits_of(output: Any) -> Tensor:
    if isinstance(output, tuple):
        return output[0]
    return output["logits"] if isinstance(output, dict) else output.logits


def trains_on_part_of_the_output(model: Any, rank: int) -> Seen:
    """The loss reads the logits alone: the other outputs are unused."""
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        output = model(batch(rank, step))
        yield f"type {step}", type(output).__name__
        leaves = tree_leaves(vars(output) if isinstance(output, Record) else output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        yield f"output {step}", [t.detach() for t in tensors]
        yield f"differentiable {step}", [t.requires_grad for t in tensors]
        yield f"others {step}", [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        loss_of(logits_of(output)).backward()
        yield f"grads {step}", grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
    yield "parameters", state_of(model)


for _finish in (a_tuple, a_dict, a_dataclass, a_model_output):
    LOOPS[f"returns_{_finish.__name__}"] = Loop(
        trains_on_part_of_the_output, functools.partial(Net, _finish)
    )


def mixed(
    net: Any, x: Tensor, y: Tensor, *, scale: bool, mode: str, mask: Any, extra: dict[str, Any]
) -> Tensor:
    y = y * 2 if scale else y
    y = y + extra["deep"]["bias"] if mode == "add" else y * extra["deep"]["bias"]
    return y if mask is None else y.masked_fill(mask, 0.0)


@loop(functools.partial(Net, mixed))
def keywords_and_plain_values(model: Any, rank: int) -> Seen:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    mask = torch.tensor([[True], [False], [False], [False]])
    for step, (scale, mode) in enumerate([(True, "add"), (False, "add"), (True, "multiply")]):
        extra = {"deep": {"bias": batch(rank, 7)[:, :3], "unused": None}, "name": "x"}
        y = model(
            x=batch(rank, step), scale=scale, mode=mode, mask=mask if step else None, extra=extra
        )
        yield f"y {step}", y.detach()
        loss_of(y).backward()
        yield f"grads {step}", grads_of(model)
        optimizer.step()
        optimizer.zero_grad()


# -- in which order -------------------------------------------------------------------------------


@loop()
def no_grad_between_steps(model: Any, rank: int) -> Seen:
    def evaluate() -> None:
        with torch.no_grad():
            losses.append(loss_of(model(batch(rank, 9))))

    losses: list[Tensor] = []
    yield from steps(model, rank, AdamW(model.parameters(), lr=1e-2), evaluate)
    yield "evaluations", losses


@loop()
def no_grad_between_forward_and_backward(model: Any, rank: int) -> Seen:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        loss = loss_of(model(batch(rank, step)))
        with torch.no_grad():
            yield f"evaluation {step}", loss_of(model(batch(rank, 9)))
        loss.backward()
        yield f"grads {step}", grads_of(model)
        optimizer.step()
        optimizer.zero_grad()


@loop()
def inference_mode_and_eval(model: Any, rank: int) -> Seen:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    yield from steps(model, rank, optimizer, count=1)
    model.eval()
    with torch.inference_mode():
        yield "evaluation", full(model(batch(rank, 9)))
    model.train()
    for name, value in steps(model, rank, optimizer, count=1):
        yield f"again {name}", value


@loop()
def gradient_accumulation(model: Any, rank: int) -> Seen:
    """Three backwards before an optimizer step; gradients are reduced in each."""
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for micro in range(3):
            (loss_of(model(batch(rank, 10 * step + micro))) / 3).backward()
            yield f"grads {step} {micro}", grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
    yield "parameters", state_of(model)


@loop(Whole)
def two_forwards_then_one_backward(model: Any, rank: int) -> Seen:
    optimizer = SGD(model.parameters(), lr=1.0)
    for step in range(2):
        losses = [model(whole_batch(rank, 2 * step + i)).sum() for i in range(2)]
        (losses[0] + 2 * losses[1]).backward()
        grads = grads_of(model)
        assert any(grad is not None and grad.any() for grad in grads.values())
        yield f"grads {step}", grads
        if not step:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(-1)
        optimizer.zero_grad()


# -- optimizers -----------------------------------------------------------------------------------


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd_foreach": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "sgd_fused": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adamw_loop": lambda model: AdamW(model.parameters(), lr=1e-2, foreach=False),
    "adamw_foreach": lambda model: AdamW(model.parameters(), lr=1e-2, foreach=True, amsgrad=True),
    "adamw_fused": lambda model: AdamW(model.parameters(), lr=1e-2, fused=True),
    "adamw_tensor_lr": lambda model: AdamW(model.parameters(), lr=torch.tensor(1e-2)),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-2),
    "radam": lambda model: torch.optim.RAdam(model.parameters(), lr=1e-2),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.9),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "adafactor_loop": lambda model: torch.optim.Adafactor(
        model.parameters(), lr=1e-2, foreach=False
    ),
    "adafactor_vectors": lambda model: torch.optim.Adafactor(
        [p for p in model.parameters() if p.dim() == 1], lr=1e-2
    ),
    "muon": lambda model: torch.optim.Muon(matrices(model), lr=1e-2),
    "muon_adjusted": lambda model: torch.optim.Muon(
        matrices(model), lr=1e-2, adjust_lr_fn="match_rms_adamw", nesterov=False
    ),
}


def optimizer_loop(which: str) -> Callable[[Any, int], Seen]:
    def train(model: Any, rank: int) -> Seen:
        optimizer = OPTIMIZERS[which](model)
        yield from steps(model, rank, optimizer)
        yield "states", [{k: as_plain(v) for k, v in s.items()} for s in optimizer.state.values()]

    return train


def as_plain(value: Any) -> Any:
    return full(value) if isinstance(value, Tensor) else value


OPTIMIZER_LOOPS = {f"optimizer_{name}": Loop(optimizer_loop(name)) for name in OPTIMIZERS}
LOOPS.update(OPTIMIZER_LOOPS)


@loop()
def muon_beside_adamw(model: Any, rank: int) -> Seen:
    ids = {id(p) for p in matrices(model)}
    others = [p for p in model.parameters() if id(p) not in ids]
    muon, adamw = torch.optim.Muon(matrices(model), lr=1e-2), AdamW(others, lr=1e-2)
    yield from steps(model, rank, muon, lambda: (adamw.step(), adamw.zero_grad()))


@loop()
def parameter_groups_by_name(model: Any, rank: int) -> Seen:
    """Weight decay on matrices alone; the head learns faster."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        decays = not (name.endswith("bias") or ".norm." in name)
        groups.setdefault((decays, name.startswith("head")), []).append(param)
    options = [
        {"params": params, "weight_decay": 0.5 * decays, "lr": 1e-2 * (1 + head)}
        for (decays, head), params in groups.items()
    ]
    assert sorted(len(params) for params in groups.values()) == [1, 1, 4, 10]
    yield from steps(model, rank, AdamW(options))


@loop()
def named_parameter_groups(model: Any, rank: int) -> Seen:
    optimizer = AdamW(model.named_parameters(), lr=1e-2)
    yield "names", optimizer.param_groups[0]["param_names"]
    yield from steps(model, rank, optimizer)


@loop()
def one_cycle(model: Any, rank: int) -> Seen:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=0.5, total_steps=6)
    yield from steps(model, rank, optimizer, scheduler.step, count=5)
    yield "rate", scheduler.get_last_lr()


@loop()
def step_lr(model: Any, rank: int) -> Seen:
    optimizer = AdamW(model.parameters(), lr=1e-1)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    yield from steps(model, rank, optimizer, scheduler.step)
    yield "rate", scheduler.get_last_lr()


@loop()
def clipped_by_value_and_norm(model: Any, rank: int) -> Seen:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        loss_of(model(batch(rank, step))).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        yield f"norm {step}", full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        yield f"grads {step}", grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
    yield "parameters", state_of(model)


@loop()
def optimizer_in_backward(model: Any, rank: int) -> Seen:
    """Each parameter steps, and drops its gradient, as soon as it has it."""
    optimizers = {p: SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
    calls: list[tuple[int, ...]] = []

    def hook(param: Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        optimizers[param].step()
        optimizers[param].zero_grad()
        calls.append(tuple(param.shape))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    for step in range(3):
        loss = loss_of(model(batch(rank, step)))
        loss.backward()
        yield f"loss {step}", loss.detach()
        yield f"grads {step}", grads_of(model)
        yield f"parameters {step}", state_of(model)
    yield "calls", sorted(calls)


@loop()
def closure(model: Any, rank: int) -> Seen:
    optimizer = SGD(model.parameters(), lr=0.1)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(batch(rank)))
        loss.backward()
        return loss

    for step in range(2):
        yield f"loss {step}", optimizer.step(evaluate).detach()
    yield "parameters", state_of(model)


# -- scaling and autocast -------------------------------------------------------------------------


def scaled(scaler: Any, model: Any, rank: int, *, infinite: Iterable[int] = ()) -> Seen:
    """Four steps; rank 1's loss is infinite in those of `infinite`."""
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        loss = loss_of(model(batch(rank, step)))
        if rank == 1 and step in infinite:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        yield f"grads {step}", grads_of(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield f"parameters {step}", state_of(model)
        yield f"scale {step}", scaler.get_scale()


@loop()
def grad_scaler(model: Any, rank: int) -> Seen:
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    yield from scaled(scaler, model, rank)


@loop()
def grad_scaler_with_an_infinite_loss_on_one_rank(model: Any, rank: int) -> Seen:
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    yield from scaled(scaler, model, rank, infinite=[1])


@loop()
def sharded_grad_scaler(model: Any, rank: int) -> Seen:
    kind: Any = ShardedGradScaler if dist.is_initialized() else GradScaler
    scaler = kind("cpu", init_scale=2.0**8, growth_interval=2)
    yield from scaled(scaler, model, rank, infinite=[1])


def infinite_in_one_shard(scaler: Any, model: Any, rank: int) -> Seen:
    """Rank 0 alone finds the infinity: it is in the first row of one gradient."""
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(3):
        scaler.scale(loss_of(model(batch(rank, step)))).backward()
        if rank == 0 and step == 1:
            grad = model.blocks[1].linear.weight.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad)[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield f"parameters {step}", state_of(model)
        yield f"scale {step}", scaler.get_scale()


@loop()
def grad_scaler_with_an_infinity_in_one_shard(model: Any, rank: int) -> Seen:
    yield from infinite_in_one_shard(GradScaler("cpu", init_scale=2.0**8), model, rank)


@loop()
def sharded_grad_scaler_with_an_infinity_in_one_shard(model: Any, rank: int) -> Seen:
    kind: Any = ShardedGradScaler if dist.is_initialized() else GradScaler
    yield from infinite_in_one_shard(kind("cpu", init_scale=2.0**8), model, rank)


@loop()
def grad_scaler_without_unscale(model: Any, rank: int) -> Seen:
    scaler, optimizer = GradScaler("cpu"), SGD(model.parameters(), lr=0.1)
    for step in range(2):
        scaler.scale(loss_of(model(batch(rank, step)))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield f"parameters {step}", state_of(model)


@loop()
def autocast_outside(model: Any, rank: int) -> Seen:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=step < 2):
            y = model(batch(rank, step))
            loss = loss_of(y)
        loss.backward()
        yield f"y {step}", y.detach()
        yield f"grads {step}", grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
    yield "parameters", state_of(model)


class Casts(Net):
    """Autocast inside forward."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@loop(Casts)
def autocast_inside(model: Any, rank: int) -> Seen:
    yield from steps(model, rank, AdamW(model.parameters(), lr=1e-2))
    yield "dtype", model(batch(rank)).dtype
