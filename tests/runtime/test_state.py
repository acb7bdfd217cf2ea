"""The state of a FxshardModule beside that of the plain model: norms, full parameters, copies."""

import math
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
from tests.fsdp2 import full
from tests.runtime.everywhere import EVERYWHERE, run
from tests.runtime.state_cases import assert_same_values, init_weights, other_values, sgd, step
from tests.runtime.test_module import built, call, compiled
from tests.zoo import MODELS

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
@pytest.mark.sample(4)
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


# -- full parameters -------------------------------------------------------------------------------


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
    with (
        pytest.raises(StepError, match="backward inside of"),
        ours.summon_full_params(writeback=False),
    ):
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
@pytest.mark.sample(3)
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
