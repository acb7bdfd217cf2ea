"""fxshard.shard: eager use, and torch.compile(backend="fxshard"), against FSDP2 and eager."""

import copy
import gc
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._dynamo_utils import _annotate_modules_for_dynamo
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.errors import CaptureError, ConfigError, RankMismatchError, StepError, UnitError
from fxshard.ir.program import Fact
from fxshard.runtime import reading
from tests import fsdp2
from tests.fsdp2 import Result
from tests.oracles import count_collectives
from tests.zoo import MODELS

STEPS = 5
WIDTH = 8


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Mlp(nn.Module):
    """Blocks of linear, tanh, linear, added to what goes in; then a layer norm."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


class Checkpointed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.norm(x)


class BrokenBlock(nn.Module):
    """A block with something inside that Dynamo cannot trace."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if self.kind == "print":
            print("in a block")
        elif self.kind == "break":
            torch._dynamo.graph_break()
        elif self.kind == "data":
            h = h * 2 if h.sum() > 0 else h - 1
        elif self.kind == "try":  # Dynamo gives up the frame: all of it runs as it is
            try:
                torch._dynamo.graph_break()
                h = h * self.scale.repeat(2)
            finally:
                pass
        return x + self.b(h) * self.scale


class Broken(nn.Module):
    def __init__(self, kind: str, depth: int = 2) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(BrokenBlock(kind) for _ in range(depth))
        self.out = nn.Linear(WIDTH, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.inlet(x)
        for block in self.blocks:
            h = block(h)
        return self.out(h)


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """The plain model, and an equal one that is sharded over 2 ranks inside this process."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    return plain, fxshard.shard(make(), world_size=2, **options)


def compiled(model: nn.Module, fullgraph: bool = True, **options: Any) -> Any:
    return torch.compile(model, backend="fxshard", fullgraph=fullgraph, **options)


def assert_same_step(plain: Any, sharded: Any, run: Any, *args: Any, atol: float = 1e-6) -> None:
    """Output and gradients of `run`, a way to call `sharded`, are those of `plain`."""
    expected, got = plain(*args), run(*args)
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)
    plain.zero_grad()
    sharded.zero_grad()
    expected.square().mean().backward()
    got.square().mean().backward()
    assert_same_gradients(sharded, plain, atol)


def assert_same_gradients(sharded: nn.Module, plain: nn.Module, atol: float = 1e-6) -> None:
    expected = dict(plain.named_parameters())
    assert [name for name, _ in sharded.named_parameters()] == list(expected)
    for name, param in sharded.named_parameters():
        other = expected[name].grad
        assert (param.grad is None) == (other is None), name
        if param.grad is not None and other is not None:
            torch.testing.assert_close(fsdp2.full(param.grad), other, atol=atol, rtol=0, msg=name)


def batch_of(rank: int, step: int, width: int = 4) -> Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(10 * step + rank))


def programs(model: nn.Module) -> list[Any]:
    root = reading.root_of(model)
    assert root is not None
    return [plan.program for plan in root.plans]


class Calling(nn.Module):
    """For `fsdp2.run_steps`: calls one thing, and shows the parameters of another."""

    def __init__(self, run: Any, model: nn.Module) -> None:
        super().__init__()
        self.run, self.model = run, [model]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Any:
        return self.model[0].parameters()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model[0].named_parameters()

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.model[0].named_buffers()


# -- the numbers -----------------------------------------------------------------------------------


def five_steps(rank: int, world_size: int, name: str) -> tuple[Result, Result, Result, list[int]]:
    """FSDP2, fxshard.compile, torch.compile; and peaks of the latter two's reports."""
    torch._dynamo.reset()
    case = MODELS[name]
    theirs = fsdp2.train(case, STEPS)
    torch.manual_seed(0)
    whole = fxshard.compile(case.build(), units=case.units)
    ours = fsdp2.run_steps(whole, case, STEPS)
    torch.manual_seed(0)
    model = fxshard.shard(case.build(), units=case.units)
    dynamos = fsdp2.run_steps(Calling(compiled(model), model), case, STEPS)
    reports = fxshard.reports(model)
    assert len(reports) == 1
    assert set(Fact) - {Fact.STEPPED_ONCE} <= reports[0].program.facts
    peaks = [whole.memory.peak_bytes, reports.peak_bytes, reports[0].peak_bytes]
    return theirs, ours, dynamos, peaks


@pytest.mark.parametrize("name", [pytest.param("transformer", marks=pytest.mark.slow), "llama"])
def test_five_steps_bitwise_with_fsdp2_and_fxshard_compile(ranks: Any, name: str) -> None:
    for theirs, ours, dynamos, peaks in ranks(2).run(five_steps, name):
        fsdp2.assert_bitwise(dynamos, theirs)
        fsdp2.assert_bitwise(dynamos, ours)
        whole, summed, one = peaks
        assert summed == one
        if name == "transformer":  # llama returns logits too: whether they get a gradient ...
            assert one == whole  # ... fxshard.compile asks the model's scalar outputs, Dynamo's no


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "mlp13", "convnet", "dropout"])
def test_all_of_the_zoo_is_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    for theirs, ours, dynamos, _ in ranks(2).run(five_steps, name):
        fsdp2.assert_bitwise(dynamos, theirs)
        fsdp2.assert_bitwise(dynamos, ours)


def mixed_steps(rank: int, world_size: int, policy: Any) -> tuple[Result, Result, Result]:
    torch._dynamo.reset()
    case = MODELS["transformer"]
    theirs = fsdp2.train(case, 2, mp_policy=policy)
    results = []
    for run in (compiled, lambda model: model):
        torch.manual_seed(0)
        model = fxshard.shard(case.build(), units=case.units, mixed_precision=policy)
        results.append(fsdp2.run_steps(Calling(run(model), model), case, 2))
    return theirs, results[0], results[1]


@pytest.mark.slow
def test_mixed_precision_is_bitwise_with_fsdp2(ranks: Any) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for theirs, dynamos, eager in ranks(2).run(mixed_steps, policy):
        fsdp2.assert_bitwise(dynamos, theirs)
        fsdp2.assert_close(eager, theirs, rtol=1e-6)


# -- eager use, and graph breaks -------------------------------------------------------------------

# All-gathers in forward and backward, and reduce-scatters, of a step of `Broken`, counted by hand.
# A compiled stretch: one per unit. An eager read: one per parameter, and one more in backward for
# each weight that the gradient of an activation needs. In front of the blocks `inlet` reads 2,
# behind them `out` reads 2; the gradient of the batch is not asked for.
COUNTS = {
    "none": (3, 3, 3),  # one graph: the root unit and two blocks
    "print": (2 + 2 * 2 + 2, 2 * 2 + 1, 2 + 2 * 2 + 2),  # two graphs per block
    "break": (2 + 2 * 2 + 2, 2 * 2 + 1, 2 + 2 * 2 + 2),
    "data": (2 + 2 * 2 + 2, 2 * 2 + 1, 2 + 2 * 2 + 2),
    # a block's frame runs as it is: a.weight, a.bias, b.weight, b.bias, scale, of which
    # backward needs all but the biases
    "eager": (2 + 2 * 5 + 2, 2 * 3 + 1, 2 + 2 * 5 + 2),
}


def broken_steps(rank: int, world_size: int, kinds: list[str]) -> list[str]:
    """What is wrong with two steps of `Broken` in each kind; compared with eager, counted."""
    wrong = []
    for kind in kinds:
        torch._dynamo.reset()
        torch.manual_seed(0)
        plain = Broken(kind)
        torch.manual_seed(0)
        model = fxshard.shard(Broken(kind), units=["blocks.*"])
        if kind != "eager":
            model.compile(backend="fxshard", fullgraph=kind == "none")
        shapes = {tuple(p.shape) for p in plain.parameters() if p.dim() > 1}
        shapes |= {shape[::-1] for shape in shapes}
        for step in range(2):
            batches = [batch_of(r, step) for r in range(world_size)]
            expected = torch.stack([plain(x).square().mean() for x in batches])
            plain.zero_grad()
            expected.mean().backward()
            model.zero_grad()
            saved: list[tuple[int, ...]] = []

            def keep(tensor: Tensor, saved: list[tuple[int, ...]] = saved) -> Tensor:
                saved.append(tuple(tensor.shape))
                return tensor

            with count_collectives() as seen:
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                    loss = model(batches[rank]).square().mean()
                forward = seen.count("all_gather")
                loss.backward()
            if not torch.allclose(loss, expected[rank], atol=1e-6):
                wrong.append(f"{kind} {step}: loss {loss} and not {expected[rank]}")
            try:
                assert_same_gradients(model, plain)
            except AssertionError as error:
                wrong.append(f"{kind} {step}: gradient of {error}")
            counts = (forward, seen.count("all_gather") - forward, seen.count("reduce_scatter"))
            if step and kind in COUNTS and counts != COUNTS[kind]:
                wrong.append(f"{kind} {step}: {counts} collectives and not {COUNTS[kind]}")
            if step and seen.count() != sum(counts):
                wrong.append(f"{kind} {step}: other collectives {seen.kinds()}")
            if shapes & set(saved):
                wrong.append(f"{kind} {step}: whole parameters saved: {saved}")
            if int(model.calls) != step + 1:
                wrong.append(f"{kind} {step}: buffer {model.calls}")
        for program in programs(model):
            if Fact.NO_PARAM_SAVED not in program.facts:
                wrong.append(f"{kind}: nobody looked for saved parameters")
    return wrong


def test_eager_use_and_graph_breaks_are_right_and_sharded(ranks: Any) -> None:
    kinds = ["none", "eager", "print", "data", "try"]
    for wrong in ranks(2).run(broken_steps, kinds):
        assert wrong == []


def test_layers_share_the_graphs_of_a_block() -> None:
    _, model = pair(lambda: Broken("break"), units=["blocks.*"])
    counters.clear()
    compiled(model, fullgraph=False)(batch_of(0, 0)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 2
    found = programs(model)
    assert [list(program.params) for program in found] == [
        [f"blocks.{i}.{name}" for name in names]
        for i in range(2)
        for names in (["a.weight", "a.bias"], ["scale", "b.weight", "b.bias"])
    ]
    for i, program in enumerate(found):  # each operator is in the module that it ran in
        modules = {call.module for call in program.calls}
        inside = f"blocks.{i // 2}"
        assert modules == {"", inside, f"{inside}.{'b' if i % 2 else 'a'}"}


class Holding(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        view, cast = self.blocks[0][0].weight.t(), self.norm.bias.double()
        torch._dynamo.graph_break()
        return super().forward(x) @ view + cast


def test_a_whole_parameter_across_a_break_is_named(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = pair(Holding)
    with caplog.at_level(logging.WARNING, "fxshard"):
        assert_same_step(plain, model, compiled(model, fullgraph=False), torch.randn(3, WIDTH))
    said = [r.getMessage() for r in caplog.records if "hands out" in r.getMessage()]
    assert len(said) == 2
    assert "'norm.bias'" in said[0] + said[1] and "'blocks.0.0.weight'" in said[0] + said[1]


class HandsOver(nn.Module):
    """Reads a parameter in a stretch that runs as it is, and gives it to one that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaling() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # a break in a loop: Dynamo gives up this frame
            torch._dynamo.graph_break()
            x = block(x, self.scale)
        return x


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale


def handed_over(rank: int, world_size: int) -> list[str]:
    torch._dynamo.reset()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxshard").addHandler(handler)
    try:
        torch.manual_seed(0)
        plain = HandsOver()
        torch.manual_seed(0)
        model = fxshard.shard(HandsOver())
        x = torch.randn(3, WIDTH)  # the same on all ranks
        assert_same_step(plain, model, compiled(model, fullgraph=False), x)
    finally:
        logging.getLogger("fxshard").removeHandler(handler)
    return [line for line in said if "in front of a graph break" in line]


def test_a_parameter_that_eager_code_gives_to_a_graph_is_named(ranks: Any) -> None:
    for said in ranks(2).run(handed_over):
        assert said and all("'scale'" in line for line in said)


def test_quiet_without_a_whole_parameter_across_a_break(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, model = pair(lambda: Broken("print"))
    with caplog.at_level(logging.WARNING, "fxshard"):
        compiled(model, fullgraph=False)(batch_of(0, 0)).sum().backward()
    assert [r.getMessage() for r in caplog.records if "hands out" in r.getMessage()] == []


class Routed(nn.Module):
    """The data decide which of two equal layers runs."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.near(x)
        return self.far(x)


def routed(rank: int, world_size: int) -> list[str]:
    torch._dynamo.reset()
    run = compiled(fxshard.shard(Routed()), fullgraph=False)
    x, found = torch.ones(3, WIDTH), []
    for sign in (1, -1, 1, 1 if rank else -1, 1):
        try:
            run(sign * x).sum().backward()
            found.append("")
        except RankMismatchError as error:
            found.append(str(error))
    return found


def test_ranks_that_take_other_branches_are_told_in_the_next_call(hasty: Any) -> None:
    """Both branches are known to all, and gather as many bytes: the numbers would mix."""
    for rank, told in enumerate(hasty(2).run(routed)):
        assert told[:4] == [""] * 4
        assert f"in the last call rank {1 - rank} ran another program" in told[4]
        assert "near.weight" in told[4] and "far.weight" in told[4]


# -- state -----------------------------------------------------------------------------------------


def state_works(rank: int, world_size: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Mlp()
    torch.manual_seed(0)
    model = fxshard.shard(Mlp(), units=["blocks.*"])
    model.compile(backend="fxshard", fullgraph=True)

    def assert_equal_states() -> None:
        expected = plain.state_dict()
        assert list(model.state_dict()) == list(expected)
        for name, value in model.state_dict().items():
            assert isinstance(value, DTensor)
            assert torch.equal(value.full_tensor(), expected[name]), name

    assert_equal_states()
    assert model.norm.weight is dict(model.named_parameters())["norm.weight"]
    assert isinstance(model.norm.weight, nn.Parameter)
    model(batch_of(rank, 0, WIDTH))

    # initialisation reaches the shards
    before = fsdp2.full(model.blocks[0][0].weight)
    torch.manual_seed(5 + rank)
    model.blocks[0][0].reset_parameters()
    assert not torch.equal(fsdp2.full(model.blocks[0][0].weight), before)
    nn.init.constant_(model.norm.bias, 3.0)
    assert torch.equal(fsdp2.full(model.norm.bias), torch.full((WIDTH,), 3.0))

    # plain tensors, DTensors, torch.distributed.checkpoint
    model.load_state_dict(plain.state_dict())
    assert_equal_states()
    own = {name: value.clone() for name, value in model.state_dict().items()}
    for assign in (False, True):
        nn.init.zeros_(model.norm.weight)
        model.load_state_dict(own, assign=assign)
        assert_equal_states()
        x = batch_of(rank, 0, WIDTH)
        torch.testing.assert_close(model(x), plain(x))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    nn.init.zeros_(model.norm.weight)
    set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True))
    assert_equal_states()

    # optimizers, clipping
    ours, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
    for step in range(3):
        batches = [batch_of(r, step, WIDTH) for r in range(world_size)]
        torch.stack([plain(x).sum() for x in batches]).mean().backward()
        model(batches[rank]).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(fsdp2.full(norm), expected)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), plain.state_dict()[name])
    set_optimizer_state_dict(model, ours, get_optimizer_state_dict(model, ours))

    # a copy is independent
    other = copy.deepcopy(model)
    torch.testing.assert_close(other(batches[rank]), plain(batches[rank]))
    other(batches[rank]).sum().backward()
    assert model.norm.weight.grad is None and other.norm.weight.grad is not None
    assert other.blocks[0][0].weight is not model.blocks[0][0].weight

    # torch.utils.checkpoint in eager, and a step between forward and backward
    torch.manual_seed(0)
    plain = Mlp()
    torch.manual_seed(0)
    eager = fxshard.shard(Checkpointed(), units=["blocks.*"])
    torch.stack([plain(x).sum() for x in batches]).mean().backward()
    eager(batches[rank]).sum().backward()
    assert_same_gradients(eager, plain)
    loss = eager(batches[rank]).sum()
    nn.init.zeros_(eager.norm.weight)
    with pytest.raises(StepError, match=r"'norm\.weight' was changed in place between"):
        loss.backward()
    root = reading.root_of(eager)
    del loss
    gc.collect()  # the error held frames
    assert root is not None and not root.gathered


def test_state_is_that_of_the_plain_model_on_2_ranks(ranks: Any) -> None:
    ranks(2).run(state_works)


def marks(rank: int, world_size: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of fxshard, and of torch: FSDP1 for ignored modules, FSDP2 for ignored parameters.

    FSDP1 runs on an accelerator only; what its constructor calls to mark modules runs here.
    """

    def of(model: nn.Module) -> dict[str, Any]:
        names = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
        return {
            path: tuple(getattr(module, name, None) for name in names)
            for path, module in model.named_modules()
        }

    found = [(of(fxshard.shard(Mlp())), of(fully_shard(Mlp())))]
    theirs = Mlp()
    _annotate_modules_for_dynamo(theirs, set(theirs.blocks[0].modules()), use_orig_params=True)
    found.append((of(fxshard.shard(Mlp(), ignored=["blocks.0"])), of(theirs)))
    theirs = Mlp()
    fully_shard(theirs, ignored_params=set(theirs.blocks[1][0].parameters()))
    found.append((of(fxshard.shard(Mlp(), ignored=["blocks.1.0.*"])), of(theirs)))
    return found


def test_modules_are_marked_for_dynamo_as_torchs_fsdp_marks_them(ranks: Any) -> None:
    for found in ranks(2).run(marks):
        for ours, theirs in found:
            assert ours == theirs
        assert found[0][0]["norm"] == (True, True)
        assert found[1][0]["blocks.0.0"] == (None, None)


def test_copies_and_names() -> None:
    plain, model = pair(Mlp)
    run = compiled(model)
    assert_same_step(plain, model, run, torch.randn(3, WIDTH))
    assert repr(model) == repr(plain)
    assert type(model).__qualname__ == "Mlp" and isinstance(model, Mlp)
    other = copy.deepcopy(model)
    nn.init.ones_(other.norm.bias)
    assert_same_step(plain, model, run, torch.randn(3, WIDTH))
    nn.init.ones_(plain.norm.bias)
    assert_same_step(plain, other, other, torch.randn(3, WIDTH))
    assert_same_step(plain, other, compiled(other), torch.randn(3, WIDTH))
    with pytest.raises(StepError, match="Copy the whole model"):
        copy.deepcopy(model.norm)
    with pytest.raises(StepError, match=r"Save model\.state_dict\(\)"):
        pickle.dumps(model)


def test_conversions_reach_what_dynamo_sees() -> None:
    plain, model = pair(Mlp)
    plain, model = plain.double(), model.double()
    assert model.norm.weight.dtype is torch.float64
    assert_same_step(plain, model, compiled(model), torch.randn(3, WIDTH).double())


def sharded_with_tensor_parallelism(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Mlp()
    parallelize_module(model.blocks[0], mesh["tp"], {"0": ColwiseParallel()})
    before = dict(model.named_parameters())
    with pytest.raises(UnitError) as refused:
        fxshard.shard(model, mesh=mesh["dp"])
    assert all(param is before[name] for name, param in model.named_parameters())
    assert type(model) is Mlp and type(model.norm) is nn.LayerNorm
    return str(refused.value)


def test_tensor_parallelism_is_refused_by_name(ranks: Any) -> None:
    for message in ranks(2).run(sharded_with_tensor_parallelism):
        assert "'blocks.0.0.weight' is a DTensor already" in message
        assert "parallelize_module" in message


def strategies(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in (
        {"strategy": "hybrid_shard", "mesh": mesh},
        {"strategy": "no_shard"},
        {"strategy": "shard_grad_op"},
    ):
        for is_compiled in (True, False):
            torch._dynamo.reset()
            torch.manual_seed(0)
            plain = Broken("break")
            torch.manual_seed(0)
            model = fxshard.shard(Broken("break"), units=["blocks.*"], **options)  # type: ignore
            run = compiled(model, fullgraph=False) if is_compiled else model
            batches = [batch_of(r, 0) for r in range(world_size)]
            torch.stack([plain(x).sum() for x in batches]).mean().backward()
            run(batches[rank]).sum().backward()
            assert_same_gradients(model, plain, atol=1e-5)


@pytest.mark.slow
def test_strategies_on_4_ranks(ranks: Any) -> None:
    ranks(4).run(strategies)


# -- shapes and modes ------------------------------------------------------------------------------


def test_five_lengths_are_one_graph_of_dynamo_and_a_bounded_number_of_programs() -> None:
    plain, model = pair(Mlp)
    run = compiled(model)
    counters.clear()
    for _ in range(2):
        for length in (3, 4, 6, 9, 12):
            x = torch.randn(length, WIDTH)
            torch._dynamo.mark_dynamic(x, 0)
            assert_same_step(plain, model, run, x)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(programs(model)) == 2, "the first length, and all others"


class Sizes(Mlp):
    """Sizes, and numbers made of them, in forward and among the results."""

    def forward(self, x: Tensor) -> Any:
        rows = x.shape[0]
        h = super().forward(x.view(rows // 2, 2, WIDTH)).reshape(rows, WIDTH)
        return h * rows + torch.arange(rows).unsqueeze(1), rows // 2


def test_sizes_as_inputs_and_results_of_a_graph() -> None:
    plain, model = pair(Sizes)
    run = compiled(model, dynamic=True)
    for length in (4, 6, 10):
        x = torch.randn(length, WIDTH)
        (expected, halves), (got, number) = plain(x), run(x)
        assert number == halves == length // 2
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_more_programs_than_allowed_are_refused() -> None:
    _, model = pair(Mlp, dynamic=False, max_variants=2)
    run = compiled(model, dynamic=True)
    run(torch.randn(3, WIDTH))
    run(torch.randn(4, WIDTH))
    with pytest.raises(CaptureError, match=r"is \[5, 8\], was .* as many as max_variants=2"):
        run(torch.randn(5, WIDTH))
    run(torch.randn(4, WIDTH))


class Dropping(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


def test_training_evaluation_no_grad_and_inference() -> None:
    plain, model = pair(Dropping)
    run, x = compiled(model), torch.randn(3, WIDTH)

    def same() -> Tensor:
        torch.manual_seed(3)
        expected = plain(x)
        torch.manual_seed(3)
        got: Tensor = run(x)
        assert torch.equal(got, expected)
        return got

    trained = same()
    plain.eval(), model.eval()
    assert not torch.equal(same(), trained)
    with torch.no_grad():
        assert not same().requires_grad
    with torch.inference_mode():
        assert same().is_inference()
        assert torch.equal(model(x), plain(x))
    plain.train(), model.train()
    assert torch.equal(same(), trained)
    assert [p.signature.training for p in programs(model)] == [True, True, False, False]


def test_freezing_and_autocast() -> None:
    plain, model = pair(Mlp)
    run, x = compiled(model), torch.randn(3, WIDTH)
    assert_same_step(plain, model, run, x)
    for each in (plain, model):
        each.zero_grad()
        each.blocks[0].requires_grad_(False)
    assert_same_step(plain, model, run, x)
    assert model.blocks[0][0].weight.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(plain, model, run, x)


# -- inputs and results ----------------------------------------------------------------------------


class Results(Mlp):
    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        found = {"h": h, "sum": h.sum(), "none": None, "size": x.shape[0], "x": x}
        return found | {"view": x.view(-1), "weight": self.norm.weight}


def test_results_of_every_kind() -> None:
    plain, model = pair(Results)
    x = torch.randn(3, WIDTH, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, got = plain(x), compiled(model)(y)
    assert got["x"] is y and got["none"] is None and got["size"] == 3
    for found in (expected, got):  # a scalar result is not taken for the only loss
        (found["sum"] + found["h"].square().sum() + found["view"].sum()).backward(retain_graph=True)
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_gradients(model, plain, atol=1e-5)
    assert torch.equal(got["weight"], plain.norm.weight)


class Writing(Mlp):
    """Writes into buffers and inputs, and into an activation that crosses a break."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1)
        self.seen = self.seen * 0.5 + x.mean(0).detach()
        h = self.batch_norm(super().forward(x))
        torch._dynamo.graph_break()
        h.mul_(2)
        h.add_(self.norm.bias)
        torch._dynamo.graph_break()
        return self.norm(h) + cache.sum() + self.seen


def test_what_a_graph_writes_into_is_written() -> None:
    plain, model = pair(Writing)
    run = compiled(model, fullgraph=False)
    theirs, ours = torch.zeros(3), torch.zeros(3)
    for _ in range(2):
        x = torch.randn(4, WIDTH)
        expected, got = plain(x, theirs), run(x, ours)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
        assert torch.equal(theirs, ours)
        for each, result in ((plain, expected), (model, got)):
            each.zero_grad()
            result.square().mean().backward()
        assert_same_gradients(model, plain)
    buffers = dict(model.named_buffers())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, msg=name)


class SharedMemory(Mlp):
    """Behind a break, writes into tensors that share memory with others."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        rows, copies = h.view(-1), x.clone()
        first = copies[0]
        torch._dynamo.graph_break()
        first.mul_(3)
        h.mul_(2)  # so `rows` is twice as large too
        return (rows * rows).view(h.shape) + self.norm(copies)


def test_what_is_written_into_shared_memory_is_seen_through_all_views() -> None:
    plain, model = pair(SharedMemory)
    run = compiled(model, fullgraph=False)
    for _ in range(2):
        assert_same_step(plain, model, run, torch.randn(3, WIDTH), atol=1e-5)


class SavesItsResult(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


@pytest.mark.parametrize("how", ["shard", "compile"])
def test_a_result_that_backward_reads_must_stay_as_it_is(how: str) -> None:
    plain, x = SavesItsResult(), torch.randn(3, WIDTH)
    y = plain(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    if how == "shard":
        run = compiled(fxshard.shard(SavesItsResult(), world_size=2))
    else:
        run = fxshard.compile(SavesItsResult(), world_size=2)
    y = run(x)
    y.mul_(2)
    for _ in range(2):  # a refused backward leaves all as it was
        with pytest.raises(StepError, match=r"an output of SavesItsResult, of shape \[3, 8\]"):
            y.sum().backward(retain_graph=True)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * grad * x * weight, (grad * x * x).sum(0)


class Odd(nn.Module):
    """Parameters in every place that modules keep them in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.listed = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.listed[1].abs().max()
        h = Squared.apply(self.normed(self.layer(x)), self.listed[0]) * scale
        return h + self.listed[1] + sum(p.norm() for p in self.parameters())


def test_parameters_in_odd_places() -> None:
    plain, model = pair(Odd)
    x = torch.randn(3, 2, WIDTH)
    assert_same_step(plain, model, compiled(model), x, atol=1e-5)
    assert_same_step(plain, model, model, x, atol=1e-5)


def test_ignored_parameters_stay_whole() -> None:
    plain, model = pair(Mlp, ignored=["norm"])
    assert_same_step(plain, model, compiled(model), torch.randn(3, WIDTH))
    (program,) = programs(model)
    assert set(program.wholes) == {"norm.weight", "norm.bias"}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(WIDTH, WIDTH, 2), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


def recurrent(rank: int, world_size: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Recurrent()
    torch.manual_seed(0)
    model = fxshard.shard(Recurrent())
    x = torch.randn(4, 2, WIDTH)  # the same on all ranks
    for run in (model, compiled(model, fullgraph=False)):
        assert_same_step(plain, model, run, x)


def test_recurrent_modules_which_dynamo_leaves_out(ranks: Any) -> None:
    ranks(2).run(recurrent)


def test_a_compiled_function_around_the_model() -> None:
    plain, model = pair(Mlp, units=["blocks.*"])
    x = torch.randn(3, WIDTH)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    torch.compile(loss, backend="fxshard", fullgraph=True)(x).backward()
    plain(x).square().mean().backward()
    assert_same_gradients(model, plain)
    (program,) = programs(model)
    assert [call.module for call in program.calls][:3] == ["", "blocks.0", "blocks.0.0"]


# -- options, checkpoints, reports -----------------------------------------------------------------


def test_checkpoint_regions_save_what_they_save_in_fxshard_compile() -> None:
    x = torch.randn(64, WIDTH)
    found = {}
    for make in (Mlp, Checkpointed):
        torch._dynamo.reset()
        plain, model = pair(make)
        run = compiled(model)
        assert_same_step(plain, model, run, x)
        torch.manual_seed(0)
        whole = fxshard.compile(make(), world_size=2, args=(x,))
        assert fxshard.reports(model).peak_bytes == whole.memory.peak_bytes
        model.zero_grad()
        run(x).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        found[make] = fxshard.reports(model).saved_bytes, gradients
    assert found[Checkpointed][0] < found[Mlp][0]
    for ours, theirs in zip(found[Checkpointed][1], found[Mlp][1], strict=True):
        assert torch.equal(ours, theirs)  # type: ignore[arg-type]


def test_options_of_a_graph() -> None:
    x = torch.randn(64, WIDTH)
    saved = {}
    for name, options in {
        "none": {},
        "checkpoint": {"checkpoint": "full"},
        "unsharded": {"reshard_after_forward": False},
        "one bucket": {"min_bucket_bytes": "1MiB"},
    }.items():
        torch._dynamo.reset()
        plain, model = pair(Mlp, units=["blocks.*"])
        assert_same_step(plain, model, compiled(model, options=options), x)
        saved[name] = fxshard.reports(model).saved_bytes
        (program,) = programs(model)
        assert len(program.moving) == (1 if name == "one bucket" else 3)
    assert saved["checkpoint"] < saved["none"] < saved["unsharded"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonsense": 1}, r"unknown option 'nonsense'\. Options are: backend, reshard_after"),
        ({"strategy": "no_shard"}, r"cannot be changed when it is compiled: option 'strategy'"),
        ({"reduce_op": "max"}, r"the max of sums is not the sum of theirs"),
        ({"reshard_after_forward": 2}, r"makes process groups: give it to fxshard\.shard"),
    ],
)
def test_options_that_a_graph_cannot_have(options: dict[str, Any], message: str) -> None:
    _, model = pair(Mlp)
    with pytest.raises(ConfigError, match=message):
        compiled(model, options=options)(torch.randn(3, WIDTH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": "1GiB"}, "no example call is planned"),
        ({"optimizer": torch.optim.SGD, "optimizer_in_backward": True}, "stepped twice"),
        ({"full_precision_in_eval": True}, "Dynamo decides dtypes"),
        ({"reduce_op": "min"}, "the min of sums"),
    ],
)
def test_options_that_pieces_of_a_model_cannot_have(options: Any, message: str) -> None:
    model = Mlp()
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=message):
        fxshard.shard(model, world_size=2, **options)
    assert all(param is before[name] for name, param in model.named_parameters())


def test_what_is_refused_of_a_sharded_model() -> None:
    _, model = pair(Mlp)
    x = torch.randn(3, WIDTH)
    with pytest.raises(ConfigError, match="has no modes"):
        compiled(model, mode="reduce-overhead")(x)
    with pytest.raises(ConfigError, match=r"sharded already, by fxshard\.shard"):
        fxshard.shard(model, world_size=2)
    with pytest.raises(ConfigError, match=r"sharded already, by fxshard\.shard"):
        fxshard.compile(model, world_size=2)
    with pytest.raises(ConfigError, match=r"takes the nn\.Module itself"):
        fxshard.shard(torch.fx.symbolic_trace(nn.Linear(2, 2)), world_size=2)
    with pytest.raises(ConfigError, match="nothing is captured yet"):
        fxshard.reports(model)
    with pytest.raises(ConfigError, match=r"the Mlp was not sharded by fxshard\.shard"):
        fxshard.reports(Mlp())
    with pytest.raises(StepError, match="compiled by another backend"):
        torch.compile(model, backend="eager")(x)
    torch._dynamo.reset()
    _, other = pair(Mlp)
    with pytest.raises(CaptureError, match="parameters of 2 models"):
        torch.compile(lambda x: other(model(x)), backend="fxshard")(x)


@pytest.mark.slow
def test_inductor_inside() -> None:
    plain, model = pair(Mlp, units=["blocks.*"])
    run = compiled(model, options={"backend": "inductor"})
    assert_same_step(plain, model, run, torch.randn(3, WIDTH))
    (program,) = programs(model)
    assert any(region.compiled for region in program.schedule.regions.values())


class TwoHalves(nn.Module):
    """Two graphs. The first saves its input and its tanh, the second its tanh and its sine."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        torch._dynamo.graph_break()
        return self.b(h).tanh().cos()


def test_reports_and_their_sum() -> None:
    rows = 16
    _, model = pair(TwoHalves)
    compiled(model, fullgraph=False)(torch.randn(rows, WIDTH)).sum().backward()
    reports = fxshard.reports(model)
    assert len(reports) == 2
    tensor = rows * WIDTH * 4
    # Forward leaves behind: the tanh, which the second graph takes; there its own tanh, and the
    # cosine, which goes out. The batch was there before.
    assert reports.saved_bytes == tensor + 2 * tensor
    for report in reports:
        assert list(report.program.params) in (["a.weight", "a.bias"], ["b.weight", "b.bias"])
        assert report.peak_bytes < reports.peak_bytes
    assert sum(reports.peak_by_category.values()) == reports.peak_bytes
    assert str(reports).splitlines()[-1].startswith("sum: peak ")
    assert reports.peak_bytes < sum(report.peak_bytes for report in reports)
