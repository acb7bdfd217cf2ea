"""What `compile` returns is the user's own object: its class, names, methods, hooks and copies."""

import copy
import importlib
import io
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import fxshard
from fxshard.errors import ConfigError, StepError
from fxshard.runtime.module import public_names
from tests.fsdp2 import full
from tests.runtime.object_cases import EVERYWHERE, Agent, agent, compiled, run, tokens

# -- the same object -------------------------------------------------------------------------------


def same_object(rank: int, world_size: int) -> None:
    model = agent()
    before = {key: value for key, value in vars(model).items()}
    names = [name for name, _ in model.named_modules()]
    fqns = [name for name, _ in model.named_parameters()]
    ours = compiled(model)
    assert ours is model and isinstance(model, (Agent, fxshard.FxshardModule))
    assert type(model).__name__ == "FxshardAgent"
    assert vars(model).keys() - before.keys() == {"_fxshard"}
    assert all(vars(model)[key] is value for key, value in before.items())
    assert (model.config, model.world, model.units) == ({"mine": 1}, "earth", 12)
    assert (model.add(1), model.reset(), model.kind) == (13, "reset", "one")
    assert [name for name, _ in model.named_modules()] == names
    assert [name for name, _ in model.named_parameters()] == fqns == [*model.state_dict()]
    assert type(model.block) is nn.Sequential and len(model.block) == 4
    x, _ = tokens(rank, world_size)
    assert_close(model(x), agent()(x))
    assert model.training_step(x).grad_fn.name() == "MeanBackward0"
    assert len(model._fxshard.variants) == 1  # self(...) ran the same program


@EVERYWHERE
def test_the_object_stays_the_users(ranks: Any, where: str) -> None:
    run(ranks, where, same_object)


def test_a_sequential_stays_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    ours = fxshard.compile(model, world_size=2)
    assert ours is model and len(ours) == 2 and ours[1] is model[1]
    assert [type(m) for m in ours] == [nn.Linear, nn.ReLU]


def test_what_was_no_module_gets_one() -> None:
    model = nn.Linear(4, 2)
    exported = torch.export.export(model, (torch.ones(3, 4),))
    ours = fxshard.compile(exported, world_size=2)
    assert isinstance(ours, fxshard.FxshardModule)
    assert_close(ours(torch.ones(3, 4)), model(torch.ones(3, 4)))


def copies(rank: int, world_size: int) -> None:
    ours, (x, _) = compiled(agent()), tokens(rank, world_size)
    ours(x)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(twin) is type(ours) and twin.config == ours.config
        assert_close(twin(x), ours(x))
        assert_close(twin.value(x), ours.value(x))
        assert twin._fxshard is not ours._fxshard
        with torch.no_grad():
            for param in twin.parameters():
                param.zero_()
        assert not torch.equal(full(twin.scale), full(ours.scale))
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    plain = agent()
    plain.load_state_dict({k: full(v) for k, v in torch.load(file, weights_only=True).items()})
    assert_close(plain(x), ours(x))


@EVERYWHERE
def test_copies(ranks: Any, where: str) -> None:
    run(ranks, where, copies)


def shallow(rank: int, world_size: int) -> None:
    """A refused copy.copy leaves what runs as it was."""
    x, _ = tokens(rank, world_size)
    options: dict[str, Any] = {} if dist.is_initialized() else {"world_size": 2}
    for made_by in ("compile", "shard"):
        ours = getattr(fxshard, made_by)(agent(), **options)
        loss = ours(x).sum()
        with pytest.raises(StepError, match=r"copy\.copy of a .*Agent.* copy\.deepcopy"):
            copy.copy(ours)
        loss.backward()
        eager = agent()
        eager(tokens(rank, world_size)[1]).sum().div(world_size).backward()
        assert_close(full(ours.scale.grad), eager.scale.grad)
    with pytest.raises(StepError, match=r"copy\.copy of a Linear that fxshard\.shard sharded"):
        copy.copy(ours.head)


@EVERYWHERE
def test_a_shallow_copy_is_refused(ranks: Any, where: str) -> None:
    run(ranks, where, shallow)


def test_hooks_on_the_model_run_on_every_call_also_those_from_before() -> None:
    model, seen = nn.Linear(4, 2), []
    model.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    ours = fxshard.compile(model, world_size=2)
    ours.register_forward_hook(lambda module, args, out: 2 * out)
    x = torch.ones(3, 4)
    for _ in range(2):
        assert_close(ours(x), 2 * nn.functional.linear(x, model.weight, model.bias))
    assert seen == ["pre", "pre"] and len(ours._fxshard.variants) == 1


def test_weight_norm_on_the_model_itself_is_part_of_the_program() -> None:
    torch.manual_seed(0)
    with pytest.warns(FutureWarning):
        model = torch.nn.utils.weight_norm(nn.Linear(4, 2))
    eager = nn.Linear(4, 2)
    ours = fxshard.compile(model, world_size=2)
    for _ in range(2):
        x = torch.randn(3, 4)
        with torch.no_grad():
            v = full(ours.weight_v)
            eager.weight.copy_(full(ours.weight_g) * v / v.norm(dim=1, keepdim=True))
            eager.bias.copy_(full(ours.bias))
            assert_close(ours(x), eager(x))
            ours.weight_g.mul_(2)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["parameter", "buffer", "submodule", "attribute", "class"])
def test_a_name_of_ours_is_refused(place: str) -> None:
    class Named(nn.Linear):
        pass

    if place == "class":
        Named.memory = property(lambda self: 1)  # type: ignore[attr-defined]
    model = Named(4, 2)
    if place == "parameter":
        model.memory = nn.Parameter(torch.ones(2))
    elif place == "buffer":
        model.register_buffer("memory", torch.ones(2))
    elif place == "submodule":
        model.memory = nn.Linear(2, 2)
    elif place == "attribute":
        model.memory = 3
    with pytest.raises(ConfigError, match=rf"{place}.*'memory'.*Rename"):
        fxshard.compile(model, world_size=2)
    assert type(model) is Named and "_fxshard" not in vars(model)


def test_public_names_are_few_and_written_down() -> None:
    from tests.end_to_end.test_coming_from_fsdp import DOCUMENT

    text = DOCUMENT.read_text()
    assert all(f"`{name}`" in text or f"{name}(" in text for name in public_names())
    taken = {"config", "value", "add", "world", "units", "kind", "reset", "module", "original"}
    assert not taken & set(public_names())


def test_a_model_is_compiled_once() -> None:
    ours = fxshard.compile(agent(), world_size=2)
    with pytest.raises(ConfigError, match="sharded already"):
        fxshard.compile(ours, world_size=2)
    with pytest.raises(ConfigError, match=r"submodule '0' was given to fxshard\.compile before"):
        fxshard.compile(nn.Sequential(ours, nn.Linear(3, 3)), world_size=2)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.flag = nn.Linear(4, 4), True
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    "options",
    [
        {"args": (torch.ones(2, 4),)},
        {"units": ["nothing"]},
        {"optimizer": torch.optim.LBFGS, "optimizer_in_backward": True},
        {"world_size": 0},
        {"strategy": "hybrid_shard"},
    ],
    ids=str,
)
def test_a_failed_compile_leaves_the_model_as_it_was(options: dict[str, Any]) -> None:
    model = Fails().eval()
    before = [(m, type(m), dict(vars(m)), dict(m._parameters)) for m in model.modules()]
    with pytest.raises(fxshard.errors.FxshardError):
        fxshard.compile(model, **{"world_size": 2} | options)
    for module, kind, attributes, parameters in before:
        assert type(module) is kind and vars(module) == attributes
        assert all(module._parameters[name] is p for name, p in parameters.items())
        assert not module._state_dict_hooks and not module._load_state_dict_pre_hooks
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.a(torch.ones(2, 4)).sum().backward()
    optimizer.step()


# -- outside of the program ------------------------------------------------------------------------


def methods(rank: int, world_size: int, made_by: str) -> None:
    options: dict[str, Any] = {} if dist.is_initialized() else {"world_size": 2}
    ours, eager = getattr(fxshard, made_by)(agent(), **options), agent()
    mine, everyone = tokens(rank, world_size)
    for name in ("value", "recurrent", "__call__"):
        for model in (ours, eager):
            model.zero_grad()
        assert_close(getattr(ours, name)(mine), getattr(eager, name)(mine))
        getattr(ours, name)(mine).square().mean().backward()
        getattr(eager, name)(everyone).square().mean().backward()
        for (fqn, param), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
            assert (param.grad is None) == (theirs.grad is None), (name, fqn)
            if theirs.grad is not None:
                assert_close(full(param.grad), theirs.grad, msg=f"{name} {fqn}")
        with torch.no_grad():
            assert_close(getattr(ours, name)(mine), getattr(eager, name)(mine))
    hidden = torch.ones(2, 5)
    assert_close(ours.block(hidden), eager.block(hidden))
    with torch.inference_mode():
        assert_close(ours.block(hidden), eager.block(hidden))
        assert_close(hidden @ ours.head.weight.t(), hidden @ eager.head.weight.t())
    edge = torch.autograd.graph.get_gradient_edge(ours.scale)
    assert edge.node.name() == "torch::autograd::AccumulateGrad"
    penalty = sum(p.pow(2).sum() for p in ours.parameters())
    assert_close(penalty, sum(p.pow(2).sum() for p in eager.parameters()))
    with torch.no_grad():
        for model in (ours, eager):
            model.scale.copy_(torch.arange(5.0))
            model.head.weight.mul_(2)
    assert_close(ours(mine), eager(mine))
    assert_close(ours.head(hidden), eager.head(hidden))


@EVERYWHERE
@pytest.mark.parametrize("made_by", ["compile", "shard"])
@pytest.mark.sample(2)
def test_methods_and_submodules_read_whole_parameters(ranks: Any, where: str, made_by: str) -> None:
    run(ranks, where, methods, made_by)


def optimizers(rank: int, world_size: int) -> None:
    ours = compiled(agent())
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
    ours(tokens(rank, world_size)[0]).sum().backward()
    optimizer.step()
    for state in optimizer.state_dict()["state"].values():
        assert type(state["exp_avg"]) in (DTensor, Tensor)


@EVERYWHERE
def test_optimizer_states_are_plain_dtensors(ranks: Any, where: str) -> None:
    run(ranks, where, optimizers)


def mixed(rank: int, world_size: int) -> None:
    """Outside of the program the dtype is the stored one."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    ours = compiled(agent(), mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x, _ = tokens(rank, world_size)
    assert ours(x).dtype is torch.bfloat16
    assert_close(ours.value(x), agent().value(x))


@EVERYWHERE
def test_outside_of_the_program_the_dtype_is_the_stored_one(ranks: Any, where: str) -> None:
    run(ranks, where, mixed)


@pytest.mark.parametrize(
    "change",
    [lambda w: w.data.t(), lambda w: w.data[:1].expand(5, 5), lambda w: w.data.flip(0)],
    ids=["transposed", "one row", "flipped"],
)
@pytest.mark.parametrize("early", [True, False])
def test_data_that_lies_in_the_parameter_itself(early: bool, change: Callable[..., Any]) -> None:
    eager, x = nn.Linear(5, 5), torch.randn(3, 5)
    ours = compiled(copy.deepcopy(eager))
    if not early:
        ours(x)
    for model in (eager, ours):
        model.weight.data = change(model.weight)
        model(x).square().sum().backward()
    assert_close(ours(x), eager(x))
    assert_close(ours.weight.grad, eager.weight.grad)
    ours.weight.data = ours.weight.data[:2]
    with pytest.raises(StepError, match="'weight' is another kind of tensor"):
        ours(x)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def reduced_otherwise(rank: int, world_size: int) -> None:
    """What the options do with gradients would not be done with those of other readers."""
    x, _ = tokens(rank, world_size)
    stepped = compiled(agent(), optimizer=sgd, optimizer_in_backward=True)
    hooked = compiled(agent())
    hooked.register_comm_hook(None, lambda state, *tensors: None)
    for ours, said in ((stepped, "optimizer_in_backward"), (hooked, "register_comm_hook")):
        with pytest.raises(StepError, match=rf"outside of the model's forward.*{said}.*no_grad"):
            ours.value(x).sum().backward()
        assert all(p.grad is None for p in ours.parameters())
        with torch.no_grad():
            assert_close(ours.value(x), agent().value(x))


def test_gradients_that_would_go_another_way_are_refused(ranks: Any) -> None:
    ranks(2).run(reduced_otherwise)


def test_in_one_process_the_next_call_refuses_them() -> None:
    ours = compiled(agent(), optimizer=sgd, optimizer_in_backward=True)
    x, _ = tokens(0, 1)
    ours(x).sum().backward()
    ours.value(x).sum().backward()
    with pytest.raises(StepError, match=r"'scale' has a gradient from outside of .*forward"):
        ours(x)
    ours.zero_grad()
    ours(x).sum().backward()


def gradients_of_inputs(rank: int, world_size: int) -> None:
    """``torch.autograd.grad`` leaves parameters alone, in eager; so must a program, or refuse."""
    ours, x = compiled(nn.Linear(3, 2)), torch.ones(1, 3, requires_grad=True)
    (found,) = torch.autograd.grad(ours(x).sum(), x)
    assert found.shape == x.shape and all(p.grad is None for p in ours.parameters())
    stepped = compiled(nn.Linear(3, 2), optimizer=sgd, optimizer_in_backward=True)
    before = [full(p.detach()) for p in stepped.parameters()]
    with ours.no_sync():
        for model in (ours, stepped):
            for backward in (
                lambda loss: torch.autograd.grad(loss, x),
                lambda loss: loss.backward(inputs=[x]),
            ):
                with pytest.raises(StepError, match=r"leaves the gradients of parameters alone"):
                    backward(model(x).sum())
        ours(x).sum().backward()
    ours(x).sum().backward()
    assert_close([full(p.detach()) for p in stepped.parameters()], before)
    assert_close(full(ours.weight.grad), torch.full((2, 3), 2.0))
    stepped(x).sum().backward()
    assert not torch.equal(full(stepped.bias.detach()), before[1])


@EVERYWHERE
def test_gradients_of_inputs_alone(ranks: Any, where: str) -> None:
    run(ranks, where, gradients_of_inputs)


def wrapped(rank: int, world_size: int) -> None:
    for ours in (compiled(agent()), fxshard.shard(agent())):
        with pytest.raises(ConfigError, match="Leave DistributedDataParallel out"):
            DistributedDataParallel(ours)


def test_ddp_around_it_is_refused(ranks: Any) -> None:
    ranks(2).run(wrapped)


# -- what torch does by the class of a parameter ---------------------------------------------------


def stepped_by_foreach(rank: int, world_size: int) -> Counter[str]:
    """Operators of a step and of clipping, where the CPU has kernels for many tensors at once."""
    model = compiled(agent())
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(rank, world_size)[0]).sum().backward()
    optim = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes the name
    with (
        mock.patch.object(optim, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]),
        torch.profiler.profile() as seen,
    ):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return Counter({event.key: event.count for event in seen.key_averages()})


def test_optimizers_step_all_parameters_at_once_as_on_a_gpu(ranks: Any) -> None:
    for found in ranks(2).run(stepped_by_foreach):
        assert found["aten::_foreach_addcdiv_"] and found["aten::_foreach_norm"]
