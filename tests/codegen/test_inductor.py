"""backend="inductor": what is compiled how often, what stays eager, and that numbers stay."""

import functools
import logging
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxshard
from fxshard._torch import fake_tensors, inductor
from fxshard.codegen import regions
from fxshard.errors import StepError
from fxshard.ir import tags
from fxshard.ir.compiled import Compiled, RegionStep, stays_apart
from fxshard.passes.compile_regions import CompileRegions
from tests.fsdp2 import assert_close, run_steps
from tests.oracles import profiler_peak_bytes
from tests.ranks import Ranks
from tests.zoo import MODELS, Case, built, cross_entropy, float_batch, models

aten = torch.ops.aten


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the test's own for what is generated: nothing is in it.

    What Inductor has found out about the compiler, and its kernels, stay where they are.
    """
    monkeypatch.setattr(inductor, "inductor_cache_dir", lambda: str(tmp_path))
    return tmp_path


class Counter:
    """In the place of `regions.generate`: keeps what Inductor is asked to generate code for."""

    def __init__(self) -> None:
        self.graphs: list[fx.Graph] = []
        self._generate = regions.generate

    def __call__(self, graph: fx.Graph, mode: Any) -> inductor.Generated:
        self.graphs.append(graph)
        return self._generate(graph, mode)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    monkeypatch.setattr(regions, "generate", counter)
    return counter


class Gated(nn.Module):
    """A linear layer between elementwise operators: one compiled region forward, one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.sigmoid(self.linear(x) * 2) * x
        return out


class Deep(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def deep(depth: int) -> Case:
    batch = partial(float_batch, shape=(4, 8))
    return Case("deep", partial(Deep, depth), batch, cross_entropy, units=["blocks.*"])


def plan(case: Case, **options: Any) -> fxshard.Plan:
    model, args, kwargs = built(case)
    options = {"world_size": 2, "units": case.units, "backend": "inductor", **options}
    return fxshard.plan(model, args, kwargs, **options)


def compiled(plan: fxshard.Plan) -> list[Compiled]:
    assert plan.program.schedule is not None
    found = plan.program.schedule.regions.values()
    return [region.compiled for region in found if region.compiled is not None]


def trained(case: Case, backend: str, steps: int = 2, **options: Any) -> Any:
    """All ranks inside this process; by SGD, as Adam steps small gradients as far as large ones.

    Where a gradient is nearly nothing, its rounding would decide on a whole step of Adam.
    """
    torch.manual_seed(0)
    model = case.build()
    sharded = fxshard.compile(model, world_size=2, units=case.units, backend=backend, **options)
    return run_steps(sharded, case, steps, optimizer=functools.partial(torch.optim.SGD, lr=0.1))


# -- what is saved ---------------------------------------------------------------------------------


def test_cheap_values_are_made_again_unless_the_user_says_otherwise(folder: Path) -> None:
    # Of `Gated` the sigmoid, which its own backward reads, and what it is made from.
    cheap = {"aten.mul.Tensor": 2, "aten.sigmoid": 2}
    assert plan(deep(2)).memory.recomputed() == cheap
    assert plan(deep(2), checkpoint=None).memory.recomputed() == {}
    assert plan(deep(2), backend="eager").memory.recomputed() == {}
    alone = plan(replace(deep(1), units=[]))  # one unit has nothing that it could let go
    assert alone.memory.recomputed() == {}


# -- once ------------------------------------------------------------------------------------------


def test_eight_layers_cause_no_more_compiles_than_two(folder: Path, counter: Counter) -> None:
    shallow = plan(deep(2))
    once = len(counter.graphs)
    assert once == len(compiled(shallow)) >= 2, "forward and backward of a layer"
    counter.graphs.clear()
    for name in os.listdir(folder / "fxshard"):
        os.remove(folder / "fxshard" / name)
    plan(deep(8))
    assert len(counter.graphs) == once


def test_a_second_plan_reads_all_from_disk(folder: Path, counter: Counter) -> None:
    first = compiled(plan(deep(2)))
    assert all(each.fresh for each in first) and counter.graphs
    counter.graphs.clear()
    second = compiled(plan(deep(3)))
    assert not counter.graphs and not any(each.fresh for each in second)
    assert [replace(each, fresh=True) for each in second] == first


def test_what_code_depends_on_is_in_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as config

    before = regions.Store().digest("x")
    assert regions.Store().digest("x") == before != regions.Store().digest("y")
    with config.patch(max_fusion_size=3):
        assert regions.Store().digest("x") != before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert regions.Store().digest("x") != before


def test_a_folder_that_cannot_be_written_is_done_without(
    folder: Path, counter: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "fxshard").write_text("a file where the folder should be")
    assert compiled(plan(deep(2))) and counter.graphs
    assert "stays eager" not in caplog.text


def _on_ranks(rank: int, world_size: int, folder: str) -> tuple[list[str], Any]:
    """What this rank generated, and what it trained."""
    counter = Counter()
    before = regions.generate, inductor.inductor_cache_dir
    regions.generate, inductor.inductor_cache_dir = counter, lambda: folder
    try:
        torch.manual_seed(0)
        sharded = fxshard.compile(Deep(), units=["blocks.*"], backend="inductor")
        result = run_steps(sharded, deep(2), 2)
        assert any(each for each in compiled(sharded.plan))
    finally:
        regions.generate, inductor.inductor_cache_dir = before
    return [str(graph) for graph in counter.graphs], result


def test_each_region_is_compiled_on_one_rank(ranks: Callable[[int], Ranks], folder: Path) -> None:
    (one, first), (two, second) = ranks(2).run(_on_ranks, str(folder))
    count = len(compiled(plan(deep(2))))
    both = one + two
    assert len(both) == len(set(both)) == count, "each region once, by one rank or the other"
    again = ranks(2).run(_on_ranks, str(folder))
    assert [made for made, _ in again] == [[], []], "a later start reads all of them"
    for (_, now), before in zip(again, (first, second), strict=True):
        assert_close(now, before, 0)
    assert_close(first, trained_on_ranks(ranks(2)), 1e-5)


def trained_on_ranks(pool: Ranks) -> Any:
    return pool.run(_eager_on_rank)[0]


def _eager_on_rank(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    return run_steps(fxshard.compile(Deep(), units=["blocks.*"]), deep(2), 2)


def _hold(folder: str, held: Any) -> None:
    store = regions.Store(Path(folder))
    with store.lock("x", wait=True):
        held.set()
        time.sleep(600)


def test_nobody_waits_for_a_process_that_died_while_compiling(tmp_path: Path) -> None:
    context = mp.get_context("forkserver")  # that of tests.ranks, which has imported torch
    held = context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path), held), daemon=True)
    holder.start()
    assert held.wait(300)
    store = regions.Store(tmp_path)
    code = inductor.Generated("", {}, ())
    assert regions.generated(store, "x", lambda: code, wait=False) is None, "another is at it"
    holder.kill()
    assert regions.generated(store, "x", lambda: code, wait=True) == (code, True)
    assert regions.generated(store, "x", lambda: code, wait=False) == (code, False)


# -- what stays eager ------------------------------------------------------------------------------


@pytest.fixture
def no_sigmoid(folder: Path) -> Iterator[None]:
    """Inductor cannot lower sigmoid."""
    from torch._inductor.lowering import lowerings

    def refuse(*args: Any) -> Any:
        raise RuntimeError("no sigmoid today")

    before = {op: lowerings[op] for op in (aten.sigmoid, aten.sigmoid.default)}
    lowerings.update(dict.fromkeys(before, refuse))
    yield
    lowerings.update(before)


def test_a_region_that_does_not_compile_stays_eager(
    no_sigmoid: None, caplog: pytest.LogCaptureFixture
) -> None:
    result = trained(deep(3), "inductor", checkpoint=None)  # else backward has sigmoids too
    found = [r.getMessage() for r in caplog.records if "stays eager" in r.getMessage()]
    (message,) = found
    assert "region_1 (4 operators" in message and "unit blocks.0 and 2 more" in message
    assert "no sigmoid today" in message
    assert_close(result, trained(deep(3), "eager"), 1e-6)


def test_a_region_whose_kernels_cannot_be_built_stays_eager(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(namespace: dict[str, Any]) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(regions, "_LOADED", {})
    monkeypatch.setattr(regions, "_finished", broken)
    result = trained(deep(2), "inductor")
    assert "cannot be built: no compiler here" in caplog.text
    with pytest.raises(StepError, match=r"kernels of region_\w+.* cannot be built here") as refused:
        fxshard.validate(Deep(2), (torch.ones(4, 8),), world_size=2, backend="inductor")
    assert "Inductor's cache" in str(refused.value)
    monkeypatch.undo()
    assert_close(result, trained(deep(2), "eager"), 0)


def test_random_operators_and_writes_stand_apart() -> None:
    found = plan(MODELS["dropout"], passes=None, checkpoint="full")
    schedule = found.program.schedule
    assert schedule is not None
    for region in schedule.regions.values():
        kinds = {stays_apart(node) for node in region.body}
        assert len(kinds) == 1, f"{region.name} mixes what is compiled and what is not"
        assert region.compiled is None or kinds == {False}
    drawn = [n for r in schedule.regions.values() for n in r.body if tags.is_random(n)]
    assert drawn


def test_attention_without_dropout_is_compiled_and_with_it_is_not() -> None:
    tag = tags.Meta("forward", "compute")

    def node(dropout: float) -> fx.Node:
        graph = fx.Graph()
        q = graph.placeholder("q")
        target = aten._scaled_dot_product_flash_attention_for_cpu.default
        return tags.put(graph.call_function(target, (q, q, q, dropout, True)), tag)

    assert not stays_apart(node(0.0))
    assert stays_apart(node(0.1))


def test_a_plan_for_cuda_compiles_nothing(counter: Counter) -> None:
    assert not compiled(plan(deep(2), device="cuda")) and not counter.graphs


# -- numbers ---------------------------------------------------------------------------------------


class Dropped(Gated):
    """Draws of dropout between what is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5).sigmoid()


def dropped() -> nn.Module:
    return nn.Sequential(Dropped(), Dropped())


def attention() -> nn.Module:
    return models.Transformer(depth=1, dropout=0.1)


@pytest.mark.parametrize(
    ("case", "build"),
    [
        (replace(deep(2), units=None), dropped),
        pytest.param(MODELS["dropout"], attention, marks=pytest.mark.slow),
    ],
    ids=["dropped", "attention"],
)
@pytest.mark.parametrize("checkpoint", [None, "full"])
def test_dropout_draws_as_eager_does(
    case: Case, build: Any, checkpoint: str | None, folder: Path
) -> None:
    case = replace(case, build=build)
    result = trained(case, "inductor", checkpoint=checkpoint)
    assert_close(result, trained(case, "eager", checkpoint=checkpoint), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_eager(name: str) -> None:
    """Inductor fuses, and so rounds otherwise: by less than 1e-4 of a tensor's largest value."""
    assert_close(trained(MODELS[name], "inductor"), trained(MODELS[name], "eager"), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "llama"])
def test_numbers_in_bf16(name: str) -> None:
    """Two steps of bf16 differ by at most a few of its 2**-8 in gradients."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options = {"mixed_precision": policy, "steps": 1}
    result = trained(MODELS[name], "inductor", **options)
    assert_close(
        replace(result, params={}),
        replace(trained(MODELS[name], "eager", **options), params={}),
        4e-2,
    )


# -- bytes -----------------------------------------------------------------------------------------


def region_of(*values: Tensor, body: Callable[..., Any]) -> tuple[fx.Graph, Any]:
    """A region's graph: `body` gets placeholders' nodes and returns nodes with values."""
    mode = fake_tensors.FakeTensorMode()
    graph = fx.Graph()
    places = []
    for i, value in enumerate(values):
        places.append(graph.placeholder(f"a{i}"))
        places[-1].meta["val"] = mode.from_tensor(value)
    outputs = body(graph, *places)
    for node in outputs:
        if "val" not in node.meta:
            with mode:
                node.meta["val"] = node.target(*fx.node.map_arg(node.args, lambda n: n.meta["val"]))
    graph.output(tuple(outputs))
    return graph, mode


def doubled(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
    return [graph.call_function(aten.mul.Tensor, (x, 2.0))]


HEAD = """
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
cpp_fused_0 = async_compile.cpp_pybinding(['float*'], 'the source of a kernel')
def call(args):
    arg0_1, = args
    args.clear()
"""


def code_of(*lines: str) -> inductor.Generated:
    return inductor.Generated(HEAD + "".join(f"    {line}\n" for line in lines), {}, ())


def test_steps_by_hand() -> None:
    """What a generated module allocates and drops, counted by hand."""
    graph, mode = region_of(torch.ones(4, 8), body=doubled)
    code = code_of(
        "buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)",
        "cpp_fused_0(arg0_1, buf0)",
        "del arg0_1",
        "buf1 = empty_strided_cpu((4, 4), (4, 1), torch.float64)",
        "extern_kernels.mm(buf0, buf0, out=buf1)",
        "buf2 = reinterpret_tensor(buf1, (4, 8), (8, 1), 0); del buf1  # reuse",
        "buf3 = torch.ops.aten.add.Tensor(buf0, 1.0)",
        "del buf0",
        "return (buf3, )",
    )
    steps, outputs = regions.lifetimes(graph, code, mode)
    assert steps == (
        RegionStep("cpp_fused_0", ((1, 128),), (0,)),
        RegionStep("mm", ((2, 128),), ()),
        RegionStep("aten.add.Tensor", ((3, 128),), (1,)),
        RegionStep("", (), (2,)),  # its last view goes when the function returns
    )
    assert outputs == (3,)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["return (arg0_1, )"], "in the storage of an argument"),
        (
            ["return (empty_strided_cpu((4, 8), (1, 4), torch.float32), )"],
            r"\(8, 1\) torch.float32 in eager, and \(4, 8\) \(1, 4\)",
        ),
    ],
)
def test_code_that_lies_otherwise_than_eager_is_refused(lines: list[str], complaint: str) -> None:
    graph, mode = region_of(torch.ones(4, 8), body=doubled)
    with pytest.raises(ValueError, match=complaint):
        regions.lifetimes(graph, code_of(*lines), mode)


def test_results_that_share_a_storage_which_eager_does_not_share_are_refused() -> None:
    def twice(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        return [*doubled(graph, x), *doubled(graph, x)]

    graph, mode = region_of(torch.ones(4, 8), body=twice)
    code = code_of("b = empty_strided_cpu((4, 8), (8, 1), torch.float32)", "return (b, b, )")
    with pytest.raises(ValueError, match="in the storage of another result"):
        regions.lifetimes(graph, code, mode)


def test_bytes_are_those_measured(folder: Path) -> None:
    case = deep(3)
    model, args, kwargs = built(case)
    seen = fxshard.validate(model, args, kwargs, world_size=2, units=case.units, backend="inductor")
    assert seen.max_abs_difference == 0 and seen.measured_peak_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_the_zoo_are_those_measured(name: str) -> None:
    model, args, kwargs = built(MODELS[name])
    options = {"world_size": 2, "units": MODELS[name].units, "backend": "inductor"}
    assert fxshard.validate(model, args, kwargs, **options).max_abs_difference == 0


# -- running ---------------------------------------------------------------------------------------


def test_the_first_call_asserts_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    code = code_of(
        "assert_size_stride(arg0_1, (4, 8), (8, 1))",
        "return (torch.mul(arg0_1, 2.0), )",
    )
    code = replace(code, source=code.source.replace("async_compile.cpp_pybinding", "print"))
    made = Compiled("by hand", code, (), (), True)
    monkeypatch.setattr(regions, "_finished", lambda namespace: namespace)
    head = "import torch\n"
    made = replace(made, code=replace(code, source=head + code.source))
    functions, failed = regions.load({"region_0": made})
    assert not failed
    with pytest.raises(AssertionError):
        functions["region_0"]([torch.ones(8, 4).t()])
    x = [torch.ones(4, 8)]
    (result,) = functions["region_0"](x)
    assert torch.equal(result, torch.full((4, 8), 2.0)) and not x, "arguments are dropped"
    functions["region_0"]([torch.ones(8, 4).t()])  # checked once


def test_arguments_that_do_not_lie_on_16_bytes_are_copied() -> None:
    seen: list[int] = []
    call = regions._aligned(lambda args: seen.extend(a.data_ptr() % 16 for a in args), (0,))
    base = torch.ones(9)
    call([base[1:], base[1:]])
    assert seen[0] == 0 and seen[1] == 4


def test_the_pass_says_what_it_did(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fxshard")
    found = plan(deep(2))
    assert found.program.schedule is not None
    count, all_of_them = len(compiled(found)), len(found.program.schedule.regions)
    assert f"Inductor generated {count} of {all_of_them} regions, 0 were in" in caplog.text
    assert CompileRegions().requires


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "transformer"])
def test_the_profiler_sees_the_bytes_of_each_region(name: str) -> None:
    """What torch's allocator gives and takes back while the real code runs, without fxshard."""
    schedule = plan(MODELS[name]).program.schedule
    assert schedule is not None
    found = {r.name: r for r in schedule.regions.values()}
    codes = {name: r.compiled for name, r in found.items() if r.compiled is not None}
    functions, failed = regions.load(codes)
    assert functions and not failed
    for each, function in functions.items():
        args: list[Tensor] = []
        fill = partial(_fill, args, found[each].graph)
        fill()
        function(args)
        measured = profiler_peak_bytes(partial(function, args), fill)
        assert measured == _peak(found[each].graph, codes[each].steps), each


def _fill(args: list[Tensor], graph: fx.Graph) -> None:
    """Zeros for the placeholders, in storages as theirs."""
    bases: dict[int, Tensor] = {}
    for node in graph.find_nodes(op="placeholder"):
        (storage,), val = tags.storages(node), node.meta["val"]
        base = bases.setdefault(id(storage), torch.zeros(storage.nbytes(), dtype=torch.uint8))
        view = base.view(val.dtype).as_strided(val.shape, val.stride(), val.storage_offset())
        args.append(view)


def _peak(graph: fx.Graph, steps: tuple[RegionStep, ...]) -> int:
    """Bytes above those of the arguments, all of which die inside."""
    places = graph.find_nodes(op="placeholder")
    held = {id(s): s.nbytes() for node in places for s in tags.storages(node)}
    sizes = dict(enumerate(held.values()))
    now = top = 0
    for step in steps:
        for number, size in step.made:
            sizes[number] = size
            now += size
        top = max(top, now)
        now -= sum(sizes[number] for number in step.dropped)
    return top
