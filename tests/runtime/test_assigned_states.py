"""``load_state_dict(assign=True)`` of sharded models, beside FSDP2 and eager PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing import assert_close

import fxshard
from fxshard.runtime.gathering import GatheringTensor
from tests.fsdp2 import full
from tests.ranks import told
from tests.runtime.init_cases import Stack, assert_equal, on_meta, seeded, values


def tied(seed: int = 0) -> Any:
    return seeded(lambda: Stack(tied=True), seed)


def in_units(model: Any, fully_shard: Callable[..., Any] = fxshard.fully_shard, **how: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def compiled(model: Any) -> Any:
    return fxshard.compile(model, units=["layers.*"])


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(17, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def step(model: Any, optimizer: torch.optim.Optimizer, number: int, ranks: list[int]) -> None:
    each = [model(tokens(rank, number)).square().mean() for rank in ranks]
    torch.stack(each).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded_state(model: Any, whole: dict[str, Tensor]) -> dict[str, Any]:
    """`whole` as DTensors like those of the model, without communication."""
    state = model.state_dict()
    mesh = next(iter(state.values())).device_mesh
    placements = next(iter(state.values())).placements
    return {
        name: distribute_tensor(value, mesh, placements, src_data_rank=None)
        for name, value in whole.items()
    }


# -- it is what it is in one process ---------------------------------------------------------------


def assigned(rank: int, world_size: int, how: str) -> None:
    """Before the first call and after it; the optimizer is made after loading."""
    kinds = {"whole": False, "sharded": True, "some": True, "meta": True, "offloaded": True}
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if how == "offloaded" else {}
    if how == "meta":
        ours = in_units(on_meta(lambda: Stack(tied=True)))
        theirs = in_units(on_meta(lambda: Stack(tied=True)), fsdp.fully_shard)
    elif how == "compiled":
        ours, theirs = compiled(tied()), in_units(tied(), fsdp.fully_shard)
    else:
        ours = in_units(tied(), **offload)
        theirs = in_units(tied(), fsdp.fully_shard, **offload)
    alone = tied()
    for round_, seed in enumerate([1, 2]):
        whole = dict(tied(seed).state_dict())
        state = sharded_state(ours, whole) if kinds.get(how, True) else dict(whole)
        others = sharded_state(theirs, whole)
        if how == "some" or (how == "whole" and round_):  # the head has it by its tie
            del state["head.weight"], others["head.weight"], state["layers.1.linear.bias"]
            whole["layers.1.linear.bias"] = full(ours.layers[1].linear.bias)
            others["layers.1.linear.bias"] = sharded_state(theirs, whole)["layers.1.linear.bias"]
            missing = ours.load_state_dict(state, strict=False, assign=True).missing_keys
            assert set(missing) == {"head.weight", "layers.1.linear.bias"}
        else:
            ours.load_state_dict(state, assign=True)
        theirs.load_state_dict(others, strict=False, assign=True)
        alone.load_state_dict(whole)
        assert ours.head.weight is ours.embed.weight
        assert_equal(values(ours), values(alone))
        assert all(type(param) is GatheringTensor for param in ours.parameters())
        assert_close(ours.layers[0](torch.ones(3, 13)), alone.layers[0](torch.ones(3, 13)))
        models = (ours, theirs, alone)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
        for number in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                own = list(range(world_size)) if model is alone else [rank]
                step(model, optimizer, number, own)
        for fqn, param in alone.named_parameters():
            mine, other = full(ours.get_parameter(fqn)), full(theirs.get_parameter(fqn))
            assert_close(mine, param.detach(), rtol=1e-4, atol=1e-5)
            assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["whole", "sharded", "some", "meta", "offloaded", "compiled"])
@pytest.mark.sample(2)
def test_an_assigned_state_trains_as_eager_and_fsdp2(ranks: Any, how: str) -> None:
    ranks(2).run(assigned, how)


def test_in_one_process() -> None:
    ours: Any = fxshard.compile(tied(), units=["layers.*"], world_size=2)
    alone = tied(1)
    state = {name: value.clone() for name, value in alone.state_dict().items()}
    del state["head.weight"]
    ours.load_state_dict(state, strict=False, assign=True)
    assert ours.head.weight is ours.embed.weight
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, alone)]
    for number in range(2):
        for model, optimizer in zip((ours, alone), optimizers, strict=True):
            step(model, optimizer, number, [0])
    for fqn, param in alone.named_parameters():
        assert_close(ours.get_parameter(fqn), param)


# -- who held the parameters of before -------------------------------------------------------------


def alias_and_stale(rank: int, world_size: int) -> list[str]:
    """The state shares memory with the model; an optimizer of before would train nothing."""
    ours = in_units(tied())
    before = torch.optim.SGD(ours.parameters(), lr=0.1)
    state = sharded_state(ours, dict(tied(1).state_dict()))
    other: Any = in_units(tied(2))
    kept = dict(other.state_dict(keep_vars=True))  # parameters of another model stay its own
    ours.load_state_dict(state, assign=True)
    with torch.no_grad():
        state["layers.0.linear.bias"].fill_(3.0)
    assert torch.equal(full(ours.layers[0].linear.bias), torch.full((13,), 3.0))
    ours(tokens(rank, 0)).sum().backward()
    found = [told(before.step)]
    ours.load_state_dict(kept, assign=True)
    with torch.no_grad():
        ours.layers[0].linear.bias.fill_(5.0)
    assert torch.equal(full(other.layers[0].linear.bias), tied(2).layers[0].linear.bias)
    assert isinstance(other.embed.weight, DTensor)
    other(tokens(rank, 0)).sum().backward()
    return found


def test_the_state_shares_memory_and_older_optimizers_are_refused(ranks: Any) -> None:
    for (said,) in ranks(2).run(alias_and_stale):
        assert "this SGD holds parameter 'embed.weight' as it was before" in said


def untied(rank: int, world_size: int) -> list[str]:
    ours = in_units(tied())
    state = {name: value.clone() for name, value in tied(1).state_dict().items()}
    state["head.weight"] = state["head.weight"] + 1
    before = values(ours)
    found = [told(lambda: ours.load_state_dict(state, assign=True))]
    assert_equal(values(ours), before)
    other = {name: value.bfloat16() for name, value in tied(1).state_dict().items()}
    ours.load_state_dict(other, assign=True)
    found.append(told(lambda: ours(tokens(rank, 0))))
    return found


def test_what_would_untie_or_change_the_dtype_is_refused_by_name(ranks: Any) -> None:
    for said in ranks(2).run(untied):
        assert said[0].startswith("StepError: load_state_dict(assign=True): 'embed.weight' and")
        assert "'head.weight' are one parameter of this model" in said[0]
        assert "'embed.weight'" in said[1] and "bfloat16" in said[1]


def plain_tied(rank: int, world_size: int) -> None:
    """A wrapper around the model, whose `load_state_dict` is torch's own."""
    ours = in_units(tied())
    around = nn.ModuleDict({"model": ours})
    whole = {f"model.{name}": value for name, value in tied(1).state_dict().items()}
    around.load_state_dict(whole, assign=True)
    assert ours.head.weight is ours.embed.weight
    assert_equal(values(ours), values(tied(1)))
    whole["model.head.weight"] = whole["model.head.weight"] + 1
    assert "'model.head.weight' are one" in told(lambda: around.load_state_dict(whole, assign=True))


def test_through_a_wrapper(ranks: Any) -> None:
    ranks(2).run(plain_tied)
