"""Training loops as people write them, line by line the same under FSDP2 and under fxshard.

A loop is a generator that trains a model and yields what it saw, as (name, value). It runs on 2
gloo ranks under both, and all that it saw has the same bits; and in this process under fxshard and
in plain eager.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves
from transformers.utils.generic import ModelOutput

import fxshard
from fxshard._torch import process_groups
from fxshard.errors import StepError
from fxshard.memory.category import Category
from tests.fsdp2 import full
from tests.oracles import Collective, count_collectives
from tests.ranks import told

Seen = Iterator[tuple[str, Any]]


class Block(nn.Module):
    """(batch, 6) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """(batch, 5) -> (batch, 3); 5 and 3 do not divide by 2. `finish` makes the output."""

    def __init__(self, finish: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.finish = finish

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        y = self.head(x)
        return self.finish(self, x, y, *args, **kwargs) if self.finish else y


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


def batch(rank: int, step: int = 0) -> Tensor:
    """f32[4, 5]."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(y: Tensor) -> Tensor:
    """Cross entropy; smooth, and never zero."""
    return F.cross_entropy(y.float(), torch.arange(len(y)) % y.shape[1])


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else full(p.grad) for n, p in model.named_parameters()}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p) for name, p in model.named_parameters()}


def steps(
    model: Any,
    rank: int,
    optimizer: Optimizer,
    after: Callable[[], object] = lambda: None,
    count: int = 3,
) -> Seen:
    """The plain loop; `after` is called behind every optimizer step."""
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


def unit_frozen() -> nn.Module:
    model = Net()
    model.inlet.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


def first_units_frozen() -> nn.Module:
    model = Net()
    for module in (model.inlet, model.blocks[0], model.blocks[1]):
        module.requires_grad_(False)
    return model


def biases_frozen() -> nn.Module:
    model = Net()
    for name, param in model.named_parameters():
        param.requires_grad_("bias" not in name)
    return model


class LoraLinear(nn.Module):
    """A frozen linear layer and a trainable one of rank 2 beside it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.a, self.b = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


def lora() -> nn.Module:
    """Adapters in every block; everything else is frozen."""
    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.add_module("linear", LoraLinear(6))
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


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


class Spare(Net):
    """One block is never called, one parameter of a called block never read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].spare = nn.Parameter(torch.ones(4))
        self.spare = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[0](self.inlet(x))))


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


class Whole(nn.Module):
    """(batch, 5) -> (batch, 3), linear in each parameter: with small whole numbers everywhere,
    every sum is exact, in whatever order it is taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_((param * 4).round())

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x) * x.sign().detach()
        return self.head(x)


def whole_batch(rank: int, step: int) -> Tensor:
    return (batch(rank, step) * 2).round()


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


# -- all of them ----------------------------------------------------------------------------------

# torch's optimizers that DTensors cannot do: the error of FSDP2, which is ours too.
REFUSED_BY_DTENSOR = {
    "optimizer_sgd_fused": "_fused_sgd_.default does not have a sharding strategy",
}
# Its norms are those of a rank's rows under FSDP2, for vectors without an error.
ADAFACTOR = ("optimizer_adafactor", "optimizer_adafactor_loop", "optimizer_adafactor_vectors")


@pytest.mark.parametrize(
    "name", [name for name in LOOPS if name not in (*REFUSED_BY_DTENSOR, *ADAFACTOR)]
)
@pytest.mark.sample(12)
def test_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    for ours, theirs in ranks(2).run(both, name):
        assert_same(ours, theirs)


def refused(rank: int, world_size: int, name: str) -> list[str]:
    errors = []
    for how in ("ranks", "fsdp2"):
        with pytest.raises((NotImplementedError, RuntimeError)) as caught:
            seen(name, how, rank)
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
    return errors


@pytest.mark.parametrize("name", REFUSED_BY_DTENSOR)
def test_what_dtensor_cannot_do_is_refused_as_under_fsdp2(ranks: Any, name: str) -> None:
    for ours, theirs in ranks(2).run(refused, name):
        assert ours == theirs
        assert REFUSED_BY_DTENSOR[name] in theirs


def adafactor(rank: int, world_size: int, name: str) -> str:
    return told(lambda: seen(name, "ranks", rank))


def adafactor_beside_eager(rank: int, world_size: int) -> float:
    """How far FSDP2's biases are from eager's on the joined batch, after a step.

    On a mesh of their own: DTensors on that of a compiled model give the numbers of one process.
    """
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("control",))
    models = [nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)) for _ in range(2)]
    for model in models:
        for number, param in enumerate(model.parameters()):
            nn.init.normal_(param, generator=torch.Generator().manual_seed(number))
    sharded, eager = fully_shard(models[0], mesh=mesh), models[1]
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for model, mine in ((sharded, rows[2 * rank : 2 * rank + 2]), (eager, rows)):
        biases = [p for p in model.parameters() if p.dim() == 1]
        optimizer = torch.optim.Adafactor(biases, lr=0.1)
        model(mine).square().mean().backward()
        optimizer.step()
    pairs = zip(sharded.parameters(), eager.parameters(), strict=True)
    return max(float((full(mine.detach()) - other.detach()).abs().max()) for mine, other in pairs)


def test_adafactor_under_fsdp2_is_not_eagers(ranks: Any) -> None:
    assert min(ranks(2).run(adafactor_beside_eager)) > 1e-3


@pytest.mark.parametrize("name", ADAFACTOR)
def test_adafactor_is_refused_on_ranks(ranks: Any, name: str) -> None:
    for found in ranks(2).run(adafactor, name):
        assert found.startswith("StepError: torch.optim.Adafactor scales each step by norms")


@pytest.mark.parametrize(
    "name",
    [n for n in LOOPS if n not in OPTIMIZER_LOOPS or n in (*REFUSED_BY_DTENSOR, *ADAFACTOR)],
)
def test_in_process_as_in_eager(name: str) -> None:
    """Parameters are plain tensors here: of the optimizers, those that DTensors cannot do."""
    assert_same(seen(name, "in_process", 0), seen(name, "eager", 0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    [
        "grad_scaler_with_an_infinite_loss_on_one_rank",
        "sharded_grad_scaler",
        "grad_scaler_with_an_infinity_in_one_shard",
        "sharded_grad_scaler_with_an_infinity_in_one_shard",
    ],
)
def test_an_infinity_on_one_rank_skips_the_step_on_both(ranks: Any, name: str) -> None:
    for ours, _ in ranks(2).run(both, name):
        assert_same(ours["parameters 1"], ours["parameters 0"])
        assert (ours["scale 0"], ours["scale 1"]) == (2.0**8, 2.0**7)
        for step in (1, 2):
            before, after = (ours[f"parameters {k}"]["head.weight"] for k in (step - 1, step))
            assert torch.equal(before, after) == (step == 1)


def assert_same(ours: Any, theirs: Any, where: str = "", rtol: float = 0, atol: float = 0) -> None:
    """Equal trees of containers, tensors and plain values; without tolerances, bit by bit."""
    assert type(ours) is type(theirs), where
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where} {key}", rtol, atol)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where} {i}", rtol, atol)
    elif not isinstance(theirs, Tensor):
        assert ours == theirs, where
    elif rtol:
        assert_close(
            ours, theirs, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    else:
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), where
        views = [t.contiguous().unsqueeze(-1).view(torch.uint8) for t in (ours, theirs)]
        assert torch.equal(*views), f"{where}: not bitwise equal"


# -- gradients asked for by hand ------------------------------------------------------------------


def asked(model: Any, params: list[nn.Parameter]) -> list[Tensor | None]:
    """Of a batch that all ranks share, so that their average is what one process gets."""
    grads = torch.autograd.grad(loss_of(model(batch(0))), params, allow_unused=True)
    assert all(param.grad is None for param in model.parameters())
    return [None if grad is None else full(grad) for grad in grads]


def asks(rank: int, world_size: int, how: str) -> None:
    ours, eager = made("unused_parameters", how), made("unused_parameters", "eager")
    every = [list(model.parameters()) for model in (ours, eager)]
    some = [[model.head.bias, model.blocks[0].spare, model.inlet.weight] for model in (ours, eager)]
    for mine, theirs in (every, some):
        got, want = asked(ours, mine), asked(eager, theirs)
        assert any(grad is None for grad in want) and any(grad is not None for grad in want)
        assert_same(got, want, rtol=1e-6, atol=1e-7)
    for model, params in zip((ours, eager), some, strict=True):
        loss_of(model(batch(0))).backward(inputs=params[::2])
    assert_same(grads_of(ours), grads_of(eager), rtol=1e-6, atol=1e-7)


def test_autograd_grad_and_backward_of_some_parameters(ranks: Any) -> None:
    asks(0, 1, "in_process")
    ranks(2).run(asks, "ranks")


def backward_twice(rank: int, world_size: int) -> None:
    model = made("gradient_accumulation", "ranks")
    loss = loss_of(model(batch(rank)))
    loss.backward(retain_graph=True)
    with pytest.raises(StepError, match="backward was called twice on one forward"):
        loss.backward()
    loss_of(model(batch(rank))).backward()


def test_backward_twice_is_refused_on_all_ranks(ranks: Any) -> None:
    ranks(2).run(backward_twice)


# -- counted by hand ------------------------------------------------------------------------------

# Bytes, for 2 ranks. A block has 6 + 6 (norm), 36 + 6 (linear) numbers; the root 30 + 6 (inlet) and
# 24 + 4 (head: 3 rows are padded to 4). With adapters a block has 12 + 12 numbers more.
# Backward reads norms (weight and bias) and matrices that have something trainable below them.
BLOCK, ROOT = 4 * 54, 4 * 64
COUNTS: dict[Callable[[], nn.Module], dict[str, list[int]]] = {
    Net: {
        "forward": [BLOCK, BLOCK, BLOCK, ROOT],
        "backward": [4 * 48, 4 * 48, 4 * 48, 4 * 24],
        "reduced": [BLOCK, BLOCK, BLOCK, ROOT],
    },
    unit_frozen: {
        "forward": [BLOCK, BLOCK, BLOCK, ROOT],
        "backward": [4 * 48, 4 * 48, 4 * 48, 4 * 24],
        "reduced": [BLOCK, BLOCK, 4 * 28],
    },
    first_units_frozen: {
        "forward": [BLOCK, BLOCK, BLOCK, ROOT],
        "backward": [4 * 48, 4 * 24],
        "reduced": [BLOCK, 4 * 28],
    },
    biases_frozen: {
        "forward": [BLOCK, BLOCK, BLOCK, ROOT],
        "backward": [4 * 48, 4 * 48, 4 * 48, 4 * 24],
        "reduced": [4 * 42, 4 * 42, 4 * 42, 4 * 54],
    },
    lora: {
        "forward": [BLOCK + 4 * 24] * 3 + [ROOT],
        "backward": [4 * 12, 4 * 72, 4 * 72, 4 * 24],  # nothing is trainable below block 0's `a`
        "reduced": [4 * 24, 4 * 24, 4 * 24],
    },
}
# Alive at most, of gradients: one block, for what is reduced is a copy; and of the root what is
# made before the blocks and waits for the inlet (the head's, not padded yet). Of what is sent: the
# copy of a unit, and beside the root's the head, padded to be copied into it.
UNSHARDED_GRADS = {
    Net: 4 * 21 + BLOCK,
    unit_frozen: BLOCK,
    first_units_frozen: BLOCK,
    biases_frozen: 4 * 18 + 4 * 42,
    lora: 4 * 24,
}
SENT = {
    Net: ROOT + 4 * 28,
    unit_frozen: 2 * 4 * 28,
    first_units_frozen: 2 * 4 * 28,
    biases_frozen: 4 * 54 + 4 * 24,
    lora: 4 * 24,
}
FROZEN = [build for build in COUNTS if build is not Net]


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def sizes(calls: Iterable[Collective], kind: str) -> list[int]:
    return sorted(call.nbytes for call in calls if call.kind == kind)


@pytest.mark.parametrize("build", COUNTS)
def test_collectives_of_frozen_parameters(build: Callable[[], nn.Module]) -> None:
    with process_groups.fake_process_group(0, 2):
        model = fxshard.compile(built(build), units=["blocks.*"])
        with count_collectives() as forward:
            loss = loss_of(model(batch(0)))
        with count_collectives() as backward:
            loss.backward()
    want = COUNTS[build]
    assert sizes(forward.calls, "all_gather") == sorted(want["forward"])
    assert sizes(backward.calls, "all_gather") == sorted(want["backward"])
    assert sizes(backward.calls, "reduce_scatter") == sorted(want["reduced"])
    assert forward.count() == len(want["forward"])
    assert backward.count() == len(want["backward"]) + len(want["reduced"])
    for param in model.parameters():
        assert (param.grad is not None) == param.requires_grad


@pytest.mark.parametrize("build", COUNTS)
def test_memory_of_frozen_parameters(build: Callable[[], nn.Module]) -> None:
    model = built(build)
    options: Any = {"world_size": 2, "units": ["blocks.*"], "optimizer": AdamW}
    report = fxshard.plan(model, (batch(0),), **options).memory
    forward, backward, optimizer, _ = report.phases()
    sharded = sum(COUNTS[build]["reduced"]) // 2
    count = len(trainable(model))
    column = list(Category).index
    assert backward.after[-1, column(Category.SHARDED_GRAD)] == sharded
    assert backward.during[:, column(Category.SHARDED_GRAD)].max() == sharded
    assert optimizer.after[-1, column(Category.OPT_STATE)] == 2 * unpadded(model) + 4 * count
    assert not forward.during[:, column(Category.UNSHARDED_GRAD)].any()
    assert backward.during[:, column(Category.UNSHARDED_GRAD)].max() == UNSHARDED_GRADS[build]
    assert backward.during[:, column(Category.REDUCE_SCATTER)].max() == SENT[build]


def unpadded(model: nn.Module) -> int:
    """Bytes of rank 0's rows of what is trained: it has the upper ceil(n / 2)."""
    return sum(4 * len(p[: math.ceil(len(p) / 2)].flatten()) for p in trainable(model))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("build", FROZEN)
def test_validate_frozen_parameters(build: Callable[[], nn.Module], world_size: int) -> None:
    options: Any = {"world_size": world_size, "units": ["blocks.*"], "optimizer": AdamW}
    result = fxshard.validate(built(build), (batch(0),), **options)
    assert result.max_abs_difference == 0, result.table(only_different=True)


def test_a_flag_changed_between_steps_changes_what_is_reduced() -> None:
    with process_groups.fake_process_group(0, 2):
        model = fxshard.compile(built(Net), units=["blocks.*"])
        reduced = []
        for flag in (True, False, True):
            model.blocks[1].requires_grad_(flag)
            loss = loss_of(model(batch(0)))
            with count_collectives() as seen_now:
                loss.backward()
            reduced.append(sizes(seen_now.calls, "reduce_scatter"))
    assert reduced == [[BLOCK] * 3 + [ROOT], [BLOCK] * 2 + [ROOT], [BLOCK] * 3 + [ROOT]]


def accumulates(rank: int, world_size: int) -> list[list[int]]:
    found = []
    for how in ("ranks", "fsdp2"):
        model = made("gradient_accumulation", how)
        with count_collectives() as seen_now:
            for micro in range(3):
                loss_of(model(batch(rank, micro))).backward()
        found.append(sizes(seen_now.calls, "reduce_scatter"))
    return found


def test_accumulation_reduces_every_unit_in_every_backward(ranks: Any) -> None:
    for ours, theirs in ranks(2).run(accumulates):
        assert len(theirs) == 3 * 4
        assert ours == [BLOCK] * 9 + [ROOT] * 3
