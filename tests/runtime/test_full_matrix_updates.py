"""`fxshard.full_matrix_updates`: optimizers of users whose updates need all of a matrix."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fxshard
from fxshard.errors import RankDiedError, RankMismatchError
from tests.fsdp2 import full
from tests.ranks import told
from tests.runtime.full_matrix_cases import Preconditioned
from tests.runtime.muon_cases import OPTIONS, batch, built, compiled, counted, set_gradients
from tests.subclasses import Narrow, wrapped


def matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == 2]


def like_one_process(rank: int, world_size: int, name: str) -> None:
    model, plain = compiled(name), built()
    ours, theirs = (Preconditioned(matrices(m), lr=0.1) for m in (model, plain))
    for step in range(3):
        model(batch(rank, step)).backward()
        set_gradients(plain, model)
        assert counted(ours.step) == {"c10d.alltoall_base_": 2}
        theirs.step()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        for mine, other in pairs:
            assert torch.equal(full(mine.detach()), other)
        ours.zero_grad()
    owned = [[param is mine for mine in ours.state] for param in matrices(model)]
    everywhere: list[Any] = [None] * world_size
    dist.all_gather_object(everywhere, [any(each) for each in owned])
    assert [sum(each) for each in zip(*everywhere, strict=True)] == [1] * 4  # one owner each


@pytest.mark.parametrize(("ranks_of", "name"), [(2, "uneven"), (3, "columns")])
def test_a_shampoo_is_bitwise_that_of_one_process(ranks: Any, ranks_of: int, name: str) -> None:
    assert name in OPTIONS
    ranks(ranks_of).run(like_one_process, name)


def frozen_meanwhile(rank: int, world_size: int) -> None:
    """Other matrices are updated in each step, which would balance them otherwise."""
    model, plain = compiled(), built()
    ours, theirs = (Preconditioned(matrices(m), lr=0.1) for m in (model, plain))
    for frozen in ((3,), (0, 1), (), (2,)):
        for number, (mine, other) in enumerate(zip(matrices(model), matrices(plain), strict=True)):
            mine.requires_grad_(number not in frozen)
            other.requires_grad_(number not in frozen)
        model(batch(rank, len(frozen))).backward()
        set_gradients(plain, model)
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            mine.grad = None
            assert torch.equal(full(mine.detach()), other)


def test_owners_stay_when_other_parameters_are_frozen(ranks: Any) -> None:
    ranks(3).run(frozen_meanwhile)


def given(rank: int, world_size: int) -> None:
    """Any tensors that are sharded as their parameters; several dtypes; FLOPs of the user's."""
    model = compiled()
    params = [*model.parameters()]
    tensors = [p.detach().to(torch.bfloat16) if p.dim() == 2 else p.detach() for p in params]
    found = fxshard.full_matrix_updates(
        params, tensors, lambda _, full: full.flip(0), flops=lambda p: p.numel()
    )
    for update, tensor in zip(found, tensors, strict=True):
        assert update.dtype is tensor.dtype and update.placements == tensor.placements
        assert torch.equal(full(update), full(tensor).flip(0))


def test_any_tensors_in_their_dtypes(ranks: Any) -> None:
    ranks(2).run(given)


def another_shape(rank: int, world_size: int) -> list[str]:
    """Refusals that all ranks make alike; then what an owner alone finds."""
    model = compiled()
    params = matrices(model)
    model(batch(rank, 0)).backward()
    found = [
        told(lambda: fxshard.full_matrix_updates(params[:1], [torch.ones(7)], keep)),
        told(lambda: fxshard.full_matrix_updates(params[:1], [params[1].grad], keep)),  # type: ignore[list-item]
        told(lambda: fxshard.full_matrix_updates(params[rank : rank + 1], [g(params[rank])], keep)),
    ]
    return found


def keep(param: Tensor, full: Tensor) -> Tensor:
    return full


def g(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def test_what_does_not_fit_is_refused(ranks: Any) -> None:
    for plain, other, apart in ranks(2).run(another_shape):
        assert plain.startswith("StepError") and "'tall.weight'" in plain
        assert other.startswith("StepError") and "sharded as it is" in other
        assert apart.startswith(RankMismatchError.__name__)


def a_row(rank: int, world_size: int) -> str:
    model = compiled()
    params = matrices(model)
    model(batch(rank, 0)).backward()
    update = lambda _, full: full[:1] if len(full) > 5 else full  # noqa: E731
    return told(lambda: fxshard.full_matrix_updates(params, [g(p) for p in params], update))


def test_an_update_of_another_shape_ends_all_ranks(ranks: Any) -> None:
    found = ranks(2).run_expecting_errors(a_row)
    assert any("has the shape [1, 7]: expected the same" in each for each in found)
    names = ("StepError", RankMismatchError.__name__, RankDiedError.__name__)
    assert all(each.startswith(names) for each in found)


def kept_by_owners(rank: int, world_size: int, path: str) -> str:
    model = compiled()
    optimizer = Preconditioned(matrices(model), lr=0.1)
    model(batch(rank, 0)).backward()
    optimizer.step()
    fxshard.save_checkpoint(path, model, optimizer)
    return told(lambda: fxshard.load_checkpoint(path, model, optimizer))


def test_what_owners_keep_is_saved_and_not_loaded(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2).run(kept_by_owners, str(tmp_path)):
        assert found.startswith("CheckpointError")
        assert "no place for: optimizer.state.last.weight.left" in found


def of_a_subclass(rank: int, world_size: int) -> str:
    model = fxshard.compile(wrapped(torch.nn.Sequential(torch.nn.Linear(4, 4)), Narrow))
    optimizer = torch.optim.Muon([model[0].weight])
    model(torch.ones(2, 4)).float().sum().backward()
    return told(optimizer.step)


def test_tensor_subclasses_are_refused(ranks: Any) -> None:
    for found in ranks(2).run(of_a_subclass):
        assert found.startswith("StepError") and "'0.weight', a Narrow" in found
    model = wrapped(torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False)), Narrow)
    plan = fxshard.plan(model, (torch.ones(2, 4),), world_size=2, optimizer=torch.optim.Muon)
    with pytest.raises(fxshard.ConfigError, match=r"'0.weight', of a tensor subclass .* an update"):
        plan.dump()


def test_plain_parameters_are_updated_here() -> None:
    param = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    tensor = param.detach().clone()
    (found,) = fxshard.full_matrix_updates([param], [tensor], lambda _, full: full.mul_(2))
    assert torch.equal(found, 2 * param) and torch.equal(tensor, param)
