"""torch's test_fsdp_use_orig_params.py: parameters with their own names, groups and writes."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing import assert_close

from tests.fsdp2 import full
from tests.peers.fsdp1.models import Transformer
from tests.peers.fsdp1.shared import (
    FULL,
    GRAD_OP,
    STRATEGIES,
    compiled,
    ddp,
    grads_of,
    loss_of,
    plain,
    same,
    same_grads,
    sgd,
)
from tests.ranks import told

EACH_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: each.name)
# The gradient of an attention's key bias is zero but for rounding; Adam would divide it by itself.
EPS = 1e-4
PREFETCHES = (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST)


# -- groups of parameters --------------------------------------------------------------------------


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights, biases, all else; each with hyperparameters of its own."""
    made: list[dict[str, Any]] = [
        {"params": [], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [], "weight_decay": 0.01, "lr": 1e-3},
        {"params": []},
    ]
    for name, param in model.named_parameters():
        made[0 if "weight" in name else 1 if "bias" in name else 2]["params"].append(param)
    return made


def optimizer_of(model: nn.Module, kind: Any, foreach: bool) -> torch.optim.Optimizer:
    return kind(groups(model), lr=5e-3, foreach=foreach)


def trains_as_ddp(pair: Any, optimizers: Any, set_to_none: bool) -> None:
    for i in range(10):
        losses = []
        for model, optimizer in zip(pair, optimizers, strict=True):
            if i % 2 == 0:
                optimizer.zero_grad(set_to_none=set_to_none)
            losses.append(loss_of(model))
            if i % 2 == 1:
                optimizer.zero_grad(set_to_none=set_to_none)
            losses[-1].backward()
            optimizer.step()
        assert_close(losses[1], losses[0])
    same(pair[1], pair[0])


def in_groups(
    rank: int,
    world_size: int,
    kind: Any,
    foreach: bool,
    set_to_none: bool,
    options: dict[str, Any],
) -> None:
    pair = ddp(Transformer()), compiled(Transformer(), **options)
    optimizers = [optimizer_of(model, kind, foreach) for model in pair]
    trains_as_ddp(pair, optimizers, set_to_none)


@pytest.mark.sample(2)
@EACH_STRATEGY
@pytest.mark.parametrize(
    ("foreach", "set_to_none", "prefetch"),
    list(itertools.product((False, True), (False, True), PREFETCHES)),
)
def test_hyperparameters_of_groups(
    ranks: Any, foreach: bool, set_to_none: bool, prefetch: Any, strategy: Any
) -> None:
    options = {"strategy": strategy, "backward_prefetch": prefetch}
    ranks(2).run(in_groups, torch.optim.AdamW, foreach, set_to_none, options)


@EACH_STRATEGY
def test_hyperparameters_of_groups_offloaded(ranks: Any, strategy: Any) -> None:
    options = {"strategy": strategy, "backward_prefetch": "pre", "offload": CPUOffload(True)}
    ranks(2).run(in_groups, torch.optim.Adam, False, False, options)


def made_before(rank: int, world_size: int) -> str:
    model = Transformer()
    optimizer = optimizer_of(model, torch.optim.AdamW, False)
    model = compiled(model)

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        loss_of(model)

    return told(step)


def test_optimizer_made_before_compile(ranks: Any) -> None:
    """Its parameters are not the model's any more."""
    for said in ranks(2).run(made_before):
        assert "holds parameter 'embed_tokens.weight' as it was before it was sharded" in said


def frozen_group(rank: int, world_size: int, foreach: bool, strategy: Any) -> None:
    """Frozen after the optimizer is made."""
    pair = (
        ddp(Transformer(), find_unused_parameters=True),
        compiled(Transformer(), strategy=strategy),
    )
    optimizers = [optimizer_of(model, torch.optim.Adam, foreach) for model in pair]
    for model in pair:
        for name, param in model.named_parameters():
            if "bias" in name:
                param.requires_grad_(False)
    trains_as_ddp(pair, optimizers, False)


@pytest.mark.sample(2)
@EACH_STRATEGY
@pytest.mark.parametrize("foreach", [False, True])
def test_group_that_is_frozen(ranks: Any, foreach: bool, strategy: Any) -> None:
    ranks(2).run(frozen_group, foreach, strategy)


def two_optimizers(rank: int, world_size: int, strategy: Any) -> None:
    """One sets its gradients to None: Adam counts a step for zeros, and none for None."""
    reference = ddp(Transformer(), find_unused_parameters=True)
    pair = reference, compiled(Transformer(), strategy=strategy)
    kinds = (
        functools.partial(torch.optim.Adam, lr=5e-3, eps=EPS),
        functools.partial(torch.optim.AdamW, lr=1e-2, eps=EPS),
    )
    optimizers = [
        [kind(group["params"]) for kind, group in zip(kinds, groups(model)[:2], strict=True)]
        for model in pair
    ]

    def finish(losses: list[Tensor]) -> None:
        for loss, each in zip(losses, optimizers, strict=True):
            loss.backward()
            for optimizer in each:
                optimizer.step()
        assert_close(losses[1], losses[0])
        same(pair[1], pair[0])

    finish([loss_of(model) for model in pair])
    for weights, _ in optimizers:
        weights.zero_grad(set_to_none=True)
    losses = [loss_of(model) for model in pair]
    same_grads(pair[1], pair[0])
    assert any(grad is None for grad in grads_of(pair[1]).values())
    finish(losses)
    finish([loss_of(model) for model in pair])


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP], ids=["full_shard", "shard_grad_op"])
def test_two_optimizers(ranks: Any, strategy: Any) -> None:
    ranks(2).run(two_optimizers, strategy)


def updated_by_hand(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """The next forward gathers what was written: parameters are as DDP's."""
    pair = ddp(Transformer()), compiled(Transformer(), **options)
    for _ in range(3):
        losses = [loss_of(model) for model in pair]
        for model, loss in zip(pair, losses, strict=True):
            loss.backward()
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.01 * param.grad
                    param.grad = None
        assert_close(losses[1], losses[0])
    same(pair[1], pair[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("offload", [False, True], ids=["stays", "offload"])
@pytest.mark.parametrize(
    "prefetch", [{}, {"backward_prefetch": "pre", "forward_prefetch": True}], ids=["plain", "ahead"]
)
def test_updated_by_hand(ranks: Any, prefetch: dict[str, Any], offload: bool) -> None:
    ranks(2).run(updated_by_hand, prefetch | {"offload": CPUOffload(offload)})


def in_dynamo(rank: int, world_size: int, strategy: Any) -> None:
    """Ten steps of Adam on `torch.compile` of what fxshard compiled: losses are DDP's."""
    pair = ddp(Transformer()), compiled(Transformer(), strategy=strategy)
    calls = [pair[0], torch.compile(pair[1], backend="eager")]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2, eps=EPS) for model in pair]
    inputs = plain(pair[0]).get_input()
    for _ in range(10):
        losses = [call(*inputs).sum() for call in calls]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(losses[1], losses[0])


@pytest.mark.sample(2)
@EACH_STRATEGY
def test_torch_compile_around_it(ranks: Any, strategy: Any) -> None:
    ranks(2).run(in_dynamo, strategy)


# -- two forwards, one backward --------------------------------------------------------------------


def two_forwards(rank: int, world_size: int, between: bool, options: dict[str, Any]) -> None:
    """With `between`, all parameters are looked at between the two."""
    pair = ddp(Transformer()), compiled(Transformer(), **options)
    optimizers = [sgd(model) for model in pair]
    for _ in range(3):
        first = pair[1].get_input()
        second = tuple(x + 1 for x in first)
        outputs = []
        for model, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            outs = [model(*first)]
            if between and model is pair[1]:
                with model.summon_full_params():
                    assert not isinstance(next(model.parameters()), DTensor)
            outs.append(model(*second))
            sum(outs).sum().backward()
            optimizer.step()
            outputs.append([out.detach() for out in outs])
        assert_close(outputs[1], outputs[0])
    same(pair[1], pair[0])


@pytest.mark.sample(2)
@EACH_STRATEGY
@pytest.mark.parametrize("offload", [False, True], ids=["stays", "offload"])
@pytest.mark.parametrize("between", [False, True], ids=["plain", "summon_between"])
def test_two_forwards(ranks: Any, between: bool, offload: bool, strategy: Any) -> None:
    options = {"strategy": strategy, "offload": CPUOffload(offload)}
    ranks(2).run(two_forwards, between, options)


# -- parameters as they are seen outside -----------------------------------------------------------


class Model(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.lin1, self.lin2 = nn.Linear(5, 5, bias=bias), nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin2(torch.relu(self.lin1(x)))

    def get_input(self) -> tuple[Tensor, ...]:
        return (torch.randn(2, 5),)

    def get_loss(self, inputs: Any, output: Tensor) -> Tensor:
        return output.sum()


UNITS = ["lin1", "lin2"]


def accessed(rank: int, world_size: int, strategy: Any) -> None:
    """After forward, before backward, parameters are this rank's shards of the plain ones."""
    pair = ddp(Model(bias=False)), compiled(Model(bias=False), units=UNITS, strategy=strategy)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in pair]
    torch.manual_seed(rank)

    def check() -> None:
        named = plain(pair[0]).named_parameters()
        for (name, want), (other, got) in zip(named, pair[1].named_parameters(), strict=True):
            assert name == other
            assert isinstance(got, DTensor)
            placed = distribute_tensor(want.detach(), got.device_mesh, got.placements)
            assert_close(got.to_local(), placed.to_local())

    for _ in range(2):
        inputs = pair[1].get_input()
        losses = [loss_of(model, inputs) for model in pair]
        check()
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
        check()


@EACH_STRATEGY
def test_parameters_between_forward_and_backward(ranks: Any, strategy: Any) -> None:
    ranks(2).run(accessed, strategy)


def twos(like: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.ones_like(like) * 2)


def parameter_written(rank: int, world_size: int, layer: str, data: bool) -> None:
    """`.data` changed; or another parameter, which FSDP1 copies from, and ours takes as it is."""
    reference, model = Model(), compiled(Model(), units=[])
    for each in (reference, model):
        linear = getattr(each, layer)
        if data:
            linear.weight.data = twos(linear.weight)
        else:
            linear.weight = twos(linear.weight)
    same(model, reference)
    inputs = model.get_input()
    assert_close(model(*inputs), reference(*inputs))


@pytest.mark.parametrize("data", [True, False], ids=["data", "parameter"])
@pytest.mark.parametrize("layer", UNITS)
def test_parameter_written(ranks: Any, layer: str, data: bool) -> None:
    ranks(2).run(parameter_written, layer, data)


def gradient_written(
    rank: int, world_size: int, layer: str, in_place: bool, set_to_none: bool
) -> None:
    """`.grad` exchanged or written in place. (A DTensor's `.data = ...` is lost, in FSDP2 too.)"""
    pair = ddp(Model()), compiled(Model(), units=[])
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in pair]
    torch.manual_seed(rank)

    def backward_and(write: bool) -> None:
        inputs = pair[1].get_input()
        for model, optimizer in zip(pair, optimizers, strict=True):
            loss_of(model, inputs).backward()
            weight = getattr(plain(model), layer).weight
            if write:
                made = None if set_to_none else torch.ones_like(weight.detach()) * 2
                if in_place:
                    weight.grad.copy_(made)
                else:
                    weight.grad = made
            optimizer.step()
        same(pair[1], pair[0])

    backward_and(write=True)
    backward_and(write=False)  # adds to what was written


@pytest.mark.parametrize(
    ("in_place", "set_to_none"),
    [(True, False), (False, False), (False, True)],
    ids=["in_place", "gradient", "none"],
)
@pytest.mark.parametrize("layer", UNITS)
def test_gradient_written(ranks: Any, layer: str, in_place: bool, set_to_none: bool) -> None:
    ranks(2).run(gradient_written, layer, in_place, set_to_none)


def data_of_a_gradient(rank: int, world_size: int) -> None:
    """`grad.data = ...` is lost by torch's DTensor: FSDP2's gradients stay as they were."""
    theirs, ours = Model(), compiled(Model(), units=[])
    fully_shard(theirs)
    for model in (theirs, ours):
        loss_of(model).backward()
        grad: Any = model.lin1.weight.grad
        before = full(grad)
        grad.data = grad + 1
        kept = model is ours
        assert torch.equal(full(model.lin1.weight.grad), before + 1 if kept else before)


def test_data_of_a_gradient_is_lost_by_torch_itself(ranks: Any) -> None:
    ranks(2).run(data_of_a_gradient)


def exchange(layer: nn.Linear) -> None:
    """A weight one larger along each dimension, and a gradient like it."""
    shape = [size + 1 for size in layer.weight.shape]
    layer.weight = nn.Parameter(torch.randn(shape))
    layer.weight.grad = torch.randn(shape)


def summoned(model: Any) -> None:
    with model.summon_full_params():
        pass


USES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model(*model.get_input()),
    "summon_full_params": summoned,
    "unshard": lambda model: model.unshard(),
    "apply": lambda model: model.apply(lambda module: None),
    "full_state_dict": lambda model: model.full_state_dict(),
    "clip_grad_norm_": lambda model: model.clip_grad_norm_(1.0),
}


def of_another_shape(rank: int, world_size: int, use: str, layers: list[str]) -> str:
    """One parameter is exchanged, that of this rank's layer."""
    model = compiled(Model(), units=[])
    loss_of(model).backward()
    if layers[rank]:
        exchange(getattr(model, layers[rank]))
    return told(lambda: USES[use](model))


def said_of(layer: str) -> str:
    return f"parameter '{layer}.weight' is another kind of tensor than compile made it"


@pytest.mark.parametrize("layers", [["lin1", "lin1"], ["lin1", "lin2"]], ids=["same", "different"])
@pytest.mark.parametrize("use", USES)
def test_parameter_of_another_shape(ranks: Any, use: str, layers: list[str]) -> None:
    """On each rank, of one layer or of another one: each says its own, and nobody gathers."""
    for layer, said in zip(layers, ranks(2).run(of_another_shape, use, layers), strict=True):
        assert said_of(layer) in said


@pytest.mark.parametrize("use", [use for use in USES if use != "forward"])
def test_parameter_of_another_shape_on_one_rank(ranks: Any, use: str) -> None:
    """The other one does not wait for it."""
    first, second = ranks(2).run(of_another_shape, use, ["lin1", ""])
    assert said_of("lin1") in first
    assert "RankMismatchError" in second
    assert f"rank 0 has 'refuses: StepError: {said_of('lin1')}" in second


def data_before_backward(rank: int, world_size: int, strategy: Any) -> str:
    """Kept unsharded, backward reads what forward read; gathered again, it would not."""
    reference, model = Model(), compiled(Model(), units=UNITS, strategy=strategy)
    inputs = model.get_input()
    loss, want = loss_of(model, inputs), loss_of(reference, inputs)
    model.lin2.weight.data = twos(model.lin2.weight)
    said = told(loss.backward)
    want.backward()
    if strategy is GRAD_OP:
        assert_close(full(model.lin1.weight.grad), average_of(reference.lin1.weight.grad))
    return said


def average_of(grad: Tensor) -> Tensor:
    dist.all_reduce(grad)
    return grad / dist.get_world_size()


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP], ids=["full_shard", "shard_grad_op"])
def test_data_written_before_backward(ranks: Any, strategy: Any) -> None:
    for said in ranks(2).run(data_before_backward, strategy):
        if strategy is FULL:
            assert "'lin2.weight' was changed in place between a forward and its backward" in said
        else:
            assert said == "no error"


def parameter_before_backward(rank: int, world_size: int, strategy: Any) -> None:
    """As in one process: the old parameter has the gradient, the new one has none."""
    reference, model = Model(), compiled(Model(), units=UNITS, strategy=strategy)
    inputs = model.get_input()
    pair = reference, model
    losses = [loss_of(each, inputs) for each in pair]
    old = [each.lin2.weight for each in pair]
    for each in pair:
        each.lin2.weight = twos(each.lin2.weight)
    for loss in losses:
        loss.backward()
    assert_close(full(old[1].grad), average_of(old[0].grad))
    assert_close(full(model.lin1.weight.grad), average_of(reference.lin1.weight.grad))
    assert model.lin2.weight.grad is None


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP], ids=["full_shard", "shard_grad_op"])
def test_parameter_exchanged_before_backward(ranks: Any, strategy: Any) -> None:
    ranks(2).run(parameter_before_backward, strategy)


def in_turns(rank: int, world_size: int, full_in_eval: bool) -> None:
    """Forwards without backward, evaluation, unsharding and loading, in fp16, in turns."""
    policy = MixedPrecision(param_dtype=torch.float16)
    model = compiled(
        Model(),
        units=UNITS,
        strategy=GRAD_OP,
        mixed_precision=policy,
        full_precision_in_eval=full_in_eval,
    )
    inputs = model.get_input()
    before = {name: full(p) for name, p in model.named_parameters()}
    want = model(*inputs)
    assert want.dtype == torch.float16
    with model.summon_full_params():
        assert model.lin1.weight.dtype == torch.float32
    assert torch.equal(model(*inputs), want)
    model.eval()
    assert model(*inputs).dtype == (torch.float32 if full_in_eval else torch.float16)
    model.train()
    loss_of(model, inputs).backward()
    model.eval()
    model(*inputs)
    model.load_state_dict(model.state_dict())
    loss_of(model, inputs).backward()
    assert_close({name: full(p) for name, p in model.named_parameters()}, before)


@pytest.mark.parametrize("full_in_eval", [False, True], ids=["fp16", "fp32_in_eval"])
def test_forwards_in_turns(ranks: Any, full_in_eval: bool) -> None:
    ranks(2).run(in_turns, full_in_eval)


class SeesNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        shapes = {name: list(param.shape) for name, param in self.named_parameters()}
        assert shapes == {"lin.weight": [5, 5], "lin.bias": [5]}
        return self.lin(x)


def named_in_forward(rank: int, world_size: int) -> None:
    compiled(SeesNames(), units=[])(torch.randn(2, 5))


def test_names_in_forward(ranks: Any) -> None:
    ranks(2).run(named_in_forward)


# -- no_sync, frozen parameters --------------------------------------------------------------------


def accumulated(rank: int, world_size: int, strategy: Any) -> None:
    torch.manual_seed(0)
    model = compiled(nn.Linear(7, 1, bias=False), units=[], strategy=strategy)
    torch.manual_seed(rank)
    x, grad = torch.randn(2, 7), torch.randn(2, 1)
    model(x).backward(grad)
    want = full(model.weight.grad)
    model.zero_grad(set_to_none=True)
    with model.no_sync():
        model(x).backward(grad)
    model(x).backward(grad)
    assert_close(full(model.weight.grad), 2 * want)


@EACH_STRATEGY
def test_no_sync(ranks: Any, strategy: Any) -> None:
    ranks(2).run(accumulated, strategy)


def accumulated_in_fp16(rank: int, world_size: int, strategy: Any) -> None:
    """Sums are not in `.grad` until they are reduced; then they are in the parameters' dtype."""
    policy = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = compiled(nn.Linear(3, 3), units=[], strategy=strategy, mixed_precision=policy)
    x = torch.randn(2, 3)
    with model.no_sync():
        for _ in range(2):
            model(x).sum().backward()
            assert all(param.grad is None for param in model.parameters())
    model(x).sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}


@EACH_STRATEGY
def test_no_sync_in_fp16(ranks: Any, strategy: Any) -> None:
    ranks(2).run(accumulated_in_fp16, strategy)


def partly_frozen(rank: int, world_size: int) -> list[bool]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in model:
        layer.bias.requires_grad_(False)
    return [param.requires_grad for param in compiled(model, units=[]).parameters()]


def test_frozen_and_trained_in_one_unit(ranks: Any) -> None:
    assert ranks(2).run(partly_frozen) == [[True, False, True, False]] * 2
