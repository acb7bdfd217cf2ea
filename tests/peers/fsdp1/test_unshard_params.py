"""torch's test_fsdp_unshard_params.py: `summon_full_params`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from tests.fsdp2 import full
from tests.peers.fsdp1.models import Nested, Transformer
from tests.peers.fsdp1.shared import FULL, NO_SHARD, STRATEGIES, compiled, ddp, plain
from tests.ranks import told

HALF_COMPUTE = MixedPrecision(param_dtype=torch.float16)
POLICIES = pytest.mark.parametrize("policy", [HALF_COMPUTE, None], ids=["fp16", "fp32"])
OFFLOAD = pytest.mark.parametrize("offload", [CPUOffload(False), CPUOffload(True)], ids=str)
FLAG = [False, True]


def two_layers(**options: Any) -> Any:
    """The first a unit of its own."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 5, bias=False), nn.Linear(5, 3, bias=False)
    return compiled(nn.Sequential(*layers), units=["0"], **options)


def local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


# -- what is written inside ------------------------------------------------------------------------


def written(
    rank: int, world_size: int, writeback: bool, outer: bool, options: dict[str, Any]
) -> None:
    model = two_layers(**options)
    param = model[1 if outer else 0].weight
    with torch.no_grad():
        local(param).fill_(rank + 2)
    with model.summon_full_params(writeback=writeback), torch.no_grad():
        for each in model.parameters():
            each.zero_()
    assert model[1 if outer else 0].weight is param
    assert (local(param) == (0 if writeback else rank + 2)).all()
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("world_size", [1, 2])
@POLICIES
@OFFLOAD
@pytest.mark.parametrize("outer", FLAG, ids=["inner", "outer"])
@pytest.mark.parametrize("writeback", FLAG, ids=["discard", "writeback"])
def test_writes_persist_if_they_are_to(
    ranks: Any, writeback: bool, outer: bool, offload: Any, policy: Any, world_size: int
) -> None:
    options = {"offload": offload, "mixed_precision": policy}
    ranks(world_size).run(written, writeback, outer, options)


def single(rank: int, world_size: int) -> None:
    """A row for the first rank only: the other has nothing to write to."""
    model = compiled(nn.Linear(1, 1, bias=False), units=[])
    local(model.weight).data.fill_(rank + 2)
    with model.summon_full_params():
        assert model.weight.numel() == 1
        assert model.weight.item() == 2
        with torch.no_grad():
            model.weight.zero_()
    assert local(model.weight).flatten().tolist() == ([] if rank else [0])


def test_single_element(ranks: Any) -> None:
    ranks(2).run(single)


# -- what is seen inside ---------------------------------------------------------------------------


def seen(
    rank: int, world_size: int, rank0_only: bool, offload_to_cpu: bool, options: dict[str, Any]
) -> None:
    """The parameters of the plain model, in its dtypes; on other ranks shards, if so asked."""
    model = compiled(Nested(), **options)
    flags = {"rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu}
    with model.summon_full_params(writeback=not rank0_only, **flags):
        pairs = zip(model.named_parameters(), Nested().named_parameters(), strict=True)
        for (name, param), (other, want) in pairs:
            assert name == other
            assert isinstance(param, nn.Parameter)
            if rank0_only and rank:
                assert isinstance(param, DTensor)
            else:
                assert not isinstance(param, DTensor)
                assert torch.equal(param, want)
                assert (param.dtype, param.device) == (want.dtype, want.device)


@pytest.mark.parametrize("world_size", [1, 2])
@POLICIES
@OFFLOAD
@pytest.mark.parametrize("offload_to_cpu", FLAG, ids=["stays", "to_cpu"])
@pytest.mark.parametrize("rank0_only", FLAG, ids=["all", "rank0"])
def test_parameters_are_full(
    ranks: Any,
    rank0_only: bool,
    offload_to_cpu: bool,
    offload: Any,
    policy: Any,
    world_size: int,
) -> None:
    options = {"offload": offload, "mixed_precision": policy}
    ranks(world_size).run(seen, rank0_only, offload_to_cpu, options)


def between(
    rank: int, world_size: int, rank0_only: bool, offload_to_cpu: bool, policy: Any
) -> None:
    """Between forward and backward, and afterwards: the step is the same, and all is sharded."""
    model, other = two_layers(mixed_precision=policy), two_layers(mixed_precision=policy)
    torch.manual_seed(rank)
    x = torch.randn(4, 5)
    for each in (model, other):
        out = each(x)
        for _ in range(2):
            if each is model:
                flags = {"rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu}
                with each.summon_full_params(writeback=not rank0_only, **flags):
                    pass
            if out is not None:
                out.sum().backward()
            out = None
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert len(local(mine)) < len(mine)
        assert torch.equal(local(mine.grad), local(theirs.grad))


@POLICIES
@pytest.mark.parametrize("offload_to_cpu", FLAG, ids=["stays", "to_cpu"])
@pytest.mark.parametrize("rank0_only", FLAG, ids=["all", "rank0"])
def test_between_forward_and_backward(
    ranks: Any, rank0_only: bool, offload_to_cpu: bool, policy: Any
) -> None:
    ranks(2).run(between, rank0_only, offload_to_cpu, policy)


def of_the_root(rank: int, world_size: int, recurse: bool, policy: Any) -> None:
    model = two_layers(mixed_precision=policy)
    with model.summon_full_params(recurse=recurse):
        assert isinstance(model[0].weight, DTensor) != recurse
        assert not isinstance(model[1].weight, DTensor)


@POLICIES
@pytest.mark.parametrize("recurse", FLAG, ids=["root", "recurse"])
def test_recurse(ranks: Any, recurse: bool, policy: Any) -> None:
    ranks(2).run(of_the_root, recurse, policy)


def named(rank: int, world_size: int, prefix: str, recurse: bool) -> None:
    reference, module = Nested(), Nested()
    for each in (reference, module):
        each.register_buffer("buffer", torch.ones(1))
    model = compiled(module)
    with model.summon_full_params():
        for names in ("named_parameters", "named_buffers"):
            got = dict(getattr(model, names)(prefix=prefix, recurse=recurse))
            want = dict(getattr(reference, names)(prefix=prefix, recurse=recurse))
            assert list(got) == list(want)
            assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("prefix", ["", "test_prefix"])
@pytest.mark.parametrize("recurse", FLAG)
def test_names(ranks: Any, prefix: str, recurse: bool) -> None:
    ranks(2).run(named, prefix, recurse)


# -- gradients -------------------------------------------------------------------------------------


def doubled(
    rank: int, world_size: int, writeback: bool, offload_to_cpu: bool, strategy: Any
) -> None:
    """Gradients are DDP's, and what is written to them persists, or does not."""
    reference, model = ddp(Transformer()), compiled(Transformer(), strategy=strategy)

    def forward() -> tuple[Tensor, Tensor]:
        inputs = model.get_input()
        return reference(*inputs).sum(), model(*inputs).sum()

    def check() -> None:
        before = {name: full(p.grad) for name, p in model.named_parameters()}
        flags = {"writeback": writeback, "offload_to_cpu": offload_to_cpu}
        with model.summon_full_params(with_grads=True, **flags):
            pairs = zip(plain(reference).named_parameters(), model.named_parameters(), strict=True)
            for (name, want), (other, param) in pairs:
                assert name == other
                assert_close(param.grad, want.grad)
                assert torch.count_nonzero(param.grad) > 0
                param.grad *= 2
        for name, param in model.named_parameters():
            assert_close(full(param.grad), before[name] * (2 if writeback else 1))
        if writeback:
            for param in reference.parameters():
                param.grad *= 2

    for loss in forward():
        loss.backward()
    check()
    losses = forward()
    check()
    for loss in losses:
        loss.backward()
    check()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("offload_to_cpu", FLAG, ids=["stays", "to_cpu"])
@pytest.mark.parametrize("writeback", FLAG, ids=["discard", "writeback"])
def test_gradients_are_full(
    ranks: Any, writeback: bool, offload_to_cpu: bool, strategy: Any
) -> None:
    """FSDP1 has them not with `offload_to_cpu`."""
    ranks(2).run(doubled, writeback, offload_to_cpu, strategy)


def none_yet(rank: int, world_size: int, strategy: Any) -> None:
    model = compiled(Transformer(), strategy=strategy)
    with model.summon_full_params(with_grads=True):
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_gradients_that_are_none(ranks: Any, strategy: Any) -> None:
    ranks(2).run(none_yet, strategy)


# -- errors ----------------------------------------------------------------------------------------


class SummonsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(5))

    def forward(self) -> Tensor:
        with self.summon_full_params():
            return self.a * 1


def from_forward(rank: int, world_size: int) -> str:
    return told(compiled(SummonsInside(), units=[]))


def test_inside_of_forward(ranks: Any) -> None:
    for said in ranks(2).run(from_forward):
        assert "SummonsInside cannot be traced (AttributeError: " in said
        assert "Leave summon_full_params out of forward" in said


def from_backward(rank: int, world_size: int) -> None:
    """In FSDP1 that is an error. Here nothing is unsharded then, and the step is as without."""
    pair = two_layers(), two_layers()
    torch.manual_seed(rank)
    x = torch.randn(4, 5)

    def summon(grad: Tensor) -> None:
        with pair[0].summon_full_params():
            assert not isinstance(pair[0][0].weight, DTensor)

    for model in pair:
        out = model(x)
        if model is pair[0]:
            out.register_hook(summon)
        out.sum().backward()
    for mine, theirs in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
        assert torch.equal(local(mine.grad), local(theirs.grad))


def test_inside_of_backward(ranks: Any) -> None:
    ranks(2).run(from_backward)


def of_rank_0(rank: int, world_size: int, strategy: Any) -> str:
    model = compiled(Nested(), strategy=strategy)

    def summon() -> None:
        with model.summon_full_params(rank0_only=True, writeback=True):
            pass

    return told(summon)


@pytest.mark.parametrize("strategy", [FULL, NO_SHARD], ids=["full_shard", "no_shard"])
def test_rank_0_cannot_write_for_all(ranks: Any, strategy: Any) -> None:
    for said in ranks(2).run(of_rank_0, strategy):
        assert "writeback=True with rank0_only=True: changes made on rank 0 alone" in said


def changed_between(rank: int, world_size: int) -> str:
    """What is changed there is refused, be it by as little as the sign of a zero."""
    model = two_layers()
    with model.summon_full_params(), torch.no_grad():
        model[1].weight.zero_()
    out = model(torch.randn(4, 5))
    with model.summon_full_params(), torch.no_grad():
        model[1].weight.neg_()
    return told(out.sum().backward)


def test_changed_between_forward_and_backward(ranks: Any) -> None:
    for said in ranks(2).run(changed_between):
        assert "'1.weight' was changed in place between a forward and its backward" in said


# -- submodules ------------------------------------------------------------------------------------


def of_parts(rank: int, world_size: int, policy: Any) -> list[str]:
    """`fqns` take the parameters in some submodules, and with recurse=False of their own units."""
    model = compiled(Nested().module, units=["1", "1.0", "2"], mixed_precision=policy)
    names = list(dict(model.named_parameters()))

    def seen() -> set[str]:
        found = {n for n, p in model.named_parameters() if not isinstance(p, DTensor)}
        return {name.partition(".")[0] if name[:2] != "1." else name[:3] for name in found}

    with model.summon_full_params(fqns=["1"]), torch.no_grad():
        assert seen() == {name[:3] for name in names if name[:2] == "1."}
        model[1][1].weight.zero_()
    assert (local(model[1][1].weight) == 0).all() and isinstance(model[1][1].weight, DTensor)
    with model.summon_full_params(recurse=False, fqns=["1"]):
        assert seen() == {"1.1"}
    model.unshard(async_op=True, fqns=["2", "1.0"]).wait()
    assert seen() == {"2", "1.0"}
    again = told(lambda: model.unshard(fqns=["0"]))
    model.reshard()
    assert seen() == set()
    return [again, told(lambda: model.unshard(fqns=["9"]))]


@POLICIES
def test_of_a_submodule(ranks: Any, policy: Any) -> None:
    for again, nowhere in ranks(2).run(of_parts, policy):
        assert "Name all submodules in one call, or call reshard() first" in again
        assert "fqns=['9']: '9' is no submodule" in nowhere
