"""Several modules as one unit, units in units, and modules of a sharded model that run alone."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.errors import ConfigError, UnitError
from fxshard.ir import text
from tests.fsdp2 import full
from tests.oracles import count_collectives
from tests.ranks import told
from tests.runtime.test_unit_methods import Net, assert_same, batch, eager, grads, net, sizes, step
from tests.texts import assert_equal

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

# -- several modules in one call -------------------------------------------------------------------


def lists(rank: int, world_size: int) -> None:
    """One all-gather and one reduce-scatter for two modules, as of FSDP2."""
    found = []
    for fully_shard in (fsdp.fully_shard, fxshard.fully_shard):
        model = net()
        for block in model.blocks:
            fully_shard(block)
        assert fully_shard([model.norm, model.head]) == [model.norm, model.head]
        fully_shard(model)
        forward, backward = step(model, rank)
        found.append(
            [
                forward.count("all_gather"),
                backward.count("all_gather"),
                backward.count("reduce_scatter"),
                sizes(forward, "all_gather"),
            ]
        )
        assert_same(grads(model), eager(world_size, 1))
        # what one module sets holds for the unit
        model.norm.set_reshard_after_forward(False)
        model.zero_grad()
        _, backward = step(model, rank)
        found[-1].append(backward.count("all_gather"))
        with count_collectives() as seen:
            model.head.unshard()
        assert seen.count("all_gather") == 1
        assert not isinstance(model.norm.weight, DTensor)
        model.norm.reshard()
        assert isinstance(model.head.weight, DTensor)
    theirs, ours = found
    assert ours[:3] == theirs[:3] == [5, 4, 5] and ours[4] == theirs[4] == 3
    assert ours[3] == theirs[3]
    plan = model.plan
    assert [unit.name for unit in plan.units][-1] == "norm, head"
    assert plan.units[-1].fqns == ("norm", "head")
    names = [each.unit for each in plan.memory.unsharded()]
    assert "norm, head" in names and not {"norm", "head"} & set(names)
    assert_equal(text.parse(text.write(plan.program)), plan.program)
    modules = {row.module for row in plan.memory.rows()}
    assert {"norm", "head"} <= modules


def test_a_list_of_modules_is_one_unit(ranks: Any) -> None:
    ranks(2).run(lists)


class Tied(nn.Module):
    """int64 [batch, 4] -> a scalar; the embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(8, 5), nn.Linear(5, 5)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.middle(self.table(tokens)))).square().mean()


def tied(rank: int, world_size: int) -> None:
    """As accelerate calls it: the norm, the embedding and the head that is tied to it."""
    tokens = torch.arange(8).view(2, 4)
    torch.manual_seed(0)
    alone = Tied()
    alone(tokens).backward()
    for fully_shard in (fsdp.fully_shard, fxshard.fully_shard):
        torch.manual_seed(0)
        model: Any = Tied()
        fully_shard((model.norm, model.table, model.head), reshard_after_forward=False)
        fully_shard(model)
        assert model.head.weight is model.table.weight
        with count_collectives() as forward:
            loss = model(tokens[rank : rank + 1])
        loss.backward()
        assert forward.count("all_gather") == 2
        assert_same(grads(model), grads(alone))
    assert [unit.name for unit in model.plan.units] == ["(root)", "table, norm, head"]


def test_a_list_may_hold_both_ends_of_a_tie(ranks: Any) -> None:
    ranks(2).run(tied)


def list_alone(rank: int, world_size: int) -> None:
    """Without a model around them, modules of a list run as they are written."""
    model, alone = net(), net()
    fxshard.fully_shard([model.norm, model.head])
    x = batch(rank)
    with count_collectives() as forward:
        out = model.head(model.norm(x)).square().mean()
    assert forward.count("all_gather") == 2
    out.backward()
    alone.head(
        alone.norm(torch.cat([batch(r) for r in range(world_size)]))
    ).square().mean().backward()
    for name in ("norm", "head"):
        assert_same(grads(getattr(model, name)), grads(getattr(alone, name)))
    # inner modules of a list count as parts of the outer one
    other = net()
    fxshard.fully_shard([other.blocks[0].up, other.blocks[0], other.blocks[0], other.head])
    fxshard.fully_shard(other)
    other(x).backward()
    assert [unit.name for unit in other.plan.units] == ["(root)", "blocks.0, head"]
    assert_same(grads(other), eager(world_size, 1))


def test_lists_without_a_model_and_with_parts(ranks: Any) -> None:
    ranks(2).run(list_alone)


def refused(rank: int, world_size: int) -> dict[str, str]:
    one = fxshard.fully_shard
    split, again, wide = net(), net(), net()
    one([split.blocks[0], split.head])
    one([again.norm, again.head])
    one(wide.blocks[0])
    one(wide)
    found = {
        "outside": told(lambda: one(split.blocks)),
        "again": told(lambda: one([again.head, again.inlet])),
        "empty": told(lambda: one([])),
        "kinds": told(lambda: one([again.inlet, 3])),
        "below": told(lambda: one(wide.blocks)),
        "compiled": told(lambda: fxshard.compile(again)),
    }
    one(split)  # after an error all is as it was
    split(batch(rank)).backward()
    assert_same(grads(split), eager(world_size, 1))
    return found


REFUSALS = {
    "outside": "was given in a list with a Linear, which is not in this ModuleList",
    "again": "this Linear is sharded already",
    "empty": "an empty list",
    "kinds": "takes an nn.Module or a list of them, not 3",
    "below": "sharded already, with a module around it",
    "compiled": "the model is sharded already",
}


def test_lists_that_are_refused(ranks: Any) -> None:
    for found in ranks(2).run(refused):
        assert found.keys() == REFUSALS.keys()
        for case, said in REFUSALS.items():
            assert said in found[case], (case, found[case])


def test_lists_are_units_of_plan_and_compile() -> None:
    model = net()
    args = (batch(0),)
    plan = fxshard.plan(model, args, world_size=2, units=["blocks.*", ("norm", "head")])
    assert [unit.name for unit in plan.units][-1] == "norm, head"
    held = [e for e in plan.memory.unsharded() if (e.unit, e.what) == ("norm, head", "parameters")]
    # Two of 5 elements padded to 6, 3 x 5 to 4 x 5, 3 to 4: gathered in one buffer, and unpacked.
    # Backward does not read the last one, the bias of the head.
    whole = 2 * 4 * (6 + 6 + 20)
    assert [each.bytes for each in held] == [whole + 2 * 4 * 4, whole]
    found = fxshard.validate(
        model,
        args,
        world_size=2,
        units=["blocks.*", ["norm", "head"]],
        numerics=True,
        optimizer=torch.optim.SGD,
    )
    assert found.holds and found.numerics is not None and found.numerics.verdict != "wrong"
    for units, said in {
        (("norm", "head"), ("head", "inlet")): "in another one",
        (("blocks.0", "blocks.0.up"),): "inside of 'blocks.0'",
        (("nothing", "head"),): "matches no module",
    }.items():
        with pytest.raises(UnitError, match=said):
            fxshard.plan(model, args, world_size=2, units=units)
    with pytest.raises(ConfigError, match="'norm' and 'head' are one unit"):
        fxshard.plan(
            model, args, world_size=2, units=[("norm", "head")], mixed_precision={"head": BF16}
        )


# -- units in units --------------------------------------------------------------------------------


class Deep(nn.Module):
    """A unit in a unit in a unit, and one that has no parameters but those of inner ones."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = Net()
        self.empty = nn.Sequential(nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.empty(x))


def nested(model: Any, fully_shard: Callable[..., Any], mesh: Any = None) -> None:
    """Units at four depths, each with another policy and another time of resharding."""
    blocks = model.outer.blocks
    back = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    fully_shard(blocks[0].up, mesh=mesh, reshard_after_forward=False)
    fully_shard(blocks[0], mesh=mesh, reshard_after_forward=True)
    fully_shard(blocks[1], mesh=mesh, reshard_after_forward=2, mp_policy=back)
    fully_shard(blocks[2], mesh=mesh, reshard_after_forward=False)
    fully_shard(model.empty[0], mesh=mesh)
    fully_shard(model.empty, mesh=mesh)
    fully_shard(model.outer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)


def depths(rank: int, world_size: int) -> None:
    found = []
    for fully_shard in (fsdp.fully_shard, fxshard.fully_shard):
        torch.manual_seed(0)
        model: Any = Deep()
        nested(model, fully_shard)
        forward, backward = step(model, rank)
        counts = [backward.count(kind) for kind in ("reduce_scatter",)]
        found.append((forward.count("all_gather"), counts, grads(model)))
    theirs, ours = found
    assert theirs[:2] == ours[:2]
    for name, grad in theirs[2].items():
        assert_close(ours[2][name], grad, rtol=1e-5, atol=1e-6)
    assert [(unit.name, unit.reshard) for unit in model.plan.units] == [
        ("(root)", False),
        ("outer", True),
        ("outer.blocks.0", True),
        ("outer.blocks.0.up", False),
        ("outer.blocks.1", 2),
        ("outer.blocks.2", False),
        ("empty", True),
        ("empty.0", True),
    ]
    # recursion goes down from the module it is called on, and no further
    model.outer.set_reshard_after_forward(False)
    assert [unit.reshard for unit in model._fxshard.units] == [False] * 6 + [True] * 2
    model.empty.set_requires_gradient_sync(False, recurse=False)
    assert [unit.reduce for unit in model._fxshard.units] == ["all"] * 6 + ["none", "all"]


def test_units_in_units_with_policies_of_their_own(ranks: Any) -> None:
    ranks(4).run(depths)


def early_settings(rank: int, world_size: int) -> None:
    """What is set on a block before the model around it is sharded holds."""
    model = net()
    for block in model.blocks:
        fxshard.fully_shard(block)
    model.blocks[1].set_reshard_after_forward(False)
    model.blocks[2].set_requires_gradient_sync(False)
    fxshard.fully_shard(model)
    _, backward = step(model, rank)
    assert (backward.count("all_gather"), backward.count("reduce_scatter")) == (2, 3)
    model.set_requires_gradient_sync(True)
    step(model, rank, 1)
    assert_same(grads(model), eager(world_size, 2))


def test_settings_are_taken_over(ranks: Any) -> None:
    ranks(2).run(early_settings)


# -- modules that run alone ------------------------------------------------------------------------


class Calls(nn.Module):
    """A block with a method of its own, and a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(5, 5), nn.Linear(5, 5)
        self.unused = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) + self.first(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x).relu()) + self.first.bias


def calls(fully_shard: Callable[..., Any], **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Calls(), nn.Linear(5, 2))
    fully_shard(model[0].inner, **options)
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    return model


def joined(world_size: int) -> Tensor:
    return torch.cat([batch(rank) for rank in range(world_size)])


def alone(rank: int, world_size: int) -> None:
    """Of the block that is called, the parameters of its unit are gathered once."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(Calls(), nn.Linear(5, 2))
    register = fxshard.register_fsdp_forward_method
    model = calls(fxshard.fully_shard)
    model(batch(rank)).sum().backward()  # the whole model first
    model.zero_grad()
    register(model[0], "encode")
    register(model[0].inner, "forward")
    for run in (lambda m, x: m[0](x), lambda m, x: m[0].encode(x)):
        plain.zero_grad()
        model.zero_grad()
        with count_collectives() as forward:
            loss = run(model, batch(rank)).square().mean()
        assert [call.kind for call in forward.calls] == ["all_gather"] * 2
        with count_collectives() as backward:
            loss.backward()
        assert [call.kind for call in backward.calls] == ["reduce_scatter"] * 2
        run(plain, joined(world_size)).square().mean().backward()
        assert_same(grads(model), grads(plain))
        assert model[0].unused.weight.grad is None
    assert isinstance(model[0].first.weight, DTensor)
    before = len(model._fxshard.variants)
    model.zero_grad()
    plain.zero_grad()
    model(batch(rank)).square().mean().backward()  # a registered method is traced with the rest
    plain(joined(world_size)).square().mean().backward()
    assert_same(grads(model), grads(plain))
    assert len(model._fxshard.variants) == before
    for each in (model, plain):
        each.zero_grad()
    checkpoint(model[0], batch(rank), use_reentrant=False).square().mean().backward()
    plain[0](joined(world_size)).square().mean().backward()
    assert_same(grads(model), grads(plain))


def test_a_module_by_itself_gathers_its_unit_once(ranks: Any) -> None:
    ranks(2).run(alone)


def alone_in_bf16(rank: int, world_size: int) -> None:
    """In the dtypes of its policy, as under FSDP2."""
    found = []
    for fully_shard in (fsdp.fully_shard, fxshard.fully_shard):
        model = calls(fully_shard, mp_policy=BF16)
        if fully_shard is fsdp.fully_shard:
            model(batch(rank))  # FSDP2 finds its root at the first forward
        out = model[0](batch(rank))
        out.square().mean().backward()
        found.append((out, grads(model)))
    (theirs, other), (ours, mine) = found
    assert ours.dtype is theirs.dtype is torch.bfloat16
    assert torch.equal(ours, theirs)
    assert_same(mine, other)


def test_a_module_by_itself_computes_in_its_policy(ranks: Any) -> None:
    ranks(2).run(alone_in_bf16)


def alone_and_accumulating(rank: int, world_size: int) -> None:
    """Sums of calls of a block and of the model go together, for hybrid strategies too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    plain: Any = nn.Sequential(Calls(), nn.Linear(5, 2))
    for module in (plain[0], plain, plain[0], plain):
        module(joined(world_size)).square().mean().backward()
    for setter in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        model = calls(fxshard.fully_shard, mesh=mesh)
        for number, module in enumerate((model[0], model, model[0], model)):
            getattr(model, setter)(number == 3)
            module(batch(rank)).square().mean().backward()
            assert (model[0].first.weight.grad is None) == (number < 3)
        assert_same(grads(model), grads(plain))
        model.zero_grad()
        getattr(model, setter)(False)
        model(batch(rank)).square().mean().backward()
        getattr(model, setter)(True)
        model[0](batch(rank)).square().mean().backward()
        expected = {n: None if g is None else g / 2 for n, g in grads(plain).items()}
        for name, grad in grads(model[0]).items():
            assert (grad is None) == (name.startswith("unused"))
            if grad is not None:
                assert_close(grad, expected[f"0.{name}"], rtol=1e-5, atol=1e-6)


def test_a_module_by_itself_accumulates_as_the_model_does(ranks: Any) -> None:
    ranks(4).run(alone_and_accumulating)


# -- copies ----------------------------------------------------------------------------------------


def copies(rank: int, world_size: int) -> None:
    """Of the model: their units have the methods. Of a block: a plain one."""
    model = net()
    for block in model.blocks:
        fxshard.fully_shard(block)
    fxshard.fully_shard([model.norm, model.head])
    fxshard.fully_shard(model)
    step(model, rank)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(isinstance(block, fsdp.FSDPModule) for block in made.blocks)
        assert isinstance(made, fsdp.FSDPModule) and isinstance(made, Net)
        for param, other in zip(made.parameters(), model.parameters(), strict=True):
            with torch.no_grad():
                param.copy_(full(other)) if made is not model else None
        made.blocks[1].set_reshard_after_forward(False)
        made.zero_grad()
        _, backward = step(made, rank)
        assert backward.count("all_gather") == 3
        assert_same(grads(made), eager(world_size, 1))
    assert [unit.reshard for unit in model._fxshard.units] == [False, True, True, True, True]
    block = copy.deepcopy(model.blocks[0])
    assert type(block).__name__ == "Block" and not isinstance(block, fsdp.FSDPModule)
    part = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    fxshard.fully_shard(part)
    assert type(part[:1]) is nn.Sequential  # as FSDP2's


def test_copies_of_a_model_have_units_of_their_own(ranks: Any) -> None:
    ranks(2).run(copies)
