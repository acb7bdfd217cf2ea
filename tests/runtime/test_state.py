"""The state of a FxshardModule beside that of the plain model: norms, whole parameters, copies."""

import copy
import functools
import io
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

import fxshard
from fxshard.errors import ConfigError, StepError
from fxshard.runtime import state
from tests.eager import Net, batch, pair
from tests.fsdp2 import full
from tests.runtime.test_module import EVERYWHERE, built, call, compiled, run
from tests.zoo import MODELS


def step(ours: nn.Module, eager: nn.Module, name: str, optimizers: Any = ()) -> None:
    """One forward and backward of both, and an optimizer step."""
    for model in (ours, eager):
        call(MODELS[name], model).backward()
    for optimizer in optimizers:
        optimizer.step()


def sgd(*models: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]


def assert_same_values(ours: nn.Module, eager: nn.Module) -> None:
    """Parameters are bitwise those of the plain model; collective."""
    for (name, mine), (other_name, other) in zip(
        ours.named_parameters(), eager.named_parameters(), strict=True
    ):
        assert name == other_name
        assert torch.equal(full(mine), other.detach()), name


# -- the norm of all gradients ---------------------------------------------------------------------

NORMS = [1.0, 2.0, 3.5, 0.5, math.inf, -math.inf, 0.0]


def clipped(rank: int, world_size: int, name: str, p: float) -> None:
    eager, ours = built(name), compiled(name)
    for model in (eager, ours):
        frozen = list(model.parameters())[1]
        frozen.requires_grad_(False)
        call(MODELS[name], model).backward()
        list(model.parameters())[2].grad = None
    want = torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.01, norm_type=p)
    got = ours.clip_grad_norm_(0.01, norm_type=p)
    assert type(got) is Tensor and got.shape == ()
    assert_close(got, want)
    for mine, other in zip(ours.parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None and other.grad is not None:
            assert_close(full(mine.grad), other.grad)


@pytest.mark.parametrize("world_size", [0, 2, 3])
@pytest.mark.parametrize("p", NORMS)
def test_clip_grad_norm(ranks: Any, world_size: int, p: float) -> None:
    for name in ("mlp13", "tied") if p in (2.0, math.inf) else ("mlp13",):
        if world_size:
            ranks(world_size).run(clipped, name, p)
        else:
            clipped(0, 2, name, p)


def not_a_number(rank: int, world_size: int) -> list[float]:
    """Norms of gradients of which one rank's rows hold a NaN; the last one of none."""
    found = []
    for where in (0, 1, None):
        for p in (2.0, math.inf, -math.inf):
            ours = compiled("mlp13")
            call(MODELS["mlp13"], ours).backward()
            if rank == where:
                next(ours.parameters()).grad.to_local().view(-1)[0] = math.nan
            found.append(ours.clip_grad_norm_(1.0, p).item())
    return found


def test_a_norm_of_what_is_no_number_is_none(ranks: Any) -> None:
    for found in ranks(2).run(not_a_number):
        assert all(map(math.isnan, found[:6])) and all(map(math.isfinite, found[6:]))


def agrees_with_torch(rank: int, world_size: int) -> None:
    for p in (1.0, 2.0):
        models = [compiled("mlp13"), compiled("mlp13")]
        for model in models:
            call(MODELS["mlp13"], model).backward()
        got = models[0].clip_grad_norm_(0.01, p)
        want = full(torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.01, p))
        assert torch.equal(got, want)
        for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(full(mine.grad), full(other.grad))


def test_clip_grad_norm_is_bitwise_torch_s(ranks: Any) -> None:
    ranks(2).run(agrees_with_torch)
    ranks(3).run(agrees_with_torch)


def placed(whole: Tensor, mesh: DeviceMesh, placements: list[Any]) -> nn.Parameter:
    param = nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    param.grad = distribute_tensor(3 * whole, mesh, placements, src_data_rank=None)
    return param


def mixed_placements(rank: int, world_size: int, p: float) -> None:
    flat, square = (
        init_device_mesh("cpu", (world_size,)),
        init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")),
    )
    wholes = [torch.randn(5, 3, generator=torch.Generator().manual_seed(i)) for i in range(7)]
    params: list[nn.Parameter] = [
        placed(wholes[0], flat, [Shard(0)]),
        placed(wholes[1], square, [Replicate(), Shard(0)]),
        placed(wholes[2], flat, [Replicate()]),
        placed(wholes[3], square, [Shard(0), Shard(1)]),
        placed(wholes[4], square, [Shard(0), Shard(0)]),
        placed(wholes[5], square["shard"], [Shard(0)]),
        nn.Parameter(wholes[6].clone()),
    ]
    params[-1].grad = 3 * wholes[6]
    plain = [nn.Parameter(whole.clone()) for whole in wholes]
    for param, whole in zip(plain, wholes, strict=True):
        param.grad = 3 * whole
    want = torch.nn.utils.clip_grad_norm_(plain, 1.0, p)
    assert_close(state.clip_grad_norm_(params, 1.0, p), want)
    for param, other in zip(params, plain, strict=True):
        assert_close(full(param.grad), other.grad)


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_clip_grad_norm_counts_each_shard_once(ranks: Any, p: float) -> None:
    ranks(4).run(mixed_placements, p)


def test_clip_grad_norm_of_low_precision_has_its_dtype() -> None:
    param = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    param.grad = torch.full((100,), 0.1, dtype=torch.bfloat16)
    norm = state.clip_grad_norm_([param], 1e9, 2.0)
    assert norm.dtype is torch.bfloat16 and abs(norm.item() - 1) < 0.01
    assert state.clip_grad_norm_([nn.Parameter(torch.ones(1))], 1.0, 2.0) == 0


# -- whole parameters ------------------------------------------------------------------------------


def summoned(rank: int, world_size: int, name: str) -> None:
    eager, ours = built(name), compiled(name)
    optimizers = sgd(ours, eager)
    step(ours, eager, name, optimizers)
    before = dict(ours.named_parameters())
    with ours.summon_full_params(with_grads=True):
        for (fqn, mine), (other_fqn, other) in zip(
            ours.named_parameters(), eager.named_parameters(), strict=True
        ):
            assert fqn == other_fqn and type(mine) is nn.Parameter
            assert ours.get_parameter(fqn) is mine
            assert_close(mine, other)
            assert_close(mine.grad, other.grad)
        if name == "tied":
            assert ours.lm_head.weight is ours.embed.weight
        with pytest.raises(StepError, match=r"forward inside of summon_full_params.*Leave"):
            call(MODELS[name], ours)
        with (
            pytest.raises(StepError, match="summon_full_params inside of summon"),
            ours.summon_full_params(),
        ):
            pass
        for model in (ours, eager):
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.5).add_(
                        torch.arange(len(param)).view(-1, *[1] * (param.dim() - 1))
                    )
                    param.grad.mul_(2)
    after = dict(ours.named_parameters())
    assert all(after[fqn] is param for fqn, param in before.items())
    for mine, other in zip(ours.parameters(), eager.parameters(), strict=True):
        assert_close(full(mine), other.detach())
        assert_close(full(mine.grad), other.grad)
    for optimizer in optimizers:
        optimizer.step()
    assert_close(call(MODELS[name], ours), call(MODELS[name], eager))


@EVERYWHERE
@pytest.mark.parametrize("name", ["tied", "mlp13"])
def test_summon_full_params(ranks: Any, where: str, name: str) -> None:
    run(ranks, where, summoned, name)


def test_summon_full_params_with_empty_shards(ranks: Any) -> None:
    ranks(3).run(summoned, "mlp13")


def discarded(rank: int, world_size: int) -> None:
    eager, ours = built("mlp13"), compiled("mlp13")
    with ours.unshard(writeback=False), torch.no_grad():
        ours.inlet.weight.zero_()
    assert_same_values(ours, eager)
    with ours.unshard(recurse=False):  # the root unit's only
        kinds = {fqn: type(param) for fqn, param in ours.named_parameters()}
        sharded = DTensor if dist.is_initialized() else nn.Parameter
        assert kinds["inlet.weight"] is nn.Parameter
        assert issubclass(kinds["blocks.0.gain"], sharded)
    with (
        pytest.raises(ZeroDivisionError),
        ours.summon_full_params(writeback=False, offload_to_cpu=True, rank0_only=True),
    ):
        whole = type(ours.inlet.weight) is nn.Parameter
        assert whole == (rank == 0 or not dist.is_initialized())
        1 / 0  # noqa: B018
    assert_same_values(ours, eager)
    with pytest.raises(ConfigError, match=r"writeback=True with rank0_only=True"):
        ours.summon_full_params(rank0_only=True).__enter__()
    with pytest.raises(StepError, match=r"'head\.bias' was .*\[9\].*all changes"), ours.unshard():
        ours.inlet.weight.data.zero_()
        ours.head.bias = nn.Parameter(torch.ones(9))
    assert_same_values(ours, eager)
    loss = call(MODELS["mlp13"], ours)
    with pytest.raises(StepError, match="backward inside of"), ours.unshard(writeback=False):
        loss.backward()
    with ours.unshard():
        ours.head.bias = nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
    eager.head.bias.data.fill_(7.0)
    assert_same_values(ours, eager)
    assert not ours.head.bias.requires_grad
    assert_close(call(MODELS["mlp13"], ours), call(MODELS["mlp13"], eager))


@EVERYWHERE
def test_what_summon_full_params_discards_and_refuses(ranks: Any, where: str) -> None:
    run(ranks, where, discarded)


def as_fsdp2_calls_it(rank: int, world_size: int) -> None:
    """`unshard()` and `reshard()` as statements; a forward reshards first."""
    eager, ours = built("mlp13"), compiled("mlp13")
    optimizer_holds = list(ours.parameters())
    handle = ours.unshard(async_op=True)
    handle.wait()
    ours.unshard()  # is unsharded already
    assert all(type(param) is nn.Parameter for param in ours.parameters())
    with torch.no_grad():
        ours.head.bias.fill_(7.0)
    ours.reshard()
    ours.reshard()
    assert all(a is b for a, b in zip(ours.parameters(), optimizer_holds, strict=True))
    eager.head.bias.data.fill_(7.0)
    assert_same_values(ours, eager)
    ours.unshard()
    assert_close(call(MODELS["mlp13"], ours), call(MODELS["mlp13"], eager))
    assert all(a is b for a, b in zip(ours.parameters(), optimizer_holds, strict=True))


@EVERYWHERE
def test_unshard_and_reshard(ranks: Any, where: str) -> None:
    run(ranks, where, as_fsdp2_calls_it)


def broken_tie(rank: int, world_size: int) -> None:
    eager, ours = built("tied"), compiled("tied")
    with pytest.raises(StepError, match=r"'embed\.weight' was not tied"), ours.unshard():
        ours.lm_head.weight = nn.Parameter(torch.ones(64, 32))
    assert ours.lm_head.weight is ours.embed.weight
    assert_same_values(ours, eager)


def test_a_tie_broken_inside(ranks: Any) -> None:
    broken_tie(0, 2)


def init_weights(module: nn.Module) -> None:
    """What users write: by class, with random numbers over whole shapes."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.kaiming_uniform_(module.weight)
    if isinstance(module, type(MODELS["mlp13"].build())):
        nn.init.constant_(module.head.bias, 2.0)  # the root is the user's own module


def applied(rank: int, world_size: int, name: str) -> None:
    eager, ours = built(name), compiled(name)
    for model in (eager, ours):
        torch.manual_seed(7)
        assert model.apply(init_weights) is model
    assert_same_values(ours, eager)
    assert_close(call(MODELS[name], ours), call(MODELS[name], eager))


@EVERYWHERE
@pytest.mark.parametrize("name", ["tied", "mlp13"])
def test_apply(ranks: Any, where: str, name: str) -> None:
    run(ranks, where, applied, name)


# -- state dicts -----------------------------------------------------------------------------------


def other_values(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name].build()


def loads_whole(rank: int, world_size: int, name: str) -> None:
    other = other_values(name)
    for assign in (False, True) if name != "tied" else (False,):
        ours = compiled(name)
        given = other.state_dict()
        kept = dict(given)
        result = ours.load_state_dict(given, assign=assign)
        assert not result.missing_keys and not result.unexpected_keys
        assert all(given[key] is value for key, value in kept.items()), "the caller's dict changed"
        assert_same_values(ours, other)
        assert_close(call(MODELS[name], ours), call(MODELS[name], other))
        ours.load_state_dict(compiled(name).state_dict(), assign=assign)  # sharded ones
        assert_same_values(ours, built(name))
    ours = compiled(name)
    for module, source in zip(ours.children(), other.children(), strict=True):
        module.load_state_dict(source.state_dict())  # a part of the tree
        assert_same_values(module, source)


@EVERYWHERE
@pytest.mark.parametrize("name", ["tied", "mlp13", "convnet"])
def test_load_state_dict_takes_whole_tensors(ranks: Any, where: str, name: str) -> None:
    run(ranks, where, loads_whole, name)


def strictness(rank: int, world_size: int) -> None:
    eager, ours = built("mlp13"), compiled("mlp13")

    def change(**values: Any) -> Callable[[nn.Module], Any]:
        given = {k: v for k, v in other_values("mlp13").state_dict().items() if k != "head.bias"}
        return lambda model: model.load_state_dict(given | values, strict=False)

    for model in (eager, ours):
        result = change(extra=torch.ones(1))(model)
        assert (result.missing_keys, result.unexpected_keys) == (["head.bias"], ["extra"])
        with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
            model.load_state_dict({k: v for k, v in model.state_dict().items() if k != "head.bias"})
        with pytest.raises(RuntimeError, match=r"size mismatch for head\.bias.*\[4\].*\[3\]"):
            change(**{"head.bias": torch.ones(4)})(model)
    assert_same_values(ours, eager)


@EVERYWHERE
def test_load_state_dict_is_as_strict_as_eager(ranks: Any, where: str) -> None:
    run(ranks, where, strictness)


def full_state_dicts(rank: int, world_size: int, name: str) -> None:
    eager, ours = built(name), compiled(name)
    want = eager.state_dict()
    alone = rank == 0 or not dist.is_initialized()
    for cpu_offload, rank0_only in ((True, True), (True, False), (False, True), (False, False)):
        got = ours.full_state_dict(cpu_offload=cpu_offload, rank0_only=rank0_only)
        assert set(got) == (set(want) if alone or not rank0_only else set())
        assert all(type(v) is Tensor and torch.equal(v, want[k]) for k, v in got.items())
    assert list(ours.state_dict()) == list(want)
    assert not dist.is_initialized() or all(
        isinstance(ours.state_dict()[fqn], DTensor) for fqn, _ in eager.named_parameters()
    )


@EVERYWHERE
@pytest.mark.parametrize("name", ["tied", "convnet"])
def test_full_state_dict(ranks: Any, where: str, name: str) -> None:
    run(ranks, where, full_state_dicts, name)


class Counting(nn.Linear):
    """A root with state that is no tensor."""

    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, count: int) -> None:
        self.count = count


def test_hooks_and_extra_state_of_the_root() -> None:
    plain = Counting(5, 6)
    ours = fxshard.compile(plain, world_size=2)
    ours.register_state_dict_post_hook(lambda module, found, prefix, _: found.update(mark=1))
    plain.count = 3
    saved = ours.state_dict()
    assert saved.pop("mark") == 1 and saved["_extra_state"] == 3
    plain.count = 0
    ours.load_state_dict(saved)
    assert plain.count == 3


def names(rank: int, world_size: int, name: str) -> None:
    eager, ours = built(name), compiled(name)
    for duplicates in (True, False):
        for what in ("named_parameters", "named_buffers", "named_modules"):
            mine, other = (
                [fqn for fqn, _ in getattr(model, what)(remove_duplicate=duplicates)]
                for model in (ours, eager)
            )
            assert mine == other


@EVERYWHERE
def test_names_are_the_plain_model_s(ranks: Any, where: str) -> None:
    for name in ("tied", "convnet"):
        run(ranks, where, names, name)


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
def test_shards_follow_a_conversion(ranks: Any, where: str, to: str) -> None:
    run(ranks, where, converted, "tied", to)
    if to != "double":
        run(ranks, where, converted, "mlp13", to)


def moved_away(rank: int, world_size: int) -> None:
    eager, ours = built("mlp13"), compiled("mlp13")
    with pytest.raises(StepError, match=r"inlet\.weight.*cannot move to meta.*device type 'cpu'"):
        ours.to("meta")
    assert_same_values(ours, eager)
    loss = call(MODELS["mlp13"], ours)
    ours.double().float()
    with pytest.raises(RuntimeError):  # torch's: the values of before are gone
        loss.backward()
    assert_close(call(MODELS["mlp13"], ours.double().float()), call(MODELS["mlp13"], eager))


def test_moving_off_the_mesh_is_refused(ranks: Any) -> None:
    ranks(2).run(moved_away)


# -- all of it under every strategy -------------------------------------------------------------


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
    assert "forward hook tests.runtime.test_state.doubled of module 'a'" in said[0]
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
def test_hooks_that_come_and_go_are_traced_anew(place: str) -> None:
    eager, ours = pair(lambda: Net(lambda self, x: self.b(torch.relu(self.a(x)[:, :5]))))
    module, others = ours.get_submodule(place), eager.get_submodule(place)
    for _ in range(2):
        assert_close(ours(batch()), eager(batch()))
        handles = [where.register_forward_hook(doubled) for where in (module, others)]
        assert_close(ours(batch()), eager(batch()))
        for handle in handles:
            handle.remove()
        assert_close(ours(batch()), eager(batch()))
    # Without a hook, with the first, with the second; those on the model run around its program.
    assert len(ours._fxshard.variants) == (3 if place else 1)


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
