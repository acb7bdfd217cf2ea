"""Parameters of tensor subclasses that say what is gathered, beside FSDP2 and eager PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing import assert_close

import fxshard
from fxshard.errors import StepError
from fxshard.ir import dump
from fxshard.verify.certificate import collectives
from tests.fsdp2 import full
from tests.subclasses import Bf16, Float8, Int8, Multiplied, Narrow, Wrapped, wrapped

STEPS = 3
KINDS = {kind.__name__: kind for kind in (Narrow, Bf16, Int8, Multiplied, Float8)}


class Linear(nn.Linear):
    """Computes in the dtype of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return nn.functional.linear(x.to(self.weight.dtype), self.weight, bias)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)).relu().float()


class Net(nn.Module):
    """f32[n, 6] -> f32[n, 4]; the weights of its linear layers are of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.head = Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


def net(kind: Callable[[Tensor], Any]) -> Any:
    torch.manual_seed(0)
    return wrapped(Net(), kind)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 4, generator=generator)


def unwrapped(tensor: Tensor) -> Tensor:
    """All rows, as numbers."""
    whole = full(tensor)
    return whole.data_inside if isinstance(whole, Wrapped) else whole


def trained(model: Any, ranks: list[int], steps: int = STEPS) -> list[Any]:
    """Loss and gradients of each step on the batches of `ranks`; the parameters after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for step in range(steps):
        both = [batch(rank, step) for rank in ranks]
        x, y = (torch.cat(tensors) for tensors in zip(*both, strict=True))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        grads = {fqn: unwrapped(p.grad) for fqn, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        params = {fqn: unwrapped(p) for fqn, p in model.named_parameters()}
        found.append((loss.item(), grads, params))
    return found


class Eagerly(nn.Module):
    """What FSDP2 computes, in one process: unsharded parameters of the subclass's functions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: Tensor) -> Tensor:
        made = {fqn: _Unsharded.apply(p) for fqn, p in self.inner.named_parameters()}
        found: Tensor = torch.func.functional_call(self.inner, made, (x,))
        return found

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.named_parameters(*args, **kwargs)


class _Unsharded(torch.autograd.Function):
    """The unsharded parameter; its gradient goes to the parameter as it is."""

    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:
        if not isinstance(param, Wrapped):
            return param.clone()
        more = (param.shape, param.stride(), None, None)
        five = "mp_policy" in type(param).fsdp_pre_all_gather.__annotations__  # type: ignore
        sent, metadata = param.fsdp_pre_all_gather(None, *(more if five else ()))  # type: ignore
        return param.fsdp_post_all_gather(sent, metadata, param.dtype)[0]  # type: ignore

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.float()


def sharded(model: Any, fully_shard: Callable[..., Any], **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def both(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> Any:
    found = []
    for fully_shard in (fsdp.fully_shard, fxshard.fully_shard):
        model = sharded(net(KINDS[kind]), fully_shard, **options)
        found.append(trained(model, [rank]))
        local = model.head.weight.to_local()
        assert isinstance(model.head.weight, DTensor)
        assert type(model.head.weight._local_tensor) is KINDS[kind], type(local)
    return found


def assert_same(ours: list[Any], theirs: list[Any], **tolerance: float) -> None:
    for (loss, *mine), (expected, *rest) in zip(ours, theirs, strict=True):
        assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        assert_close(mine, rest, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", ["Narrow", "Int8", "Multiplied", "Float8"])
@pytest.mark.sample(3)
def test_it_trains_as_fsdp2_and_as_one_process(ranks: Any, kind: str, reshard: bool) -> None:
    found = ranks(2).run(both, kind, {"reshard_after_forward": reshard})
    for theirs, ours in found:
        assert_same(ours, theirs)
    alone = trained(Eagerly(net(KINDS[kind])), [0, 1])
    losses = [sum(ours[step][0] for _, ours in found) / 2 for step in range(STEPS)]
    assert_close(losses, [step[0] for step in alone], rtol=2e-3, atol=1e-4)
    for _, ours in found:
        assert_close(ours[0][1:], alone[0][1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Narrow", "Bf16"])
def test_it_sees_the_mixed_precision_of_its_unit_as_with_fsdp2(ranks: Any, kind: str) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for theirs, ours in ranks(2).run(both, kind, {"mp_policy": policy}):
        assert_same(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(2)
def test_in_one_process_it_trains_as_eager(kind: str) -> None:
    alone = trained(Eagerly(net(KINDS[kind])), [0])
    model = fxshard.compile(net(KINDS[kind]), world_size=2, units=["blocks.*"])
    assert type(model.head.weight) is KINDS[kind]
    exact = {"rtol": 1e-4, "atol": 1e-5} if kind != "Bf16" else {"rtol": 2e-2, "atol": 2e-2}
    assert_same(trained(model, [0]), alone, **exact)


# -- states ----------------------------------------------------------------------------------------


def states(rank: int, world_size: int, folder: str) -> None:
    """State dicts are FSDP2's: one loads the other's, directly and from torch's checkpoints."""
    torch.serialization.add_safe_globals([Int8])
    theirs = sharded(net(Int8), fsdp.fully_shard)
    ours = sharded(net(Int8), fxshard.fully_shard)
    trained(theirs, [rank], steps=1)
    state, own = theirs.state_dict(), ours.state_dict()
    assert list(own) == list(state)
    for fqn, value in state.items():
        assert isinstance(value, DTensor) and isinstance(own[fqn], DTensor)
        assert type(own[fqn]._local_tensor) is type(value._local_tensor), fqn
        assert (own[fqn].shape, own[fqn].placements) == (value.shape, value.placements)
    ours.load_state_dict(state)
    assert_same(trained(ours, [rank]), trained(theirs, [rank]))
    dcp.save(ours.state_dict(), checkpoint_id=folder)
    for fully_shard in (fsdp.fully_shard, fxshard.fully_shard):
        other = sharded(net(Int8), fully_shard)
        into = other.state_dict()
        dcp.load(into, checkpoint_id=folder)
        other.load_state_dict(into)
        for fqn, param in ours.named_parameters():
            assert torch.equal(unwrapped(other.get_parameter(fqn)), unwrapped(param)), fqn


def test_state_dicts_are_those_of_fsdp2(ranks: Any, tmp_path: Any) -> None:
    ranks(2).run(states, str(tmp_path))


def accumulated(rank: int, world_size: int) -> list[list[Any]]:
    found = []
    for fully_shard in (fsdp.fully_shard, fxshard.fully_shard):
        model = sharded(net(Int8), fully_shard)
        for step in range(2):
            model.set_requires_gradient_sync(step == 1)
            x, y = batch(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
        found.append([unwrapped(p.grad) for p in model.parameters()])
    return found


def test_gradients_accumulate_as_with_fsdp2(ranks: Any) -> None:
    for theirs, ours in ranks(2).run(accumulated):
        assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def apart(rank: int, world_size: int) -> None:
    """What reads a parameter without the program is refused; rank 0's numbers are taken over."""
    torch.manual_seed(rank)
    model: Any = wrapped(Net(), Narrow)
    fxshard.compile(model, units=["blocks.*"], sync_module_states=True)
    torch.manual_seed(0)
    for mine, first in zip(model.parameters(), wrapped(Net(), Narrow).parameters(), strict=True):
        assert torch.equal(unwrapped(mine), unwrapped(first))
    x, _ = batch(rank, 0)
    for read in (lambda: model.blocks[0](x), lambda: model.head.weight * model.head.weight.sum()):
        with pytest.raises(StepError, match=r"weight', a Narrow, is read by eager code"):
            read()
    assert model(x).shape == (5, 4)


def patched(rank: int, world_size: int) -> None:
    """FSDP2 looks for the two functions on this rank's tensor, whenever they came there."""
    model = sharded(Net(), fxshard.fully_shard)
    x, _ = batch(rank, 0)
    model(x)
    model.head.weight._local_tensor.fsdp_pre_all_gather = Narrow.fsdp_pre_all_gather
    with pytest.raises(StepError, match=r"'head\.weight' has fsdp_pre_all_gather now"):
        model(x)


def test_functions_that_come_later_are_refused(ranks: Any) -> None:
    ranks(2).run(patched)


def test_on_ranks_only_programs_read_it(ranks: Any) -> None:
    ranks(2).run(apart)


def test_a_copy_trains_alike() -> None:
    model = compiled(Int8)
    other = copy.deepcopy(model)
    assert type(other.head.weight) is Int8
    before = trained(model, [0])
    assert_same(trained(other, [0]), before)


# -- the plan --------------------------------------------------------------------------------------


def compiled(kind: Callable[[Tensor], Any], **options: Any) -> Any:
    return fxshard.compile(net(kind), world_size=2, units=["blocks.*"], **options)


def planned(kind: Callable[[Tensor], Any], **options: Any) -> fxshard.Plan:
    given = {"world_size": 2, "units": ["blocks.*"], **options}
    return fxshard.plan(net(kind), (batch(0, 0)[0],), **given)


MEASURED: dict[str, dict[str, Any]] = {
    "full shard": {},
    "unsharded until backward": {"reshard_after_forward": False},
    "accumulated": {"micro_batches": 2, "no_sync": True},
    "hybrid": {"strategy": "hybrid_shard", "world_size": (2, 2)},
    "one rank": {"world_size": 1},
    "checkpointed": {"checkpoint": "full"},
}


@pytest.mark.parametrize(
    "kind, how",
    [("Multiplied", "full shard"), ("Float8", "full shard"), *(("Int8", how) for how in MEASURED)],
)
@pytest.mark.sample(3)
def test_its_bytes_are_known_beforehand(kind: str, how: str) -> None:
    options = {"world_size": 2, "units": ["blocks.*"], "optimizer": torch.optim.AdamW}
    found = fxshard.validate(
        net(KINDS[kind]), (batch(0, 0)[0],), loss=mean, **options | MEASURED[how]
    )
    assert found.cells
    assert found.holds, found.table(only_different=True)


def mean(output: Tensor) -> Tensor:
    return output.square().mean()


def test_what_is_sent_is_what_it_says() -> None:
    """A launch per dtype; its bytes are those of the numbers and of the scales."""
    sent = [line for line in collectives(planned(Int8).program) if "unit=1" in line]
    gathers = [line.split("bytes=")[1] for line in sent if "forward fxshard.all_gather" in line]
    assert gathers == [
        "36 [blocks.0.norm.weight+blocks.0.norm.bias+blocks.0.mlp.bias f32[9]]",
        "18 [blocks.0.mlp.weight int8[3,6]]",
        "12 [blocks.0.mlp.weight f32[3,1]]",
    ]


def test_the_dump_shows_it() -> None:
    operations = [row.operation for row in dump.rows(planned(Float8).program)]
    assert {"pre-gather", "reduce-now", "post-gather", "unshard"} <= set(operations)


# -- the meta device -------------------------------------------------------------------------------


def on_meta(kind: Callable[[Tensor], Any], fully_shard: Callable[..., Any]) -> Any:
    with torch.device("meta"):
        return sharded(wrapped(Net(), kind), fully_shard)


def written(model: Any, full: dict[str, Tensor], *_: Any) -> None:
    """Memory first, and then what fills it, as an ``init_weights`` does."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for fqn, param in model.named_parameters():
            param.copy_(distribute_tensor(full[fqn], param.device_mesh, param.placements))


def broadcast(model: Any, full: dict[str, Tensor], *_: Any) -> None:
    """FSDP2 loses the subclass so, and gathers plain tensors."""
    state = full if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def assigned(model: Any, full: dict[str, Tensor], theirs: Any, _: str) -> None:
    model.load_state_dict(theirs.state_dict(), assign=True)


def copied(model: Any, full: dict[str, Tensor], theirs: Any, _: str) -> None:
    model.load_state_dict(theirs.state_dict())


def read_back(model: Any, full: dict[str, Tensor], theirs: Any, folder: str) -> None:
    """A checkpoint of torch's of FSDP2's model."""
    torch.serialization.add_safe_globals([Int8])
    dcp.save(theirs.state_dict(), checkpoint_id=folder)
    model.to_empty(device="cpu")
    into = model.state_dict()
    dcp.load(into, checkpoint_id=folder)
    model.load_state_dict(into)


FILLED = {each.__name__: each for each in (written, broadcast, assigned, copied, read_back)}


def from_meta(rank: int, world_size: int, how: str, folder: str) -> Any:
    torch.manual_seed(7)
    full = {fqn: torch.randn(param.shape) / 3 for fqn, param in Net().named_parameters()}
    theirs, ours = (on_meta(Int8, call) for call in (fsdp.fully_shard, fxshard.fully_shard))
    assert all(param.is_meta for param in ours.parameters())
    with pytest.raises(StepError, match="on the meta device when the model was sharded"):
        ours(batch(rank, 0)[0])
    written(theirs, full)
    FILLED[how](ours, dict(full), theirs, folder)
    for fqn, param in ours.named_parameters():
        assert torch.equal(unwrapped(param), full[fqn]), fqn
    assert type(ours.head.weight._local_tensor) is Int8
    return trained(theirs, [rank]), trained(ours, [rank])


@pytest.mark.parametrize("how", FILLED)
@pytest.mark.sample(2)
def test_a_model_on_meta_is_filled_as_with_fsdp2(ranks: Any, how: str, tmp_path: Any) -> None:
    for theirs, ours in ranks(2).run(from_meta, how, str(tmp_path)):
        assert_same(ours, theirs)
