"""fxshard.compile_step on what models have: buffers, dropout, tied, frozen and unused parameters.

The reference is the loop in FSDP2, or eager on one process.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxshard
from tests.api.compile_step_cases import (
    MAX_NORM,
    OPTIMIZERS,
    UNITS,
    assert_same,
    batch,
    left,
    looped,
    loss_fn,
    net,
    rank_now,
    stepped,
)
from tests.distributed.tensor_parallel_cases import LENGTH, VOCABULARY, Llama, of_sequences


class Odd(nn.Module):
    """Batch norm, dropout, a tied head, a layer that is called again, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.3)
        self.never = nn.Linear(2, 2)
        self.head = nn.Linear(5, 3)
        self.again = nn.Linear(5, 3)
        self.again.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(x)))
        for layer in (*self.layers, self.layers[0]):
            x = x + torch.tanh(layer(x))
        return self.head(x) + self.again(x)


def odd(frozen: str = "") -> Odd:
    torch.manual_seed(0)
    made = Odd()
    for name, param in made.named_parameters():
        param.requires_grad_(name != frozen)
    return made


def of_odd_models(rank: int, world_size: int, frozen: str) -> None:
    theirs: Any = odd(frozen)
    for layer in theirs.layers:
        fully_shard(layer)
    fully_shard(theirs)
    torch.manual_seed(7 + rank)
    trained = [param for param in theirs.parameters() if param.requires_grad]
    want = looped(theirs, OPTIMIZERS["adamw"](trained), MAX_NORM)
    ours = odd(frozen)
    optimizer = OPTIMIZERS["adamw"]([p for p in ours.parameters() if p.requires_grad])
    step: Any = fxshard.compile_step(ours, loss_fn, optimizer, max_norm=MAX_NORM, units=UNITS)
    torch.manual_seed(7 + rank)
    assert_same(stepped(step), want)


@pytest.mark.parametrize("frozen", ["", "layers.1.weight"])
def test_odd_models_are_bitwise_fsdp2_s(ranks: Any, frozen: str) -> None:
    ranks(2).run(of_odd_models, frozen)


class Called(nn.Module):
    """A call with several arguments, by position and by name, and a dict for a result."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, scale: float, *, mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(x) * scale, "mask": mask}


def of_dict(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(output["logits"], target["y"], reduction="none")
    return (losses * output["mask"] * target["weight"]).mean()


def test_several_arguments_and_trees() -> None:
    model, eager = Called(), Called()
    optimizer = OPTIMIZERS["sgd momentum"](model.parameters())
    reference = OPTIMIZERS["sgd momentum"](eager.parameters())
    step: Any = fxshard.compile_step(model, of_dict, optimizer, world_size=2)
    for number in range(3):
        x, y = batch(0, number)
        mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
        target = {"y": y, "weight": torch.full((4,), 0.5)}
        reference.zero_grad()
        loss = of_dict(eager(x, 2.0, mask=mask), target)
        loss.backward()
        reference.step()
        torch.testing.assert_close(step(x, 2.0, target, mask=mask), loss.detach())
        assert step.grad_norm is None
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


class Labelled(nn.Module):
    """As Hugging Face's: the loss is one of several things that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": loss_fn(logits, labels), "logits": logits}


def of_output(output: dict[str, Tensor]) -> Tensor:
    return output["loss"]


def of_calls_by_name(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    ours, theirs = Labelled(), Labelled()
    optimizer = OPTIMIZERS["adamw"](ours.parameters())
    fully_shard(theirs)
    reference = OPTIMIZERS["adamw"](theirs.parameters())
    step: Any = fxshard.compile_step(ours, of_output, optimizer)
    for number in range(3):
        x, y = batch(rank, number)
        loss = of_output(theirs(x=x, labels=y))
        loss.backward()
        reference.step()
        reference.zero_grad()
        assert torch.equal(step(x=x, labels=y), loss.detach())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())


def test_a_loss_of_the_output_alone(ranks: Any) -> None:
    ranks(2).run(of_calls_by_name)


@pytest.mark.parametrize(
    "options",
    [{"chunk_loss": 2}, {"backend": "inductor"}, {"checkpoint": "full", "backend": "inductor"}],
    ids=["chunks", "inductor", "inductor recomputed"],
)
def test_the_loss_is_part_of_the_program(options: dict[str, Any]) -> None:
    """Its chunks, though the user's loss is outside of the model; and its kernels."""
    model, eager = net(), net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    reference = OPTIMIZERS["adamw"](eager.parameters())
    step: Any = fxshard.compile_step(
        model, loss_fn, optimizer, max_norm=MAX_NORM, world_size=2, units=UNITS, **options
    )
    for number in range(3):
        reference.zero_grad()
        x, y = batch(0, number)
        loss = loss_fn(eager(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), MAX_NORM)
        reference.step()
        torch.testing.assert_close(step(x, y), loss.detach())
        torch.testing.assert_close(step.grad_norm, norm)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    if "chunk_loss" in options:
        losses = [
            n for n in step.plan.program.graph.nodes if "_log_softmax.default" in str(n.target)
        ]
        assert len(losses) == 2


def test_after_an_exception_between_steps_of_units_calls_are_refused() -> None:
    """Until all that was half-written is loaded."""
    model = net()
    step: Any = fxshard.compile_step(
        model, loss_fn, OPTIMIZERS["adamw"](model.parameters()), world_size=2, units=UNITS
    )
    step(*batch(0, 0))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    own = step.optimizer.step_parameters
    calls: list[int] = []

    def fails(*given: Any) -> None:
        calls.append(0)
        if len(calls) == 2:
            raise RuntimeError("no space left on device")
        own(*given)

    step.optimizer.step_parameters = fails
    with pytest.raises(RuntimeError, match="no space left"):
        step(*batch(0, 1))
    del step.optimizer.step_parameters
    with pytest.raises(fxshard.StepError, match=r"had stepped .* and not all parameters"):
        step(*batch(0, 1))
    model.load_state_dict(state)
    step(*batch(0, 1))


def test_hooks_after_a_step_run_once_all_units_are_stepped() -> None:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step: Any = fxshard.compile_step(model, loss_fn, optimizer, world_size=2, units=UNITS)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    seen: list[list[str]] = []

    def hook(*given: Any) -> None:
        now = dict(model.named_parameters())
        seen.append([name for name, was in before.items() if torch.equal(now[name], was)])

    optimizer.register_step_post_hook(hook)
    step(*batch(0, 0))
    step(*batch(0, 1))
    assert seen == [[], []]


def tied_to_the_loop(rank: int, world_size: int) -> None:
    """State that an optimizer has from steps before sharding is taken over: its rows."""
    plain = net()
    optimizer = OPTIMIZERS["adamw"](plain.parameters())
    x, y = batch(9, 9)
    loss_fn(plain(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    eager = net()
    reference = OPTIMIZERS["adamw"](eager.parameters())
    loss_fn(eager(x), y).backward()
    reference.step()
    step: Any = fxshard.compile_step(plain, loss_fn, optimizer, max_norm=MAX_NORM, units=UNITS)
    for number in range(2):
        parts = [batch(each, number) for each in range(world_size)]
        joined = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        reference.zero_grad()
        loss_fn(eager(joined[0]), joined[1]).backward()
        nn.utils.clip_grad_norm_(eager.parameters(), MAX_NORM)
        reference.step()
        step(*parts[rank_now()])
    found = left(step.model, step.optimizer, [], [])
    for key, value in left(eager, reference, [], []).items():
        torch.testing.assert_close(found[key], value, msg=key)


def test_an_optimizer_that_has_stepped_before(ranks: Any) -> None:
    ranks(2).run(tied_to_the_loop)


def of_tensor_parallel(rank: int, world_size: int) -> None:
    """Without clipping as the loop; with it, refused: norms are of other ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def made() -> Any:
        torch.manual_seed(0)
        made = Llama()
        of_sequences(made, mesh["tp"])
        return made

    def of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    def tokens(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
        return torch.randint(VOCABULARY, (2, LENGTH), generator=generator)

    reference: Any = made()
    for layer in reference.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(reference, mesh=mesh["dp"])
    theirs = OPTIMIZERS["adamw"](reference.parameters())
    model = made()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step: Any = fxshard.compile_step(model, of_tokens, optimizer, mesh=mesh, units=UNITS)
    for number in range(3):
        theirs.zero_grad()
        loss = of_tokens(reference(tokens(number)), tokens(number))
        loss.backward()
        theirs.step()
        assert torch.equal(step(tokens(number), tokens(number)), loss.detach())
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), other.full_tensor())
    model = made()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(fxshard.ConfigError, match="max_norm beside parameters on several meshes"):
        fxshard.compile_step(model, of_tokens, optimizer, max_norm=1.0, mesh=mesh, units=UNITS)
    assert type(model) is Llama and type(optimizer) is torch.optim.AdamW


def test_beside_tensor_parallelism(ranks: Any) -> None:
    ranks(4).run(of_tensor_parallel)
