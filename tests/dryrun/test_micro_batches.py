"""What belongs to which forward: heads that a loss calls, forwards before their backwards."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.memory.ledger import Ledger


class Decoder(nn.Module):
    """Blocks with a head that forward leaves to the loss, as torchtitan's chunked loss has it."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(8, 100)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def in_chunks(model: Decoder) -> None:
    hidden = model(torch.randn(4, 8))
    whole = hidden.detach().requires_grad_()
    for chunk in whole.split(2):
        model.head(chunk).square().sum().backward()
    hidden.backward(whole.grad)


def two_at_once(model: Decoder) -> None:
    first, second = model(torch.randn(4, 8)), model(torch.randn(2, 8))
    first.sum().backward()
    second.sum().backward()


def dry(step: Callable[[Decoder], None], checkpointed: bool = False) -> fxshard.DryRun:
    with fxshard.dry_run(world_size=1, device="cpu") as run:
        model = Decoder(checkpointed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model)
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    return run


def of_module(ledger: Ledger, phase: str, micro_batch: int, module: str) -> list[str]:
    """The products that run there."""
    same = [p for p in ledger.phases if (p.name, p.micro_batch) == (phase, micro_batch)]
    moments = [moment for p in same for moment in ledger.of_phase(p)]
    return [m.op for m in moments if m.module == module and "mm." in m.op]


def test_a_head_that_the_loss_calls_is_part_of_the_forward_before() -> None:
    report = dry(in_chunks).memory
    assert len(report.calls) == 1
    assert [call.module for call in report.calls[0]].count("head") == 2
    for number in (0, 1):
        assert report.spans(0)["head", number].keys() == {"forward", "backward"}
    # Its logits die before those of the next chunk are made.
    peaks = [report.ledger().totals[t] for t in report.ticks().values()]
    assert max(map(int, peaks)) == report.peak_bytes


def test_forwards_before_their_backwards() -> None:
    for checkpointed in (False, True):  # the product is recomputed
        report = dry(two_at_once, checkpointed).memory
        for micro_batch in (0, 1):
            counts = [
                len(of_module(report.steady, phase, micro_batch, "blocks.1.0"))
                for phase in ("forward", "backward")
            ]
            assert counts == [1, 2 + checkpointed]
            assert report.spans(micro_batch)["blocks.1", 0].keys() == {"forward", "backward"}
