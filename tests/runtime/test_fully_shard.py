"""`fxshard.fully_shard` in the place of torch's: FSDP2 scripts run as they are, or are refused."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import fxshard
from tests import fsdp2
from tests.fsdp2 import Result, full
from tests.ranks import told
from tests.zoo import MODELS

STEPS = 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def test_the_signature_is_torchs() -> None:
    theirs = inspect.signature(fsdp.fully_shard).parameters
    ours = inspect.signature(fxshard.fully_shard).parameters
    assert [*theirs] == [name for name in ours if name in theirs]
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default


# -- one script, run with torch's function and with ours -------------------------------------------


def both(rank: int, world_size: int, name: str, options: dict[str, Any]) -> tuple[Result, Result]:
    if options.pop("hybrid", False):
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=names)
    theirs = fsdp2.train(MODELS[name], STEPS, **options)
    ours = fsdp2.train(MODELS[name], STEPS, fully_shard=fxshard.fully_shard, **options)
    return theirs, ours


@pytest.mark.parametrize("name", ["mlp13", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_script_trains_as_fsdp2_and_as_one_process(ranks: Any, name: str) -> None:
    alone = fsdp2.train_single(MODELS[name], STEPS, 2)
    found = ranks(2).run(both, name, {})
    for theirs, ours in found:
        fsdp2.assert_bitwise(ours, theirs)
        for fqn, param in alone.params.items():
            assert_close(ours.params[fqn], param, rtol=1e-5, atol=1e-5)
    losses = [sum(each) / 2 for each in zip(*(ours.losses for _, ours in found), strict=True)]
    assert_close(losses, alone.losses, rtol=1e-5, atol=1e-6)


def row_wise(param: nn.Parameter) -> Shard | None:
    return Shard(0) if param.dim() > 1 else None


@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": BF16},
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"hybrid": True},
        {"shard_placement_fn": row_wise},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.sample(2)
def test_arguments_mean_what_they_mean_to_fsdp2(ranks: Any, options: dict[str, Any]) -> None:
    for theirs, ours in ranks(2).run(both, "mlp13", options):
        fsdp2.assert_bitwise(ours, theirs)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)).relu()


class Net(nn.Module):
    """int64 tokens [batch, sequence] -> logits; widths that two ranks do not divide."""

    def __init__(self, width: int = 5, vocab: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale.mean()

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm)):
                module.reset_parameters()
        nn.init.ones_(self.scale)


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Net()


def trained(model: nn.Module, rank: int) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(7, (2, 4), generator=generator)
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {fqn: full(param) for fqn, param in model.named_parameters()}


def in_units(model: Any, fully_shard: Callable[..., Any]) -> None:
    """Units in units, with policies of their own, two modules in one call, and one ignored."""
    ignored = {model.scale}
    back = dataclasses.replace(BF16, output_dtype=torch.float32)
    model.scale.requires_grad_(False)
    for number, block in enumerate(model.blocks):
        if number == 1:
            fully_shard(block.mlp, reshard_after_forward=False, ignored_params=ignored)
        policy = MixedPrecisionPolicy() if number == 1 else back
        fully_shard(block, mp_policy=policy, reshard_after_forward=number != 2)
    fully_shard([model.norm, model.head])
    assert fully_shard(model, ignored_params=ignored) is model


def policies(rank: int, world_size: int) -> None:
    found = []
    for fully_shard in (fsdp.fully_shard, fxshard.fully_shard):
        model = net()
        in_units(model, fully_shard)
        found.append(trained(model, rank))
    assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
    assert [(unit.name, unit.reshard) for unit in model.plan.units] == [
        ("(root)", False),
        ("blocks.0", True),
        ("blocks.1", True),
        ("blocks.1.mlp", False),
        ("blocks.2", False),
        ("norm, head", True),
    ]
    assert not isinstance(model.scale, DTensor)
    assert isinstance(model, Net) and isinstance(model, fxshard.FxshardModule)
    assert isinstance(model.blocks[1], Block) and isinstance(model.blocks[1], fsdp.FSDPModule)


def test_each_call_is_a_unit_with_its_policies(ranks: Any) -> None:
    ranks(2).run(policies)


def from_meta(rank: int, world_size: int) -> None:
    """By the model's own initialisation after `to_empty`, or by loading."""
    whole = net(3).state_dict()
    for load in (False, True):
        with torch.device("meta"):
            model: Any = Net()
        for block in model.blocks:
            fxshard.fully_shard(block)
        fxshard.fully_shard(model)
        assert all(param.is_meta for param in model.parameters())
        model.to_empty(device="cpu")
        if load:
            model.load_state_dict(whole)
        else:
            torch.manual_seed(3)
            model.reset_parameters()
            expected = net(3)
            torch.manual_seed(3)
            expected.reset_parameters()
            whole = expected.state_dict()
        for fqn, param in model.named_parameters():
            assert torch.equal(full(param), whole[fqn]), (load, fqn)
        alone = Net()
        alone.load_state_dict(whole)
        tokens = torch.tensor([[1, 2]])
        assert_close(model(tokens), alone(tokens))


def test_meta_models_are_filled_by_the_user(ranks: Any) -> None:
    ranks(2).run(from_meta)


def eager_parts(rank: int, world_size: int) -> None:
    """A block that is called before the root gathers what it reads; states go in and out."""
    model, alone = net(), net()
    for block in model.blocks:
        fxshard.fully_shard(block)
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    fxshard.fully_shard(model)
    x = torch.ones(2, 5)
    assert_close(model.blocks[0](x), alone.blocks[0](x))
    state = get_model_state_dict(model)
    assert list(state) == list(alone.state_dict())
    set_model_state_dict(model, state)
    tokens = torch.tensor([[1, 2, 3]])
    for each in (model, alone):
        each(tokens).sum().backward()
    optimizer.step()  # made before the root was: it holds the same parameters
    torch.optim.SGD(alone.blocks.parameters(), lr=0.1).step()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(full(mine), theirs.detach())


def test_blocks_work_before_the_first_forward_of_the_root(ranks: Any) -> None:
    ranks(2).run(eager_parts)


# -- what is refused -------------------------------------------------------------------------------


def sharded(*parts: str) -> Any:
    """A `Net` on some parts of which `fully_shard` was called."""
    model = net()
    for part in parts:
        fxshard.fully_shard(model.get_submodule(part))
    return model


def refusals(rank: int, world_size: int) -> dict[str, str]:
    one = fxshard.fully_shard
    model = net()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    run, tied, compiled = sharded("blocks.0"), net(), net()
    run.blocks[0](torch.ones(2, 5))
    tied.head.weight = tied.embedding.weight
    one(tied.embedding)
    fxshard.compile(compiled.blocks[0])
    whole, meshes, offloaded, twice = sharded(""), net(), net(), sharded("blocks.1")
    one(meshes.blocks[0], mesh=mesh)
    one(offloaded.blocks[0], offload_policy=CPUOffloadPolicy(pin_memory=False))
    found = {
        "twice": told(lambda: one(twice.blocks[1])),
        "twice, the root": told(lambda: one(whole)),
        "top down": told(lambda: one(whole.blocks[0])),
        "has run": told(lambda: one(run)),
        "tied": told(lambda: one(tied)),
        "compiled": told(lambda: one(compiled)),
        "around": told(lambda: one(meshes, shard_placement_fn=lambda p: Shard(p.dim()))),
        "offload": told(lambda: one(offloaded)),
        "no module": told(lambda: one("blocks")),
        "dp_mesh_dims": told(lambda: one(model, dp_mesh_dims="dp")),
        "placement": told(lambda: one(model, shard_placement_fn=lambda p: Shard(p.dim()))),
        "no rank": told(lambda: one(model, reshard_after_forward=0)),
    }
    assert type(model) is Net and not any(isinstance(p, DTensor) for p in model.parameters())
    # after an error all is as it was: blocks are roots of their own, and the right call works
    assert isinstance(meshes.blocks[0], fxshard.FxshardModule)
    one(meshes, mesh=mesh)
    assert not isinstance(meshes.blocks[0], fxshard.FxshardModule)
    assert meshes.blocks[0].mlp.weight.placements == (Shard(0),)
    meshes(torch.tensor([[1]])).sum().backward()
    replicated = net()
    one(replicated, mesh=grid)
    assert replicated.scale.placements == (Replicate(), Shard(0))
    return found


REFUSALS = {
    "twice": "this Block is sharded already",
    "twice, the root": "this Net is sharded already",
    "top down": "on blocks first, and on the model last",
    "has run": "'blocks.0' of this Net has run already",
    "tied": "'head.weight' of this Net was tied to 'weight'",
    "compiled": "'blocks.0' of this Net was given to fxshard.compile before",
    "around": "for parameter 'scale'",
    "offload": "give all calls the same offload_policy",
    "no module": "takes an nn.Module or a list of them, not 'blocks'",
    "dp_mesh_dims": "Give the data-parallel part of the mesh alone",
    "placement": "Return a dimension that it has, or None",
    "no rank": "expected True, False, or the number of ranks",
}


def test_what_cannot_be_is_refused_with_what_to_do(ranks: Any) -> None:
    for found in ranks(2).run(refusals):
        assert found.keys() == REFUSALS.keys()
        for case, said in REFUSALS.items():
            assert said in found[case], (case, found[case])


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "replicate": replicate,
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": lambda block: FullyShardedDataParallel(
        block, device_id=torch.device("cpu")
    ),
}


def parts_of_torchs(rank: int, world_size: int) -> list[str]:
    """What each verb says of a model with a part whose gradients torch reduces."""
    found = []
    for name, wrap in WRAPPERS.items():
        for verb in (fxshard.fully_shard, fxshard.compile, fxshard.shard):
            model = net()
            model.blocks[1] = wrap(model.blocks[1])
            before = dict(model.named_parameters())
            said = told(functools.partial(verb, model))
            assert f"module 'blocks.1' is one of torch's {name}" in said, said
            after = dict(model.named_parameters())
            assert type(model) is Net and all(after[key] is before[key] for key in before)
            found.append(said)
    return found


def test_parts_whose_gradients_torch_reduces_are_refused(ranks: Any) -> None:
    for found in ranks(2).run(parts_of_torchs):
        assert all("Give fxshard the plain module" in said for said in found)


def without_root(rank: int, world_size: int) -> str:
    model = sharded("blocks.0", "blocks.1", "blocks.2")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2]])).sum().backward()
    blocks = torch.optim.AdamW(model.blocks.parameters())
    blocks.step()  # these are reduced: each block runs as a root of its own, as under FSDP2
    return told(optimizer.step)


def test_a_model_whose_root_was_never_given_is_not_stepped(ranks: Any) -> None:
    for said in ranks(2).run(without_root):
        assert said.startswith("StepError") and "Call fully_shard on the model too" in said


def test_without_a_process_group() -> None:
    with pytest.raises(fxshard.ConfigError, match="no process group is initialised"):
        fxshard.fully_shard(net())
