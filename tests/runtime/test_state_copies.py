"""Copies, other dtypes and devices, all of it under every strategy, hooks."""

import copy
import functools
import io
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from fxshard.errors import StepError
from tests.eager import Net, batch, pair
from tests.fsdp2 import full
from tests.runtime.everywhere import EVERYWHERE, run
from tests.runtime.state_cases import assert_same_values, init_weights, other_values, sgd, step
from tests.runtime.test_module import built, call, compiled
from tests.zoo import MODELS

# -- copies ----------------------------------------------------------------------------------------


def deep_copied(rank: int, world_size: int, name: str) -> None:
    eager, ours = built(name), compiled(name)
    step(ours, eager, name, sgd(ours, eager))
    twin, eager_twin = copy.deepcopy(ours), copy.deepcopy(eager)
    assert twin._fxshard.world is ours._fxshard.world and type(twin) is type(ours)
    assert {id(p) for p in twin.parameters()}.isdisjoint(id(p) for p in ours.parameters())
    optimizers = sgd(twin, eager_twin)
    for _ in range(2):
        step(twin, eager_twin, name, optimizers)
    for mine, other in ((ours, eager), (twin, eager_twin)):
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            assert_close(full(a), b.detach())
        assert_close(dict(mine.named_buffers()), dict(other.named_buffers()))
        assert_close(call(MODELS[name], mine), call(MODELS[name], other))
    if name == "tied":
        assert twin.lm_head.weight is twin.embed.weight
    storages = {
        slot.shards[0].untyped_storage().data_ptr() for slot in twin._fxshard.slots.values()
    }
    assert len(storages) == len(twin._fxshard.units)  # still one flat storage each


@EVERYWHERE
@pytest.mark.parametrize("name", ["tied", "mlp13", "convnet"])
@pytest.mark.sample(2)
def test_deepcopy_is_independent(ranks: Any, where: str, name: str) -> None:
    run(ranks, where, deep_copied, name)


def round_trip(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(rank: int, world_size: int, name: str) -> None:
    eager, ours = built(name), compiled(name)
    step(ours, eager, name, sgd(ours, eager))
    saved = round_trip(ours.state_dict())
    again = compiled(name)
    again.load_state_dict(saved)
    assert_close(call(MODELS[name], again), call(MODELS[name], eager))
    for back in (round_trip(ours), pickle.loads(pickle.dumps(ours))):
        assert type(back) is type(ours) and back._fxshard.world.size == ours._fxshard.world.size
        twin = copy.deepcopy(eager)
        optimizers = sgd(back, twin)
        step(back, twin, name, optimizers)
        for mine, other in zip(back.parameters(), twin.parameters(), strict=True):
            assert_close(full(mine), other.detach())
        if name == "tied":
            assert back.lm_head.weight is back.embed.weight
    assert_close(call(MODELS[name], ours), call(MODELS[name], eager))
    stuck = compiled(name, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
    with pytest.raises(StepError, match=r"option optimizer=.*Save model\.state_dict\(\)"):
        pickle.dumps(stuck)


@EVERYWHERE
@pytest.mark.parametrize("name", ["tied", "mlp13", "convnet"])
@pytest.mark.sample(2)
def test_pickle(ranks: Any, where: str, name: str) -> None:
    run(ranks, where, pickled, name)


def written(rank: int, world_size: int, path: str) -> None:
    torch.save(compiled("mlp13"), f"{path}/{rank}.pt")


def test_unpickling_without_the_process_group(ranks: Any, tmp_path: Any) -> None:
    ranks(2).run(written, str(tmp_path))
    with pytest.raises(StepError, match=r"init_process_group first, with as many ranks"):
        torch.load(tmp_path / "0.pt", weights_only=False)


# -- other dtypes and devices ----------------------------------------------------------------------


def converted(rank: int, world_size: int, name: str, to: str) -> None:
    case, eager, ours = MODELS[name], built(name), compiled(name)
    optimizers = sgd(ours, eager)
    step(ours, eager, name)
    before = dict(ours.named_parameters())
    loss = call(case, ours)  # a graph that holds the parameters
    assert ours.to(torch.float32).to("cpu") is ours
    assert len(ours._fxshard.variants) == 1
    assert all(ours.get_parameter(fqn) is param for fqn, param in before.items())
    loss.backward()
    call(case, eager).backward()
    del loss

    for model in (ours, eager):
        getattr(model, to)()
    dtype = next(eager.parameters()).dtype
    for fqn, param in before.items():
        assert ours.get_parameter(fqn) is param and param.dtype is dtype
        assert param.grad.dtype is dtype
        assert_close(full(param.grad), eager.get_parameter(fqn).grad, rtol=1e-2, atol=1e-3)
    assert [b.dtype for b in ours.buffers()] == [b.dtype for b in eager.buffers()]
    if to == "double":
        step(ours, eager, name, optimizers)
        for mine, other in zip(ours.parameters(), eager.parameters(), strict=True):
            assert_close(full(mine), other.detach(), rtol=1e-6, atol=1e-6)
    elif name == "mlp13":
        (x,), _ = case.batch(0, 0)
        assert_close(ours(x.to(dtype)), eager(x.to(dtype)), rtol=1e-2, atol=1e-2)


@EVERYWHERE
@pytest.mark.parametrize("to", ["double", "bfloat16", "half"])
@pytest.mark.sample(3)
def test_shards_follow_a_conversion(ranks: Any, where: str, to: str) -> None:
    run(ranks, where, converted, "tied", to)
    if to != "double":
        run(ranks, where, converted, "mlp13", to)


def moved_away(rank: int, world_size: int) -> None:
    eager, ours = built("mlp13"), compiled("mlp13")
    with pytest.raises(StepError, match=r"inlet\.weight.*cannot move to the meta.*Delete"):
        ours.to("meta")
    assert_same_values(ours, eager)
    loss = call(MODELS["mlp13"], ours)
    ours.double().float()
    with pytest.raises(RuntimeError):  # torch's: the values of before are gone
        loss.backward()
    assert_close(call(MODELS["mlp13"], ours.double().float()), call(MODELS["mlp13"], eager))


@EVERYWHERE
def test_moving_to_meta_is_refused(ranks: Any, where: str) -> None:
    run(ranks, where, moved_away)


# -- all of it under every strategy ----------------------------------------------------------------


def whole_story(rank: int, world_size: int, options: dict[str, Any]) -> None:
    name = "mlp13"
    if options.get("strategy") == "hybrid_shard" and dist.is_initialized():
        shape = (2, world_size // 2)
        options |= {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shard"))}
    eager, ours = built(name), compiled(name, **options)
    optimizers = sgd(ours, eager)

    def trained() -> None:
        step(ours, eager, name)
        norms = (ours.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1))
        assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mine, other in zip(ours.parameters(), eager.parameters(), strict=True):
            assert_close(full(mine), other.detach())

    trained()
    with ours.summon_full_params(), torch.no_grad():
        for model in (ours, eager):
            for param in model.parameters():
                assert type(param) is nn.Parameter
                param.mul_(1.5)
    trained()
    for model in (ours, eager):
        torch.manual_seed(7)
        model.apply(init_weights)
    trained()
    for model in (ours, eager):
        model.load_state_dict(other_values(name).state_dict())
    assert_same_values(ours, eager)
    trained()
    whole = ours.full_state_dict(rank0_only=False)
    assert all(torch.equal(whole[fqn], full(p)) for fqn, p in ours.named_parameters())
    for again in (copy.deepcopy, round_trip):
        kept = (ours, eager, optimizers)
        ours, eager = again(ours), copy.deepcopy(eager)
        optimizers = sgd(ours, eager)
        trained()
        ours, eager, optimizers = kept
        trained()
    for model in (ours, eager):
        model.bfloat16()
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    for model in (ours, eager):
        model.float()
    trained()


@pytest.mark.parametrize("options", [{"strategy": "no_shard"}, {"ignored": ["head", "blocks.1"]}])
@EVERYWHERE
@pytest.mark.sample(2)
def test_replicated_and_ignored_parameters(ranks: Any, where: str, options: dict[str, Any]) -> None:
    run(ranks, where, whole_story, options)


def test_hybrid(ranks: Any) -> None:
    ranks(4).run(whole_story, {"strategy": "hybrid_shard"})


# -- hooks -----------------------------------------------------------------------------------------


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


class Recorder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


def test_hooks_on_submodules_are_warned_about_by_name(caplog: Any) -> None:
    _, ours = pair(lambda: Net(lambda self, x: self.b(torch.relu(self.a(x)[:, :5]))))
    ours.a.register_forward_hook(doubled)
    ours.b.register_forward_pre_hook(functools.partial(lambda hook, *_: None, Recorder()))
    with caplog.at_level(logging.WARNING, "fxshard"):
        ours(batch())
        ours(batch()[:2])  # traced again, said once
    said = [r.getMessage() for r in caplog.records if "hook" in r.getMessage()]
    assert len(said) == 2
    assert f"forward hook {__name__}.doubled of module 'a'" in said[0]
    assert "forward pre-hook" in said[1] and "module 'b'" in said[1]


def test_tensor_operations_of_hooks_are_part_of_the_program(caplog: Any) -> None:
    eager, ours = pair(lambda: Net(lambda self, x: self.b(torch.relu(self.a(x)[:, :5]))))
    for model in (eager, ours):
        model.a.register_forward_hook(doubled)
        model.b.register_full_backward_hook(lambda module, given, _: (3 * given[0],))
        x = batch().requires_grad_()
        with caplog.at_level(logging.WARNING, "fxshard"):
            model(x).sum().backward()
    assert "backward hook" in caplog.text
    for mine, other in zip(ours.parameters(), eager.parameters(), strict=True):
        assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("place", ["a", ""])
def test_hooks_that_come_and_go_are_traced_once(place: str) -> None:
    eager, ours = pair(lambda: Net(lambda self, x: self.b(torch.relu(self.a(x)[:, :5]))))
    module, others = ours.get_submodule(place), eager.get_submodule(place)

    def multiplying(factor: float) -> Any:
        return lambda module, args, output: factor * output

    for hook in (doubled, multiplying(3.0), doubled, multiplying(4.0), multiplying(3.0)):
        assert_close(ours(batch()), eager(batch()))
        handles = [where.register_forward_hook(hook) for where in (module, others)]
        assert_close(ours(batch()), eager(batch()))
        for handle in handles:
            handle.remove()
        assert_close(ours(batch()), eager(batch()))
    # Without a hook, and with each; those on the model run around its program.
    assert len(ours._fxshard.variants) == (4 if place else 1)


def test_hooks_on_the_model_fire_on_every_call(caplog: Any) -> None:
    _, ours = pair(lambda: Net(lambda self, x: self.a(x)))
    forward, backward = Recorder(), Recorder()
    ours.register_forward_hook(forward)
    ours.register_forward_pre_hook(forward)
    ours.register_full_backward_hook(backward)
    with caplog.at_level(logging.WARNING, "fxshard"):
        for _ in range(3):
            ours(batch()).sum().backward()
    assert (forward.calls, backward.calls) == (6, 3)
    assert len(ours._fxshard.variants) == 1
    assert not [r for r in caplog.records if "hook" in r.getMessage()]
