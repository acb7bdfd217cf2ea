"""docs/coming-from-fsdp.md has a row for every name of torch's FSDP, and what it says is so."""

import ast
import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fxshard
from fxshard.config.checked import Config
from fxshard.errors import CheckpointError, ConfigError, RankMismatchError, StepError
from fxshard.pipeline import default_passes
from fxshard.runtime.module import FxshardModule
from fxshard.runtime.unit_methods import REFUSALS
from tests.eager import Net, batch
from tests.fsdp2 import full, units_of
from tests.oracles import count_collectives
from tests.runtime.everywhere import EVERYWHERE, run
from tests.runtime.test_module import built, call, compiled
from tests.zoo import MODELS

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "coming-from-fsdp.md"
STATUSES = {"same", "renamed", "not needed", "missing"}

# -- every name has a row --------------------------------------------------------------------------

# Rows of names that not every torch from 2.11 to 2.15 has.
SOME_VERSIONS = {
    "dp_mesh_dims",
    "DataParallelMeshDims",
    "reset_iter_state",
    "set_reduce_scatter_unused_params",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
    # since 2.15
    "finalize_backward",
    "GradientReductionHandle",
    "param_dtype_override_fn",
    "get_pending_gradients",
    "grad_dtype",
    "set_keep_unsharded_storage",
    "synchronize_gradients",
    "set_manual_backward_finalization",
} | {"set_all_gather_layout", "set_reduce_scatter_input_fn"}  # after it


def arguments(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def methods(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def fields(cls: type) -> set[str]:
    return set(inspect.get_annotations(cls))


STATE_DICTS = (
    fsdp.StateDictConfig,
    fsdp.FullStateDictConfig,
    fsdp.LocalStateDictConfig,
    fsdp.ShardedStateDictConfig,
    fsdp.OptimStateDictConfig,
    fsdp.FullOptimStateDictConfig,
    fsdp.LocalOptimStateDictConfig,
    fsdp.ShardedOptimStateDictConfig,
    fsdp.StateDictSettings,
)


def state_dict_names() -> set[str]:
    """``Class.field`` of the fields that a class adds, or the class if it adds none."""
    names = {f"StateDictType.{member}" for member in fsdp.StateDictType.__members__}
    for cls in STATE_DICTS:
        names |= {f"{cls.__name__}.{field}" for field in fields(cls)} or {cls.__name__}
    return names


TABLES: dict[str, set[str]] = {
    "Arguments of `FullyShardedDataParallel`": arguments(FullyShardedDataParallel.__init__),
    "Methods of `FullyShardedDataParallel`": methods(FullyShardedDataParallel),
    "Arguments of `fully_shard`": arguments(fully_shard),
    "Methods of `FSDPModule`": methods(FSDPModule),
    **{
        f"`{cls.__name__}`": fields(cls)
        for cls in (
            fsdp.MixedPrecision,
            fsdp.MixedPrecisionPolicy,
            fsdp.CPUOffload,
            fsdp.CPUOffloadPolicy,
            fsdp.OffloadPolicy,
        )
    },
    "`ShardingStrategy`": set(fsdp.ShardingStrategy.__members__),
    "`BackwardPrefetch`": set(fsdp.BackwardPrefetch.__members__),
    "State dict types": state_dict_names(),
}
_known = {name for title in TABLES for name in re.findall(r"`(\w+)`", title)}
_known |= {cls.__name__ for cls in STATE_DICTS} | {"StateDictType"}
# Arguments of FSDP1's methods that those of the same name here do not take.
TABLES["Arguments of FSDP1's methods"] = {
    name
    for method in methods(FullyShardedDataParallel) - {"module", "forward"}
    for name in arguments(getattr(FullyShardedDataParallel, method))
    - arguments(getattr(FxshardModule, method, lambda: None))
} - {"args", "kwargs"}
TABLES["Names of `torch.distributed.fsdp.wrap`"] = set(fsdp.wrap.__all__)
TABLES["Names of `torch.distributed.fsdp.sharded_grad_scaler`"] = {"ShardedGradScaler"}
TABLES["Other names of `torch.distributed.fsdp`"] = set(fsdp.__all__) - _known


def rows(title: str) -> list[list[str]]:
    """The rows of the table below a heading."""
    (section,) = re.findall(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.M | re.S
    )
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("title", TABLES)
def test_every_name_has_a_row(title: str) -> None:
    names = [row[0].strip("`") for row in rows(title)]
    assert all(row[0] == f"`{name}`" for row, name in zip(rows(title), names, strict=True))
    assert len(names) == len(set(names))
    assert not TABLES[title] - set(names), "torch has these, the document does not"
    assert not set(names) - TABLES[title] - SOME_VERSIONS, "the document has these, torch does not"


@pytest.mark.parametrize("title", TABLES)
def test_every_row_says_what_it_is_here(title: str) -> None:
    for name, status, how, _ in rows(title):
        assert status in STATUSES, name
        assert how or status == "same", name


@functools.cache
def names_in(file: str) -> set[str]:
    """Names of the tests of a file under tests/; of parametrised ones, of the function."""
    body = ast.parse((TESTS / file).read_text()).body
    return {each.name for each in body if isinstance(each, ast.FunctionDef)}


@pytest.mark.parametrize("title", TABLES)
def test_every_row_names_a_test_that_exists(title: str) -> None:
    for name, _, _, test in rows(title):
        named = re.fullmatch(r"`([\w/]+/test_\w+\.py)::(test_\w+)`", test)
        assert named, (name, test)
        assert named[2] in names_in(named[1]), (name, test)


def test_methods_of_fsdp_modules_take_the_same_arguments() -> None:
    """In the same places; what is more has a default."""
    both = {name for name in methods(FSDPModule) if hasattr(FxshardModule, name)}
    assert both >= methods(FSDPModule) - REFUSALS.keys()
    for name in sorted(both):
        theirs = inspect.signature(getattr(FSDPModule, name)).parameters.values()
        ours = inspect.signature(getattr(FxshardModule, name))
        placed = [each.name for each in theirs if each.kind is each.POSITIONAL_OR_KEYWORD]
        given = {each.name: each for each in theirs if each.kind is each.KEYWORD_ONLY}
        ours.bind(*placed, **given)
        assert [*ours.parameters][: len(placed)] == placed, name


def test_arguments_that_are_gone() -> None:
    """States need no group and no list of parameters: they are those of the optimizer, by name."""
    model = compiled("mlp13")
    optimizer = trained(model)
    states = model.full_optim_state_dict(optimizer), model.optim_state_dict(optimizer)
    names = {name for name, _ in model.named_parameters()}
    for state in states:
        assert state["state"].keys() == names
        assert {name for group in state["param_groups"] for name in group["params"]} == names
    for gone in ("group", "optim_input", "is_named_optimizer"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{gone}'"):
            model.optim_state_dict_to_load(optimizer, states[0], **{gone: None})


def test_methods_that_are_missing_or_renamed_say_so() -> None:
    """Of torch's; `FxshardModule` itself has none of that name, so that a model may."""
    named = {name.strip("`"): status for name, status, _, _ in rows("Methods of `FSDPModule`")}
    gone = {name for name, status in named.items() if status in ("missing", "renamed")}
    assert gone and gone <= REFUSALS.keys()
    assert not any(hasattr(FxshardModule, name) for name in gone)


def test_names_of_options_and_methods_exist() -> None:
    text = DOCUMENT.read_text()
    legal = (
        arguments(Config) | arguments(fxshard.compile) | arguments(FxshardModule.full_state_dict)
    )
    legal |= arguments(FxshardModule.summon_full_params)
    for title in TABLES:
        for name, _, how, _ in rows(title):
            for option in re.findall(r"`(\w+)=", how):
                assert option in legal, (name, option)
            for method in re.findall(r"`model\.(\w+)[(`]", how):
                assert hasattr(FxshardModule, method), (name, method)
    assert "unsupported" not in text


# -- setters ---------------------------------------------------------------------------------------


def gathers(model: nn.Module, name: str = "mlp13") -> tuple[int, int]:
    """All-gathers in forward and in backward."""
    with count_collectives() as forward:
        loss = call(MODELS[name], model)
    with count_collectives() as backward:
        loss.backward()
    return forward.count("all_gather"), backward.count("all_gather")


def reshards(rank: int, world_size: int) -> None:
    model, other = compiled("mlp13"), built("mlp13")
    for unit in units_of(other, MODELS["mlp13"]):
        fully_shard(unit)
    fully_shard(other)
    assert isinstance(other, FSDPModule)
    both: list[Any] = [model, other]
    for value, recurse, expected in (
        (True, True, (4, 4)),
        (False, False, (4, 3)),  # the root stays
        (False, True, (4, 0)),
        (True, False, (4, 1)),
        (True, True, (4, 4)),
    ):
        for each in both:
            each.set_reshard_after_forward(value, recurse)
            each.zero_grad()
            assert gathers(each) == expected, (value, recurse)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert torch.equal(full(mine.grad), full(theirs.grad))
    model.set_reshard_after_forward(False, fqns=["blocks.1"])
    assert gathers(model) == (4, 3)
    assert model.plan.config.reshard_after_forward["blocks.1"] is False
    fresh = compiled("mlp13", reshard_after_forward={"blocks.1": False})
    assert [u.reshard for u in fresh._fxshard.units] == [u.reshard for u in model._fxshard.units]
    with pytest.raises(ConfigError, match="no unit"):
        model.set_reshard_after_forward(False, fqns=["blocks"])
    with pytest.raises(ConfigError, match="expected a bool"):
        model.set_reshard_after_forward(2)


def test_set_reshard_after_forward(ranks: Any) -> None:
    ranks(2).run(reshards)


def divides(rank: int, world_size: int) -> None:
    model, other = compiled("mlp13"), built("mlp13")
    fsdp_units: list[Any] = [*units_of(other, MODELS["mlp13"]), other]
    for unit in fsdp_units:
        fully_shard(unit)
        unit.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing inside
    for factor in (3.0, 1.0, 8.0):
        for unit in fsdp_units:
            unit.set_gradient_divide_factor(factor)
        model.set_gradient_divide_factor(factor)
        for each in (model, other):
            each.zero_grad()
            args, kwargs = MODELS["mlp13"].batch(rank, 0)
            MODELS["mlp13"].loss(each(*args, **kwargs)).backward()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert torch.equal(full(mine.grad), full(theirs.grad)), factor
    model.set_gradient_divide_factor(None)
    model.register_comm_hook(None, lambda state, flat, out: None)
    with pytest.raises(ConfigError, match="register_comm_hook"):
        model.set_gradient_divide_factor(2.0)


def test_set_gradient_divide_factor(ranks: Any) -> None:
    ranks(2).run(divides)
    passes = default_passes(Config())
    with pytest.raises(ConfigError, match="passes"):
        compiled("mlp13", passes=passes).set_gradient_divide_factor(2.0)
    with pytest.raises(ConfigError, match="> 0"):
        compiled("mlp13").set_gradient_divide_factor(0)


def divides_outside(rank: int, world_size: int, options: dict[str, Any]) -> list[Any]:
    """Gradients of a submodule that is called alone, and of the whole model, by factor."""
    torch.manual_seed(0)
    model = fxshard.compile(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), **options)
    batch = torch.ones(2, 3) * (rank + 1)
    found: list[Any] = []
    for factor in (None, 1.0, 4.0, None):
        if factor is not None or found:
            model.set_gradient_divide_factor(factor)
        for part in (model[0], model):
            model.zero_grad()
            part(batch).sum().backward()
            found.append((factor, part is model, full(model[0].weight.grad)))
    return found


@pytest.mark.parametrize("options", [{}, {"gradient_predivide_factor": 8.0}], ids=["", "before"])
def test_the_gradient_divide_factor_reaches_submodules(ranks: Any, options: Any) -> None:
    """Whose eager reads reduce on their own: each factor counts from the next backward on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    batch = torch.cat([torch.ones(2, 3), 2 * torch.ones(2, 3)])
    for found in ranks(2).run(divides_outside, options):
        assert len(found) == 8
        for factor, whole, grad in found:
            model.zero_grad()
            (model if whole else model[0])(batch).sum().backward()
            assert model[0].weight.grad is not None
            torch.testing.assert_close(grad, model[0].weight.grad / (factor or 2))


def reduces_elsewhere(rank: int, world_size: int) -> None:
    """Two groups of the same ranks, and the numbers of one."""
    case, grads, groups = MODELS["mlp13"], [], []
    args, kwargs = case.batch(rank, 0)
    for separate in (False, True, None):
        model = compiled("mlp13")
        if separate is not False:
            model.set_separate_reduce_scatter_group()
        if separate is None:
            model.set_separate_reduce_scatter_group(False)
        with count_collectives() as seen:
            case.loss(model(*args, **kwargs)).backward()
        grads.append([full(p.grad) for p in model.parameters() if p.grad is not None])
        assert {call.ranks for call in seen.calls} == {(0, 1)}
        kinds = ("all_gather", "reduce_scatter")
        groups.append([{call.group for call in seen.calls if call.kind == k} for k in kinds])
    assert [len(gathers | reduces) for gathers, reduces in groups] == [1, 2, 1]
    for others in grads[1:]:
        assert all(map(torch.equal, grads[0], others))


def test_set_separate_reduce_scatter_group(ranks: Any) -> None:
    ranks(2).run(reduces_elsewhere)
    with pytest.raises(ConfigError, match="no reduce-scatter"):
        compiled("mlp13").set_separate_reduce_scatter_group()


# -- optimizer states ------------------------------------------------------------------------------


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, in another order than the model's."""
    params = list(model.parameters())
    groups = [{"params": params[3:]}, {"params": params[:3], "lr": 0.5}]
    return torch.optim.AdamW(groups, lr=1e-2)


def trained(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    for i in range(steps):
        optimizer.zero_grad()
        call(MODELS["mlp13"], model, i).backward()
        optimizer.step()
    return optimizer


def assert_same_optimizer(mine: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    for ours, theirs in zip(mine.param_groups, other.param_groups, strict=True):
        assert ours["lr"] == theirs["lr"]
        for p, q in zip(ours["params"], theirs["params"], strict=True):
            for key, value in other.state[q].items():
                assert_close(full(mine.state[p][key]), full(value), rtol=1e-5, atol=1e-7)
                assert type(mine.state[p][key]) is type(value) or isinstance(p, DTensor)


def optimizer_states(rank: int, world_size: int) -> None:
    eager, model = built("mlp13"), compiled("mlp13")
    theirs, ours = trained(eager), trained(model)
    expected = get_optimizer_state_dict(eager, theirs)

    whole = model.full_optim_state_dict(ours, rank0_only=False)
    assert_close(whole["state"], expected["state"], rtol=1e-5, atol=1e-7)
    assert [g["params"] for g in whole["param_groups"]] == [
        g["params"] for g in expected["param_groups"]
    ]
    assert bool(model.full_optim_state_dict(ours)) == (rank == 0)

    sharded = model.optim_state_dict(ours)
    for entry in sharded["state"].values():
        assert isinstance(entry["exp_avg"], DTensor) == dist.is_initialized()

    for saved in (expected, whole, sharded):
        again = adamw(model)
        made = model.optim_state_dict_to_load(again, saved)
        assert not again.state
        again.load_state_dict(made)
        assert_same_optimizer(again, theirs)
        for group in again.param_groups:
            for param in group["params"]:
                entry = again.state[param]["exp_avg"]
                assert type(entry) is (DTensor if dist.is_initialized() else Tensor)
                assert not isinstance(entry, DTensor) or entry.placements == param.placements
    loaded = adamw(model)
    model.optim_state_dict_to_load(loaded, whole, load_directly=True)
    for each, optimizer in ((model, loaded), (eager, theirs)):
        optimizer.zero_grad()
        call(MODELS["mlp13"], each, 7).backward()
        optimizer.step()
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert_close(full(mine), other.detach(), rtol=1e-4, atol=1e-6)

    for wrong in ({}, loaded.state_dict(), {"state": {}, "param_groups": [{"params": ["a"]}]}):
        with pytest.raises(CheckpointError, match="says nothing of parameter 'blocks"):
            model.optim_state_dict_to_load(loaded, wrong)


def test_states_of_several_groups_do_not_become_those_of_one() -> None:
    """Whose options are those of none of its parameters' groups then: torch refuses that too."""
    model = compiled("mlp13")
    saved = trained(model)
    one = torch.optim.AdamW(model.parameters(), lr=0.3)
    with pytest.raises(ValueError, match="parameter group"):
        one.load_state_dict(saved.state_dict())
    for state in (model.full_optim_state_dict(saved), model.optim_state_dict(saved)):
        with pytest.raises(CheckpointError, match=r"was in another group .* another 'lr'"):
            model.optim_state_dict_to_load(one, state, load_directly=True)
    assert not one.state and one.param_groups[0]["lr"] == 0.3
    for group in saved.param_groups:
        group["lr"] = 0.25
    model.optim_state_dict_to_load(one, model.optim_state_dict(saved), load_directly=True)
    assert one.param_groups[0]["lr"] == 0.25 and len(one.state) == len(saved.state)


@EVERYWHERE
def test_optimizer_states(ranks: Any, where: str) -> None:
    run(ranks, where, optimizer_states)


def recipes(rank: int, world_size: int) -> None:
    """From rank 0 alone; from FSDP2 (FSDP1 does not run on CPUs); keyed by torch's FSDP1."""
    model = compiled("mlp13")
    ours = trained(model)
    whole = model.full_optim_state_dict(ours)
    box = [whole if rank == 0 else None]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    again = adamw(model)
    model.optim_state_dict_to_load(again, box[0], load_directly=True)
    assert_same_optimizer(again, ours)

    other = fully_shard(built("mlp13"))
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    call(MODELS["mlp13"], other).backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True)
    saved: Any = get_optimizer_state_dict(other, optimizer, options=options)
    mine = torch.optim.AdamW(model.parameters())
    model.optim_state_dict_to_load(mine, saved, load_directly=True)
    assert mine.param_groups[0]["lr"] == 1e-2
    for name, param in model.named_parameters():
        assert torch.equal(full(mine.state[param]["exp_avg"]), saved["state"][name]["exp_avg"])

    by_name = FullyShardedDataParallel.rekey_optim_state_dict(
        mine.state_dict(), fsdp.OptimStateKeyType.PARAM_NAME, model
    )
    assert list(by_name["state"]) == [name for name, _ in model.named_parameters()]


def test_recipes(ranks: Any) -> None:
    ranks(2).run(recipes)


# -- what else the document says -------------------------------------------------------------------


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x))

    def described(self, x: Tensor) -> Tensor:
        return self(x).softmax(-1)


def sayings(rank: int, world_size: int) -> None:
    model = fxshard.compile(Lookup(), units=["table", "out"])
    with count_collectives() as forward:
        loss = model(torch.arange(4)).sum()
    with count_collectives() as backward:
        loss.backward()
    assert forward.count("all_gather") == 2 and backward.count("all_gather") == 1
    whole = 4 * 4 * 4  # out.weight alone, padded to 4 rows; out.bias and table are not read
    assert backward.nbytes("all_gather") == whole

    assert model.described(torch.arange(4)).shape == (4, 3)  # it calls the model
    with model.summon_full_params(writeback=False):
        with torch.no_grad():
            assert model.described(torch.arange(4)).shape == (4, 3)
        with pytest.raises(StepError, match="inside of summon_full_params"):
            model.described(torch.arange(4))
    assert isinstance(model.table.weight, DTensor)
    model.unshard(async_op=True).wait()
    assert model.table(torch.arange(4)).shape == (4, 4)
    assert type(model.table.weight) is nn.Parameter
    model.reshard()
    assert isinstance(model.table.weight, DTensor)

    def after(out: Tensor) -> None:
        out.mul_(2)

    def hook(state: None, flat: Tensor, out: Tensor) -> None:
        dist.reduce_scatter_tensor(out, flat, dist.ReduceOp.AVG)
        after(out)

    plain, hooked = compiled("mlp13"), compiled("mlp13")
    hooked.register_comm_hook(None, hook)
    for each in (plain, hooked):
        call(MODELS["mlp13"], each).backward()
    for one, two in zip(plain.parameters(), hooked.parameters(), strict=True):
        assert torch.equal(full(two.grad), 2 * full(one.grad))

    uneven = fxshard.compile(
        Net(lambda net, x: net.a(x) + (net.b(x) if rank == 0 else 0)), units=["a", "b"]
    )
    with pytest.raises(RankMismatchError):
        uneven(batch())
    even = fxshard.compile(
        Net(lambda net, x: net.a(x) + (net.b(x) if rank == 0 else 0 * net.b(x))), units=["a", "b"]
    )
    even(batch()).sum().backward()
    assert torch.equal(full(even.b.bias.grad), torch.full((6,), 2.0))  # 4 rows, half the ranks

    order: list[str] = []
    world = plain._fxshard.world
    reduce = world.reduce_scatter
    world.reduce_scatter = lambda *a, **k: (order.append("reduce"), reduce(*a, **k))[1]
    for param in plain.parameters():
        param.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    call(MODELS["mlp13"], plain).backward()
    assert order == ["reduce"] * 4 + ["gradient"] * 16

    fails = [True, False]

    def failing(state: None, flat: Tensor, out: Tensor) -> None:
        if fails and fails.pop():
            raise KeyError("mine")
        dist.reduce_scatter_tensor(out, flat, dist.ReduceOp.AVG)

    broken = compiled("mlp13")
    broken.register_comm_hook(None, failing)
    with pytest.raises(KeyError):  # in the second reduction of both ranks
        call(MODELS["mlp13"], broken).backward()
    broken.zero_grad()
    call(MODELS["mlp13"], broken).backward()
    for one, two in zip(hooked.parameters(), broken.parameters(), strict=True):
        assert torch.equal(full(one.grad), 2 * full(two.grad))


def thrice(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(3)


def hybrid(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = compiled("mlp13", strategy="hybrid_shard", mesh=mesh)
    plain = compiled("mlp13", strategy="hybrid_shard", mesh=mesh)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(thrice)
    for each in (model, plain):
        args, kwargs = MODELS["mlp13"].batch(rank, 0)
        MODELS["mlp13"].loss(each(*args, **kwargs)).backward()
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(two.grad), 3 * full(one.grad))


def test_hook_behind_the_all_reduce(ranks: Any) -> None:
    ranks(2).run(hybrid)


def test_what_the_document_says(ranks: Any) -> None:
    ranks(2).run(sayings)


def test_no_second_derivatives() -> None:
    x = batch().requires_grad_()
    squares = fxshard.compile(Net(lambda net, x: net.a(x).square().sum()), world_size=2)
    with pytest.raises(StepError, match="create_graph=True"):
        torch.autograd.grad(squares(x), x, create_graph=True)
