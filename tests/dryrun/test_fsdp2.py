"""`fxshard.fsdp2_memory` and the command: what a script of the same recipe takes in a dry run."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import fxshard
from fxshard._torch.fake_tensors import is_fake
from fxshard.cli.main import main
from fxshard.memory.category import Category
from tests.dryrun.compiled_models import BF16, products_are_saved

POLICY = MixedPrecisionPolicy(BF16, torch.float32)
WORLD = 4
STATE = Category.OPT_STATE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """With positions, integers that keep their values, saved for backward in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(1000, 64), nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 1000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(32, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), torch.zeros(64, dtype=torch.int64).cuda())


def script(how: str) -> fxshard.DryRun:
    """The recipe, written by hand."""
    with fxshard.dry_run(world_size=WORLD) as run:
        with torch.device("meta"):
            model = Net()
        offload: dict[str, Any] = {}
        if how == "offload":
            offload["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for i, block in enumerate(model.blocks):
            if how == "full":
                block = checkpoint_wrapper(block)
            if how == "products":
                block = checkpoint_wrapper(block, context_fn=products_are_saved)
            if how == "compile":
                block.compile()
            model.blocks[i] = block
            fully_shard(block, mp_policy=POLICY, reshard_after_forward=True, **offload)
        fully_shard(model, mp_policy=POLICY, **offload)
        model.to_empty(device="cpu" if how == "offload" else "cuda")
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        for _ in range(3):
            tokens = torch.empty(2, 32, dtype=torch.int64, device="cuda")
            logits = model(tokens)
            loss = loss_of(logits)
            loss.backward()
            del loss, logits
            optimizer.step()
            model.zero_grad()
            del tokens
            run.step()
    return run


def asked(model: nn.Module, **how: Any) -> fxshard.Fsdp2Memory:
    tokens = torch.zeros(2, 32, dtype=torch.int64, device="meta")
    optimizer = functools.partial(torch.optim.SGD, momentum=0.9)
    given = {"optimizer": optimizer, "loss": loss_of, "mixed_precision": POLICY} | how
    return fxshard.fsdp2_memory(model, (tokens,), world_size=WORLD, **given)


HOW = {
    "plain": {},
    "full": {"checkpoint": "full"},
    "products": {"checkpoint": (torch.ops.aten.mm.default,)},
    "compile": {"compile": True},
    "offload": {"offload": True},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.sample(2)
def test_the_call_takes_what_the_script_takes(how: str) -> None:
    found, wanted = asked(Net(), **HOW[how]), script(how)
    assert found.memory.first_step_peak_bytes == wanted.memory.first_step_peak_bytes
    assert found.memory.peak_by_category == wanted.memory.peak_by_category
    ours, theirs = found.device_memory(), wanted.device_memory()
    for name in ("requested", "allocated", "active", "reserved", "reserved_by_stream"):
        assert getattr(ours, name) == getattr(theirs, name), name
    if how == "offload":
        assert found.memory.offloaded and found.memory.host_peak_bytes > 0


def test_the_model_is_not_changed_and_may_be_meta() -> None:
    model = Net()
    before = copy.deepcopy(model)
    with torch.device("meta"):
        empty = Net()
    assert asked(model).memory.peak_bytes == asked(empty).memory.peak_bytes
    assert type(model) is Net and not hasattr(model, "set_requires_gradient_sync")
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), before.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def gathers(memory: fxshard.MemoryReport) -> int:
    """Of a step."""
    return sum(moment.op.startswith("c10d._allgather") for moment in memory.steady.moments)


def test_what_each_argument_is_for() -> None:
    plain = asked(Net()).memory
    logits = 2 * 64 * 1000
    dropped = asked(Net(), keep_outputs=False).memory
    # In backward of the loss the logits in bf16 are alive, whether or not autograd needs them.
    assert plain.peak_bytes - dropped.peak_bytes == logits
    per_op = asked(Net(), checkpoint="selective").memory.peak_bytes
    full = asked(Net(), checkpoint="full").memory.peak_bytes
    assert full < per_op < plain.peak_bytes
    no_units = asked(Net(), units=[]).memory
    assert [unit.fqn for unit in no_units.units] == [""]
    assert [unit.fqn for unit in plain.units] == ["", "blocks.0", "blocks.1", "blocks.2"]
    twice = asked(Net(), micro_batches=2, max_norm=1.0).memory
    assert sum(phase.name == "forward" for phase in twice.steady.phases) == 2
    assert "aten._foreach_norm.Scalar" in {moment.op for moment in twice.steady.moments}
    kept = asked(Net(), reshard_after_forward=False).memory
    # The root stays unsharded by default; without resharding so do the three blocks.
    assert (gathers(plain), gathers(kept)) == (4 + 3, 4)
    assert not [r for r in asked(Net(), optimizer=None).memory.steady.ranges if r.category is STATE]
    with pytest.raises(fxshard.ConfigError, match="'full', 'selective'"):
        asked(Net(), checkpoint="2GiB")
    with pytest.raises(fxshard.UnitError, match=r"blocks\.9"):
        asked(Net(), units=["blocks.9"])
    with pytest.raises(fxshard.ConfigError, match="compare=True"):
        asked(Net(), checkpoint=HOW["products"]["checkpoint"], compare=True)


def test_fxshards_plan_beside_it() -> None:
    found = fxshard.fsdp2_memory(
        nn.Sequential(Block(), Block()), (torch.zeros(8, 64),), world_size=WORLD, compare=True
    )
    assert found.plan is not None
    text = found.table()
    for line in ("FSDP2", "fxshard", "reserved on the device", "Peak Backward"):
        assert line in text
    ours, theirs = found.memory.rows(), found.plan.rows()
    where = next(w for w in ours if w.module == "0" and w.state.value == "Peak Forward")
    difference = sum(theirs[where].values()) - sum(ours[where].values())
    assert f"{sum(ours[where].values()):,}" in text and f"{difference:,}" in text


def test_what_keeps_values_is_small_and_never_of_meta_tensors() -> None:
    large, small = torch.ones(5 << 20), torch.ones(4)
    with fxshard.dry_run(world_size=2):
        with torch.device("meta"):
            weight = nn.Linear(4, 4).weight
        assert weight.is_meta and (weight * 2).is_meta
        assert is_fake(torch.empty_like(weight, device="cuda"))
        assert is_fake(large * 2) and is_fake(torch.zeros_like(large))
        assert not is_fake(small * 2) and float((small * 2).sum()) == 8
        assert large[:2].tolist() == [1.0, 1.0]
        with pytest.raises(NotImplementedError, match="meta tensor"):
            weight.cuda()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", f"{__name__}:Net", "--seq", "32", "--world-size", "4", "--bf16"]
    assert main(["fsdp2", *given, "--checkpoint", "full", "--compare"]) == 0
    told = capsys.readouterr().out
    assert "reserved on the device" in told and "fxshard" in told and "Peak Backward" in told
    assert main(["fsdp2", *given, "--budget", "1KiB"]) == 1
    assert "1.00 KiB given" in capsys.readouterr().err
    for wrong in (["--backend", "inductor"], ["--strategy", "no_shard"], ["--world-size", "2x2"]):
        assert main(["fsdp2", *given, *wrong]) == 2
        assert wrong[0] in capsys.readouterr().err
