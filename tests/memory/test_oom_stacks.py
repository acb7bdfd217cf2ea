"""What stacks tell: those of a real FSDP2 step, under the rules for torch's own functions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fxshard._torch import process_groups
from fxshard.memory.category import Category
from fxshard.memory.oom.explain import explain_oom
from fxshard.memory.oom.snapshot import Frame
from fxshard.memory.oom.stacks import BACKWARD, UNKNOWN, StackOrigin, origin
from tests.memory.recorded import recorded
from tests.memory.snapshots import TORCH, Program


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 16)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_stacks_of_a_real_step(sharded: bool, checkpointed: bool, tmp_path: Path) -> None:
    """Shards and optimizer states by category, to the byte; what is saved is of its module."""
    program = Program()
    with process_groups.fake_process_group(0, 2), recorded(program):
        model = Model(checkpointed).double()
        if sharded:
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            loss = model(torch.randn(4, 32, dtype=torch.float64)).square().mean()
            if step == 0:
                program.dump(tmp_path / "forward.pickle")
            loss.backward()
            del loss
            program.dump(tmp_path / "backward.pickle")
            optimizer.step()
            program.dump(tmp_path / "step.pickle")
            optimizer.zero_grad()
    shards = sum(local(p).untyped_storage().nbytes() for p in model.parameters())
    states = sum(
        local(s).untyped_storage().nbytes() for p in optimizer.state.values() for s in p.values()
    )

    def end(name: str) -> dict[tuple[str, ...], tuple[int, int]]:
        return explain_oom(tmp_path / f"{name}.pickle").moments[-1].by("category")

    forward, backward, step_ = end("forward"), end("backward"), end("step")
    for found in (forward, backward, step_):
        assert found["Sharded Param",][0] == shards
    assert backward["OptState",][0] == step_["OptState",][0] == states
    assert ("OptState",) not in forward and ("Activation",) not in step_
    gradients = "Sharded Grad" if sharded else "Unsharded Grad"
    assert step_[gradients,][0] >= shards
    assert backward["Reduce Scatter" if sharded else BACKWARD,][0] >= shards
    assert bool(forward.get(("Unsharded Param",))) == sharded  # the root's stay
    assert step_.keys() <= {("Sharded Param",), ("OptState",), (gradients,), (UNKNOWN,)}
    saved = explain_oom(tmp_path / "forward.pickle").moments[-1].by("category", "module")
    assert saved["Activation", "Model > nn.linear"][0] == 4 * 16 * 8
    inside = saved.get(("Activation", "Model > Block"), (0, 0))[0] >= 3 * 4 * 128 * 8
    assert inside == (not checkpointed)


def test_the_peak_of_a_real_step_has_its_gathers_and_reductions(tmp_path: Path) -> None:
    program = Program()
    with process_groups.fake_process_group(0, 2), recorded(program):
        model = Model(checkpointed=True).double()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        model(torch.randn(4, 32, dtype=torch.float64)).sum().backward()
    found = explain_oom(program.dump(tmp_path / "s.pickle")).moments[0].by("category")
    names = {name for (name,) in found}
    assert {"Sharded Param", "Unsharded Param", "Reduce Scatter", BACKWARD} <= names
    assert found.get((UNKNOWN,), (0, 0))[0] < 0.05 * sum(size for size, _ in found.values())


# -- rules, by hand --------------------------------------------------------------------------------


def told(*frames: tuple[str, str], **how: Any) -> StackOrigin:
    return origin(tuple(Frame(p.replace("torch:", TORCH), 7, f) for p, f in frames), **how)


MODULE = [("torch:/nn/modules/module.py", "_call_impl")]
ENGINE_IN_CPLUSPLUS = ("??", "torch::autograd::Engine::thread_main(...)")


@pytest.mark.parametrize(
    ("category", "frames"),
    [
        ("Activation", [("/u/model.py", "forward"), *MODULE, ("/u/train.py", "<module>")]),
        ("Activation", [("/u/model.py", "Net.forward"), *MODULE]),
        ("Activation", [("torch:/nn/functional.py", "cross_entropy"), ("/u/train.py", "main")]),
        (UNKNOWN, [("/u/train.py", "main")]),
        (UNKNOWN, [("/u/forward.py", "main")]),
        (UNKNOWN, [("??", "at::native::mm(...)"), ("libc.so.6", "start")]),
        (BACKWARD, [("??", "at::native::mm(...)"), ENGINE_IN_CPLUSPLUS]),
        ("Unsharded Grad", [("??", "torch::autograd::AccumulateGrad::apply"), ENGINE_IN_CPLUSPLUS]),
        (BACKWARD, [("/u/f.py", "backward"), ("torch:/autograd/function.py", "apply")]),
        ("Activation", [("/u/f.py", "forward"), ("torch:/autograd/function.py", "apply")]),
        (UNKNOWN, [("/u/f.py", "helper"), ("torch:/autograd/function.py", "apply")]),
        ("OptState", [("torch:/optim/adamw.py", "_init_group"), ("torch:/optim/adamw.py", "step")]),
        ("Temp", [("torch:/optim/sgd.py", "_multi_tensor_sgd")]),
        ("Temp", [("/u/muon.py", "step"), ("torch:/optim/optimizer.py", "wrapper")]),
        (UNKNOWN, [("/u/train.py", "f"), ("torch:/optim/lr_scheduler.py", "step")]),
        ("Activation", [("/u/model.py", "forward"), ("torch:/optim/lbfgs.py", "step")]),
        ("Sharded Param", [("torch:/nn/modules/linear.py", "__init__"), ("/u/m.py", "__init__")]),
        ("Sharded Param", [("torch:/nn/modules/module.py", "to_empty")]),
        ("Unsharded Grad", [("torch:/nn/parallel/distributed.py", "_ddp_init_helper")]),
        ("Inputs", [("/x/site-packages/accelerate/utils/operations.py", "send_to_device")]),
    ],
)
def test_rules(category: str, frames: list[tuple[str, str]]) -> None:
    found = told(*frames)
    assert found.category == category
    assert found.why


def test_a_name_of_a_category_or_unknown_and_nothing_else() -> None:
    assert origin((), recorded=False).category == UNKNOWN
    assert origin((), recorded=True).category == BACKWARD
    assert told(("/u/x.py", "f"), label="Temp").category == "Temp"
    assert told(("/u/x.py", "f"), label="made up").category == UNKNOWN
    assert {each.value for each in Category}.isdisjoint({UNKNOWN, BACKWARD})


def test_modules_are_the_chain_of_forwards(tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text("class A:\n    def forward(self):\n        pass\n\n\n    x = 1\n")
    here = Frame(str(source), 3, "forward")
    gone = Frame("/nowhere/net.py", 3, "forward")
    linear = Frame(f"{TORCH}/nn/modules/linear.py", 125, "forward")
    assert origin((linear, here)).module == "A > nn.linear"
    assert origin((linear, gone)).module == "net.py > nn.linear"
    assert origin((here._replace(line=6),)).module == "net.py"
    assert origin((here._replace(function="C.forward"),)).module == "C"
    assert origin((linear, here)).line == f"{source}:3 in forward"


@pytest.mark.parametrize("path", ["/dev/zero.py", "/dev/stdin", "/proc/self/mem", "x\0.py", ""])
def test_a_path_that_is_no_source_is_not_opened(path: str) -> None:
    assert origin((Frame(path, 1, "forward"),)).category in ("Activation", UNKNOWN)
