"""The reference, torch's FSDP2 on a zoo case; the step loop that all share; comparisons."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from tests.zoo import Case

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Result:
    """What a training run left behind, as one rank sees it; tensors are unsharded, on CPU."""

    losses: list[float]  # one per step, of this rank's batch
    grads: list[
        dict[str, Tensor | None]
    ]  # one dict per step: FQN -> gradient before the optimizer step
    params: dict[str, Tensor]  # FQN -> parameter after the last step
    buffers: dict[str, Tensor]  # FQN -> buffer after the last step, of this rank


def adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=1e-2)


def train(
    case: Case,
    steps: int,
    *,
    optimizer: MakeOptimizer = adamw,
    fully_shard: Callable[..., Any] = fully_shard,
    **options: Any,
) -> Result:
    """FSDP2 on the default process group; call in every rank. Options go to every `fully_shard`."""
    torch.manual_seed(0)
    model = case.build()
    for unit in units_of(model, case):
        fully_shard(unit, **options)
    fully_shard(model, **options)
    return run_steps(model, case, steps, optimizer=optimizer)


def train_single(
    case: Case, steps: int, world_size: int, *, optimizer: MakeOptimizer = adamw
) -> Result:
    """Plain eager in this process, on the batches of all ranks: the loss is the mean of theirs.

    Equal to FSDP2 up to rounding; not for models with batch norm or dropout.
    """
    assert not case.dropout and not case.batch_norm, case.name
    torch.manual_seed(0)
    return run_steps(case.build(), case, steps, optimizer=optimizer, ranks=range(world_size))


def run_steps(
    model: nn.Module,
    case: Case,
    steps: int,
    *,
    optimizer: MakeOptimizer = adamw,
    ranks: Sequence[int] | None = None,
) -> Result:
    """Train a module whose parameters are plain tensors, or DTensors (then call it in every rank).

    `ranks`: whose batches this process takes, with their mean loss; by default its own only.
    """
    if ranks is None:
        ranks = [dist.get_rank() if dist.is_initialized() else 0]
    optim = optimizer(model.parameters())
    losses, grads = [], []
    for step in range(steps):
        torch.manual_seed(100 + step)
        each = []
        for rank in ranks:
            args, kwargs = case.batch(rank, step)
            each.append(case.loss(model(*args, **kwargs)))
        loss = each[0] if len(each) == 1 else torch.stack(each).mean()
        loss.backward()
        losses.append(loss.item())
        grads.append(
            {fqn: None if p.grad is None else full(p.grad) for fqn, p in model.named_parameters()}
        )
        optim.step()
        optim.zero_grad()
    params = {fqn: full(p) for fqn, p in model.named_parameters()}
    return Result(losses, grads, params, {fqn: full(b) for fqn, b in model.named_buffers()})


def units_of(model: nn.Module, case: Case) -> list[nn.Module]:
    """The case's FSDP units besides the root, in module order."""
    return [
        m
        for fqn, m in model.named_modules()
        if any(_matches(fqn, glob) for glob in case.units or ())
    ]


def _matches(fqn: str, glob: str) -> bool:
    names, patterns = fqn.split("."), glob.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def full(tensor: Tensor) -> Tensor:
    """A clone on CPU; of a DTensor the unsharded one (collective)."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)


def assert_bitwise(a: Result, b: Result) -> None:
    """Losses, gradients, parameters, buffers have the same bits: -0.0 is not 0.0, NaN is NaN."""
    _assert_same(a, b, lambda x, y: torch.equal(_bits(x), _bits(y)), "not bitwise equal")


def assert_close(a: Result, b: Result, rtol: float) -> None:
    """Tensors differ by at most `rtol` times `max(1, abs(b).max())`."""

    def close(x: Tensor, y: Tensor) -> bool:
        if y.numel() == 0:
            return True
        x, y = x.double(), y.double()
        return bool((x - y).abs().max() <= rtol * y.abs().max().clamp(min=1))

    _assert_same(a, b, close, f"not within {rtol:g}")


def _assert_same(
    a: Result, b: Result, same: Callable[[Tensor, Tensor], bool], complaint: str
) -> None:
    left, right = dict(_rows(a)), dict(_rows(b))
    for where in [*left, *(key for key in right if key not in left)]:
        if where not in left or where not in right:
            raise AssertionError(
                f"{where}: only in the {'first' if where in left else 'second'} result"
            )
        x, y = left[where], right[where]
        if x is None or y is None:
            if x is not y:
                raise AssertionError(
                    f"{where}: None only in the {'first' if x is None else 'second'} result"
                )
        elif (x.shape, x.dtype) != (y.shape, y.dtype):
            raise AssertionError(
                f"{where}: {tuple(x.shape)} {x.dtype} against {tuple(y.shape)} {y.dtype}"
            )
        elif not same(x, y):
            difference = (x.double() - y.double()).abs().max()
            elements = int((_bits(x) != _bits(y)).any(-1).sum())
            raise AssertionError(
                f"{where}: {complaint}: max difference {difference:.3e}, "
                f"in {elements} of {x.numel()} elements"
            )


def _rows(result: Result) -> Iterator[tuple[str, Tensor | None]]:
    """("step 1, grad of layers.0.weight", tensor), ... in the order in which things happened."""
    for step, (loss, grads) in enumerate(zip(result.losses, result.grads, strict=True)):
        yield f"step {step}, loss", torch.tensor(loss, dtype=torch.float64)
        for fqn, grad in grads.items():
            yield f"step {step}, grad of {fqn}", grad
    for fqn, param in result.params.items():
        yield f"after step {len(result.losses) - 1}, parameter {fqn}", param
    for fqn, buffer in result.buffers.items():
        yield f"after step {len(result.losses) - 1}, buffer {fqn}", buffer


def _bits(tensor: Tensor) -> Tensor:
    """uint8, the tensor's shape with its element's bytes as one more dimension."""
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)
