"""The optimizer in the program: stepped unit by unit inside of backward, and on local shards.

The reference is FSDP2 with the same torch optimizer, stepping behind backward.
"""

import copy
import dataclasses
import difflib
import functools
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

import fxshard
from fxshard import pipeline, verify
from fxshard.config import Config
from fxshard.errors import ConfigError, StepError, VerifyError
from fxshard.ir import dump, ops, tags
from fxshard.ir.program import Program, Result
from fxshard.memory.category import Category
from fxshard.passes.insert_step import InsertStep
from fxshard.verify.gradients import reduced_once
from fxshard.verify.steps import stepped_once
from tests import graphs
from tests.fsdp2 import full, units_of
from tests.runtime import test_checkpoints as checkpoints
from tests.zoo import MODELS, Case

Make = Callable[[Iterable[Any]], Optimizer]


def make(kind: type[Optimizer], **options: Any) -> Make:
    return functools.partial(kind, **options)


OPTIMIZERS: dict[str, Make] = {
    "sgd": make(SGD, lr=0.1),
    "sgd momentum": make(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd foreach": make(SGD, lr=0.1, momentum=0.9, dampening=0.1, foreach=True),
    "adam amsgrad": make(Adam, lr=1e-2, amsgrad=True, maximize=True),
    "adamw": make(AdamW, lr=1e-2),
    "adamw foreach": make(AdamW, lr=1e-2, foreach=True),
    "adamw fused": make(AdamW, lr=1e-2, fused=True),
    "adamw tensor lr": make(AdamW, lr=torch.tensor(1e-2)),
    "nadam": make(NAdam, lr=1e-2),
    "radam": make(RAdam, lr=1e-2),
    "adamax": make(Adamax, lr=1e-2),
    "adadelta": make(Adadelta, lr=1.0),
    "adagrad": make(Adagrad, lr=1e-2),
    "rmsprop": make(RMSprop, lr=1e-2, momentum=0.9, centered=True),
    "asgd": make(ASGD, lr=1e-2),
    "rprop": make(Rprop, lr=1e-2),
    "rprop foreach": make(Rprop, lr=1e-2, foreach=True),
}


class Uneven(nn.Module):
    """Two units; no parameter divides by 2, one has fewer rows than 4."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)))


UNEVEN = dataclasses.replace(MODELS["mlp13"], name="uneven", build=Uneven, units=["inner"])
CASES = MODELS | {"uneven": UNEVEN}


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


def fsdp2(case: Case, **options: Any) -> nn.Module:
    model = built(case)
    for unit in units_of(model, case):
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def train(model: nn.Module, optimizer: Optimizer, case: Case, steps: int = 5) -> list[float]:
    """The plain loop, whoever steps in it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for step in range(steps):
        args, kwargs = case.batch(rank, step)
        loss = case.loss(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.dtype is theirs[key].dtype and torch.equal(value, theirs[key]), key


# -- numbers ---------------------------------------------------------------------------------------


class OnLocals:
    """An optimizer of plain parameters that are the local parts of FSDP2's."""

    def __init__(self, model: nn.Module, optimizer: Make) -> None:
        self.pairs: list[tuple[Any, nn.Parameter]] = [
            (param, nn.Parameter(param.to_local().detach()))  # type: ignore[operator]
            for param in model.parameters()
        ]
        self.inner = optimizer([local for _, local in self.pairs])

    def step(self) -> None:
        for param, local in self.pairs:
            local.grad = param.grad.to_local()
        self.inner.step()

    def zero_grad(self) -> None:
        for param, _ in self.pairs:
            param.grad = None

    @property
    def state(self) -> Any:
        """As torch's over DTensors would be."""

        def whole(value: Tensor, like: DTensor) -> Tensor:
            shape = {"shape": like.shape, "stride": like.stride()}
            return DTensor.from_local(value, like.device_mesh, like.placements, **shape)  # type: ignore[arg-type]

        return {
            param: {
                key: whole(value, param) if value.dim() else value
                for key, value in self.inner.state[local].items()
            }
            for param, local in self.pairs
        }


def like_fsdp2(rank: int, world_size: int, model_name: str, names: list[str]) -> None:
    case = CASES[model_name]
    for name in names:
        theirs = fsdp2(case)
        if name.startswith("rprop"):  # which DTensor cannot step, neither way
            optimizer: Any = OnLocals(theirs, OPTIMIZERS[name])
        else:
            optimizer = OPTIMIZERS[name](theirs.parameters())
        losses = train(theirs, optimizer, case)
        want = checkpoints.values(theirs, optimizer)
        for in_backward in (True, False):
            ours = fxshard.compile(
                built(case),
                units=case.units,
                optimizer=OPTIMIZERS[name],
                optimizer_in_backward=in_backward,
            )
            kind = OPTIMIZERS[name].func  # type: ignore[attr-defined]
            assert isinstance(ours.optimizer, kind)
            assert type(ours.optimizer).__name__ == kind.__name__
            assert train(ours, ours.optimizer, case) == losses, name
            assert_same(checkpoints.values(ours, ours.optimizer), want)
            for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                for key, value in ours.optimizer.state[param].items():
                    assert type(value) is type(optimizer.state[other][key]), key
                    if isinstance(value, DTensor):
                        assert value.placements == param.placements
                        assert value.to_local().shape == param.to_local().shape


FAST = ("sgd momentum", "adamw", "adamw fused", "rprop")  # the others are slow tests
EACH = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow, id=name)
    for name in OPTIMIZERS
]


@pytest.mark.parametrize("name", EACH)
def test_five_steps_are_bitwise_those_of_fsdp2(ranks: Any, name: str) -> None:
    """Uneven shards; every class that is taken."""
    ranks(2).run(like_fsdp2, "uneven", [name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp13", "llama", "tied", "convnet", "transformer"])
def test_five_steps_of_other_models(ranks: Any, name: str) -> None:
    ranks(2).run(like_fsdp2, name, ["adamw", "sgd momentum"])


def decaying(named_parameters: Iterable[tuple[str, Tensor]]) -> Optimizer:
    """Two groups, chosen by name."""
    named = list(named_parameters)
    biases = [(name, param) for name, param in named if name.endswith("bias")]
    weights = [(name, param) for name, param in named if not name.endswith("bias")]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 1e-3}]
    return AdamW(groups, lr=1e-2, weight_decay=0.1)


class Twice(Uneven):
    """A layer that is called again, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.never = nn.Linear(5, 5), nn.Linear(2, 2)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


TWICE = dataclasses.replace(UNEVEN, name="twice", build=Twice)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# case, options of fully_shard, options of fxshard, and those of the loop
WAYS: dict[str, tuple[Case, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "groups and a schedule": (UNEVEN, {}, {"optimizer": decaying}, {"scheduled": True}),
    "frozen": (UNEVEN, {}, {}, {"frozen": "inner.weight"}),
    "accumulated": (UNEVEN, {}, {}, {"micro_batches": 2}),
    "called again, and never": (TWICE, {}, {}, {}),
    "bf16": (UNEVEN, {"mp_policy": BF16}, {"mixed_precision": BF16}, {}),
    "stays": (UNEVEN, {"reshard_after_forward": False}, {"strategy": "shard_grad_op"}, {}),
    "offload": (
        UNEVEN,
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"offload": CPUOffloadPolicy(pin_memory=False)},
        {},
    ),
    "no prefetch": (UNEVEN, {}, {"forward_prefetch": 0, "backward_prefetch": 0}, {}),
}


def loop(
    model: Any,
    optimizer: Optimizer,
    case: Case,
    *,
    scheduled: bool = False,
    frozen: str = "",
    micro_batches: int = 1,
) -> dict[str, Tensor]:
    for name, param in model.named_parameters():
        param.requires_grad_(name != frozen)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if scheduled else None
    for step in range(4):
        for part in range(micro_batches):
            model.set_requires_gradient_sync(part == micro_batches - 1)
            args, kwargs = case.batch(dist.get_rank(), 10 * step + part)
            case.loss(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return checkpoints.values(model, optimizer)


def in_other_ways(rank: int, world_size: int, way: str) -> None:
    case, theirs, ours, settings = WAYS[way]
    options = {"optimizer": OPTIMIZERS["adamw"], **ours}
    model: Any = fsdp2(case, **theirs)
    params: Any = model.named_parameters() if way.startswith("groups") else model.parameters()
    want = loop(model, options["optimizer"](params), case, **settings)
    for in_backward in (True, False):
        model = fxshard.compile(
            built(case), units=case.units, optimizer_in_backward=in_backward, **options
        )
        assert_same(loop(model, model.optimizer, case, **settings), want)
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_are_those_of_fsdp2(ranks: Any, way: str) -> None:
    ranks(2).run(in_other_ways, way)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "hybrid_shard"])
@pytest.mark.parametrize("in_backward", [True, False])
def test_without_a_process_group(strategy: str, in_backward: bool) -> None:
    """All ranks in this process, on one batch: as eager does it."""
    model, eager = Uneven(), Uneven()
    eager.load_state_dict(model.state_dict())
    compiled: Any = fxshard.compile(
        model,
        world_size=(2, 3) if strategy == "hybrid_shard" else 3,
        strategy=strategy,
        optimizer=OPTIMIZERS["adamw"],
        optimizer_in_backward=in_backward,
    )
    reference = OPTIMIZERS["adamw"](eager.parameters())
    assert train(compiled, compiled.optimizer, UNEVEN) == pytest.approx(
        train(eager, reference, UNEVEN), rel=1e-6
    )
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(compiled.optimizer.state[ours], reference.state[theirs])


def test_ignored_parameters_keep_their_gradient_for_the_loop() -> None:
    """Nobody reduces them: the user may, between backward and step."""
    model = fxshard.compile(
        Uneven(), world_size=2, ignored=["head"], optimizer=OPTIMIZERS["adamw"],
        optimizer_in_backward=True,
    )  # fmt: skip
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    args, _ = UNEVEN.batch(0, 0)
    UNEVEN.loss(model(*args)).backward()
    for name, param in model.named_parameters():
        ignored = name.startswith("head")
        assert (param.grad is not None) == ignored
        assert torch.equal(param, before[name]) == ignored
    model.optimizer.step()
    assert not any(torch.equal(param, before[name]) for name, param in model.named_parameters())


# -- the program -----------------------------------------------------------------------------------


def planned(case: Case = UNEVEN, **options: Any) -> Any:
    args, kwargs = case.batch(0, 0)
    given = {"world_size": 2, "units": case.units, "optimizer": OPTIMIZERS["adamw"]}
    return fxshard.plan(
        built(case), args, kwargs, optimizer_in_backward=True, **{**given, **options}
    )


def words(program: Program) -> list[Any]:
    return program.graph.find_nodes(op="call_function", target=ops.step)


LAYOUTS = pytest.mark.parametrize("layout", [{}, graphs.APART], ids=["packed", "apart"])


@LAYOUTS
def test_each_unit_is_stepped_behind_its_reduction_and_its_gradients_are_freed(
    layout: dict[str, Any],
) -> None:
    rows = [(r.operation, r.units[0]) for r in dump.rows(planned(**layout).program)]
    assert [row for row in rows if row[0] == "step"] == [("step", "(root)"), ("step", "inner")]
    program = planned(MODELS["mlp13"], **layout).program
    assert [r for r in program.results if r.kind == "grad"] == []
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    assert len(words(program)) == len(program.units)
    assert sorted(fqn for word in words(program) for fqn in word.args[2]) == sorted(program.params)
    frees = program.graph.find_nodes(op="call_function", target=ops.free)

    def storages(node: Any) -> set[int]:
        return set().union(*map(tags.storage_ids, tags.operands(node)))

    for word in words(program):
        (free,) = (node for node in frees if storages(node) & storages(word))
        assert order[free] == order[word] + 1


def test_golden() -> None:
    program = graphs.chain(optimizer_in_backward=True)
    passes = pipeline.default_passes(Config())
    names = [each.name for each in passes]
    pipeline.run(program, passes[: names.index("prefetch") + 1])
    before = dump.text(program).splitlines()
    pipeline.run(program, [InsertStep()])
    changes = difflib.unified_diff(before, dump.text(program).splitlines(), n=1, lineterm="")
    assert "\n".join(line for line in changes if line[:2] not in ("--", "++", "@@")) == GOLDEN


GOLDEN = """\
   %wait_5 = fxshard.wait([%getitem_5])  | unit=0 pair=5
+  %step_0 = fxshard.step([%getitem_5], [%shard_head], [head])  | unit=0
   %reduce_6 : (f32[2,4]) = fxshard.reduce_scatter([%dw_1], 2)  | layers.1 unit=2 pair=6
   %wait_6 = fxshard.wait([%getitem_6])  | layers.1 unit=2 pair=6
+  %step_1 = fxshard.step([%getitem_6], [%shard_layers_1_weight], [layers.1.weight])  | layers.1 unit=2
   %reduce_7 : (f32[2,4]) = fxshard.reduce_scatter([%dw_0], 2)  | layers.0 unit=1 pair=7
   %wait_7 = fxshard.wait([%getitem_7])  | layers.0 unit=1 pair=7
-  return %y (0), %getitem_7 (layers.0.weight), %getitem_6 (layers.1.weight), %getitem_5 (head)
+  %step_2 = fxshard.step([%getitem_7], [%shard_layers_0_weight], [layers.0.weight])  | layers.0 unit=1
+  return %y (0)"""  # noqa: E501


def test_with_one_rank_a_parameter_is_stepped_behind_its_last_reader() -> None:
    program = planned(world_size=1).program
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    for word in words(program):
        shards = set().union(*map(tags.storage_ids, word.args[1]))
        readers = [
            node
            for node in program.graph.nodes
            if node.op == "call_function"
            and set().union(*map(tags.storage_ids, node.all_input_nodes), set()) & shards
        ]
        assert max(readers, key=order.__getitem__) is word


def swapped_shards(program: Program) -> None:
    word = words(program)[0]
    first, second = word.args[1]
    word.args = (word.args[0], [second, first], word.args[2])


def swapped_gradients(program: Program) -> None:
    word = words(program)[0]
    first, second = word.args[0]
    word.args = ([second, first], *word.args[1:])


def lost(program: Program) -> None:
    program.graph.erase_node(words(program)[0])


def stepped_twice(program: Program) -> None:
    word = words(program)[0]
    with program.graph.inserting_after(word):
        again = program.graph.node_copy(word)
    again.meta = dict(word.meta)


def before_the_wait(program: Program) -> None:
    word = words(program)[0]
    (pair,) = {tags.get(tags.source(grad)).pair for grad in tags.operands(word)}
    (wait,) = (n for n in program.graph.nodes if n.target is ops.wait and tags.get(n).pair == pair)
    parts = [n for n in program.graph.nodes if tags.get(n).pair == pair]
    for node in [*(n for n in parts if tags.get(n).role == "settle"), word]:
        wait.prepend(node)


def read_later(program: Program) -> None:
    word = words(program)[0]
    grad = tags.operands(word)[0]
    with program.graph.inserting_after(word):
        made = program.graph.call_function(torch.ops.aten.neg.default, (grad,))
    tags.put(made, dataclasses.replace(tags.get(word), role="compute"), program.refake(made))


def gather_of(program: Program, word: Any) -> Any:
    """The all-gather of backward that sends what `word` steps."""
    return next(
        node
        for node in program.phase("backward")
        if node.target is ops.all_gather and node.all_input_nodes[0] in word.args[1]
    )


def gathered_later(program: Program) -> None:
    word = words(program)[0]
    with program.graph.inserting_after(word):
        gather = program.graph.node_copy(gather_of(program, word))
    gather.meta = dict(gather.meta) | {"fxshard": dataclasses.replace(tags.get(gather), pair=99)}


def still_in_flight(program: Program) -> None:
    word = words(program)[0]
    pair = tags.get(gather_of(program, word)).pair
    (wait,) = (n for n in program.graph.nodes if n.target is ops.wait and tags.get(n).pair == pair)
    word.append(wait)


def returned(program: Program) -> None:
    word = words(program)[0]
    program.results.append(Result("grad", word.args[2][0]))
    program.values = [*program.values, tags.operands(word)[0]]


def under_no_sync(program: Program) -> None:
    program.sync = False


def shorter(program: Program) -> None:
    word = words(program)[0]
    word.args = (word.args[0], word.args[1][:1], word.args[2])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (swapped_shards, "steps %shard_head_bias, not 'head.weight'"),
        (stepped_twice, "as %step_0 does"),
        (before_the_wait, r"%step_0 runs while %getitem_\d+"),
        (read_later, "reads what %step_0 has stepped"),
        (gathered_later, "%unshard_.* reads what %step_0 has stepped"),
        (still_in_flight, "%step_0 runs while %unshard_2, which reads the same, is in flight"),
        (returned, "is returned, not stepped"),
        (under_no_sync, "steps under no_sync"),
        (shorter, "lists of different lengths"),
    ],
)
@LAYOUTS
def test_the_verifier_finds(
    layout: dict[str, Any], fault: Callable[[Program], None], message: str
) -> None:
    program = planned(**layout).program
    verify.verify(program)
    fault(program)
    with pytest.raises(VerifyError, match=message):
        stepped_once(program)
    with pytest.raises(VerifyError):
        verify.verify(program)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (swapped_gradients, "'head.weight' is made of|is not the part of .* of 'head.weight'"),
        (lost, "'head.*' is not returned"),
    ],
)
@LAYOUTS
def test_what_is_stepped_is_reduced(
    layout: dict[str, Any], fault: Callable[[Program], None], message: str
) -> None:
    program = planned(**layout).program
    fault(program)
    with pytest.raises(VerifyError, match=message):
        reduced_once(program)


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EACH)
def test_bytes_are_exact(name: str) -> None:
    args, kwargs = UNEVEN.batch(0, 0)
    result = fxshard.validate(
        *(built(UNEVEN), args, kwargs),
        **{"world_size": 2, "units": UNEVEN.units, "optimizer": OPTIMIZERS[name]},
        optimizer_in_backward=True,
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)
    assert result.measured_peak_bytes == result.static_peak_bytes


SETTINGS: dict[str, dict[str, Any]] = {
    "one rank": {"world_size": 1},
    "no_shard": {"strategy": "no_shard"},
    "hybrid": {"strategy": "hybrid_shard", "world_size": (2, 2)},
    "stays": {"strategy": "shard_grad_op"},
    "bf16": {"mixed_precision": BF16},
    "offload": {"offload": CPUOffloadPolicy(pin_memory=False)},
    "accumulated": {"micro_batches": 2, "no_sync": True},
    "ignored": {"ignored": ["head"]},
    "checkpointed": {"checkpoint": "full"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_bytes_are_exact_under(setting: str) -> None:
    args, kwargs = UNEVEN.batch(0, 0)
    given = {"world_size": 2, "units": UNEVEN.units, "optimizer": OPTIMIZERS["adamw"]}
    result = fxshard.validate(
        *(built(UNEVEN), args, kwargs),
        **{**given, **SETTINGS[setting]},
        optimizer_in_backward=True,
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_other_models_are_exact(name: str) -> None:
    case = MODELS[name]
    args, kwargs = case.batch(0, 0)
    result = fxshard.validate(
        *(built(case), args, kwargs),
        **{"world_size": 2, "units": case.units, "optimizer": OPTIMIZERS["adamw"]},
        optimizer_in_backward=True,
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)


DEPTH, WIDTH = 8, 32


def deep(depth: int = DEPTH, **options: Any) -> Any:
    """Layers without bias, each a unit, on two rows: parameters outweigh all else."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))
    given = {"world_size": 2, "units": ["*"], "optimizer": OPTIMIZERS["sgd"]}
    return fxshard.plan(model, (torch.zeros(2, WIDTH),), **{**given, **options}).memory


def most(report: Any, category: Category) -> int:
    column = list(Category).index(category)
    return int(report.ledger().bytes[:, column].max())


def test_by_hand_the_gradients_of_one_unit_are_alive() -> None:
    """Of all units, if the step is behind backward: so much more does a layer cost then."""
    shard, activation = WIDTH * WIDTH * 4 // 2, 2 * WIDTH * 4
    behind = {depth: deep(depth) for depth in (8, 16)}
    inside = {depth: deep(depth, optimizer_in_backward=True) for depth in (8, 16)}
    for depth in (8, 16):
        assert most(behind[depth], Category.SHARDED_GRAD) == depth * shard
        assert most(inside[depth], Category.SHARDED_GRAD) == shard
        assert inside[depth].peak_by_category[Category.SHARDED_GRAD] == shard
    # Behind, the peak is at the end of backward: shards and gradients. Inside, at its beginning:
    # shards and what forward has saved.
    assert behind[16].peak_bytes - behind[8].peak_bytes == 8 * (shard + shard)
    assert inside[16].peak_bytes - inside[8].peak_bytes == 8 * (shard + activation)


def test_by_hand_states_and_temporaries_of_adamw() -> None:
    """The kernels of a step make two temporaries, of the size of the one parameter stepped."""
    shard = WIDTH * WIDTH * 4 // 2
    report = deep(optimizer_in_backward=True, optimizer=OPTIMIZERS["adamw"])
    held = [r for r in report.ledger().alive(0) if r.category is Category.OPT_STATE]
    assert sum(r.bytes for r in held) == DEPTH * (2 * shard + 4)
    phase = next(p for p in report.phases() if p.phase == "backward")
    column = list(Category).index(Category.TEMP)
    steps = [i for i, (name, _) in enumerate(phase.labels) if name.startswith("step")]
    assert len(steps) == DEPTH
    for i in steps:
        assert phase.during[i][column] - phase.after[i][column] == 2 * shard
    first = next(p for p in report.phases(first_step=True) if p.phase == "backward")
    column = list(Category).index(Category.OPT_STATE)
    made = [int(first.after[i][column] - first.after[i - 1][column]) for i in steps]
    assert made == DEPTH * [2 * shard + 4]


# -- states ----------------------------------------------------------------------------------------

KINDS = ("in_backward", "on_shards")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [StateDictOptions(), StateDictOptions(full_state_dict=True)],
    ids=["sharded", "full, and through the plain model"],
)
def test_state_dicts_of_distributed_checkpoint(
    ranks: Any, kind: str, options: StateDictOptions
) -> None:
    ranks(2).run(checkpoints.exchanged, "mlp13", options, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_checkpoint(ranks: Any, tmp_path: Path, kind: str) -> None:
    ranks(2).run(checkpoints.kept, kind, str(tmp_path / "ranks"))


@pytest.mark.slow
def test_checkpoints_from_2_to_4_to_1_and_into_fsdp2(ranks: Any, tmp_path: Path) -> None:
    two, four, one = (str(tmp_path / each) for each in ("two", "four", "one"))
    save, load = checkpoints.saved_and_trained_on, checkpoints.loaded
    want = ranks(2).run(save, "in_backward", "mlp13", two)[0]
    for kind in ("in_backward", "on_shards", "fsdp2", "fxshard"):
        found = ranks(2).run(load, kind, "mlp13", two)[0]
        assert_same(found[0], want[0])
        assert found[1] == want[1]  # training goes on bit by bit
        assert_same(found[2], want[2])
    assert_same(ranks(4).run(load, "in_backward", "mlp13", two, four)[0][0], want[0])
    assert_same(ranks(1).run(load, "in_backward", "mlp13", four, one)[0][0], want[0])
    assert_same(load(0, 1, "plain", "mlp13", one)[0], want[0])
    assert_same(load(0, 1, "in_backward", "mlp13", one)[0], want[0])


def plain_dicts(rank: int, world_size: int) -> None:
    """torch's own state_dict: into FSDP2's optimizer and back, and from whole tensors."""
    ours: Any = fxshard.compile(
        built(UNEVEN), units=UNEVEN.units, optimizer=OPTIMIZERS["adamw"], optimizer_in_backward=True
    )
    train(ours, ours.optimizer, UNEVEN, 2)
    theirs = fsdp2(UNEVEN)
    theirs.load_state_dict(ours.state_dict())
    optimizer = OPTIMIZERS["adamw"](theirs.parameters())
    optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
    assert train(theirs, optimizer, UNEVEN, 3) == train(ours, ours.optimizer, UNEVEN, 3)
    assert_same(checkpoints.values(ours, ours.optimizer), checkpoints.values(theirs, optimizer))
    fresh: Any = fxshard.compile(
        Uneven(), units=UNEVEN.units, optimizer=OPTIMIZERS["adamw"], optimizer_in_backward=True
    )
    fresh.load_state_dict(theirs.state_dict())
    state = optimizer.state_dict()
    whole = {
        number: {key: full(value) for key, value in entry.items()}
        for number, entry in state["state"].items()
    }
    fresh.optimizer.load_state_dict({"state": whole, "param_groups": state["param_groups"]})
    for param, entry in fresh.optimizer.state.items():
        assert isinstance(entry["exp_avg"], DTensor) and entry["exp_avg"].shape == param.shape
    assert train(theirs, optimizer, UNEVEN, 2) == train(fresh, fresh.optimizer, UNEVEN, 2)
    assert_same(checkpoints.values(fresh, fresh.optimizer), checkpoints.values(theirs, optimizer))


def test_torchs_state_dict(ranks: Any) -> None:
    ranks(2).run(plain_dicts)


def test_what_the_user_changes_in_the_state_counts() -> None:
    """Values in place, entries, all of it; groups and learning rates."""
    given = {"world_size": 2, "optimizer": OPTIMIZERS["sgd momentum"]}
    model, eager = Uneven(), Uneven()
    eager.load_state_dict(model.state_dict())
    compiled: Any = fxshard.compile(model, **given, optimizer_in_backward=True)
    pairs = ((compiled, compiled.optimizer), (eager, given["optimizer"](eager.parameters())))

    def change(number: int) -> None:
        for module, optimizer in pairs:
            param = next(module.parameters())
            if number == 0:
                optimizer.state[param]["momentum_buffer"].mul_(3)
            elif number == 1:
                optimizer.state[param]["momentum_buffer"] = torch.ones_like(param)
            elif number == 2:
                optimizer.state.clear()
            elif number == 3:
                optimizer.param_groups[0]["lr"] = 0.5
            elif number == 4:
                del optimizer.state[param]

    for number in range(6):
        losses = [train(module, optimizer, UNEVEN, 1) for module, optimizer in pairs]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        change(number)
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_copies_and_pickles() -> None:
    model = built(UNEVEN)
    compiled: Any = fxshard.compile(
        model, world_size=2, optimizer=OPTIMIZERS["adamw"], optimizer_in_backward=True
    )
    train(compiled, compiled.optimizer, UNEVEN, 2)
    alone = copy.deepcopy(compiled.optimizer)
    assert type(alone) is AdamW and len(alone.state) == 4
    again = pickle.loads(pickle.dumps(compiled.optimizer))
    assert type(again) is AdamW and len(again.state) == 4
    twin = copy.deepcopy(compiled)  # as torch copies a model: without its optimizer's state
    assert twin.optimizer is not compiled.optimizer and not twin.optimizer.state
    before = [param.detach().clone() for param in compiled.parameters()]
    train(twin, twin.optimizer, UNEVEN, 1)
    assert all(map(torch.equal, before, compiled.parameters()))
    assert not any(map(torch.equal, before, twin.parameters()))


# -- hooks, misuse ---------------------------------------------------------------------------------


def compiled_alone(**options: Any) -> Any:
    given = {"world_size": 2, "optimizer": OPTIMIZERS["adamw"], "optimizer_in_backward": True}
    return fxshard.compile(Uneven(), **{**given, **options})


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    args, _ = UNEVEN.batch(0, step)
    return UNEVEN.loss(model(*args))


def test_a_loop_that_steps_does_not_step_twice() -> None:
    model = compiled_alone()
    loss_of(model).backward()
    before = [param.detach().clone() for param in model.parameters()]
    calls: list[int] = []
    model.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    model.optimizer.step()
    model.optimizer.zero_grad()
    assert all(map(torch.equal, before, model.parameters())) and calls == [1]
    assert model.optimizer.step(lambda: 7) == 7


def test_a_closure_steps_once() -> None:
    model = compiled_alone(optimizer_in_backward=False)

    def closure() -> Tensor:
        model.optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    losses = [model.optimizer.step(closure).item() for _ in range(2)]
    assert losses[0] != losses[1]


def test_the_norm_of_all_gradients_is_never_known() -> None:
    model = compiled_alone()
    loss_of(model).backward()
    with pytest.raises(StepError, match="the norm of all is never known"):
        model.clip_grad_norm_(1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_is_refused(fused: bool) -> None:
    model = compiled_alone(optimizer=make(AdamW, lr=1e-2, fused=fused))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(StepError, match="gradients that are still scaled"):
        scaler.step(model.optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_works_behind_backward(fused: bool) -> None:
    options = {"optimizer": make(AdamW, lr=1e-2, fused=fused)}
    model, eager = compiled_alone(**options, optimizer_in_backward=False), Uneven()
    eager.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    found = []
    for module, optimizer in (
        (model, model.optimizer),
        (eager, options["optimizer"](eager.parameters())),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            loss = loss_of(module, step) * (float("inf") if step == 1 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append([param.detach() for param in module.parameters()] + [scaler.get_scale()])
    torch.testing.assert_close(found[0], found[1])


def test_two_forwards_before_the_first_backward_are_refused() -> None:
    model = compiled_alone()
    first, second = loss_of(model, 0), loss_of(model, 1)
    first.backward()
    with pytest.raises(StepError, match="changed in place between a forward and its backward"):
        second.backward()


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_is_refused(hook: str) -> None:
    model = compiled_alone()
    handle = getattr(model.get_parameter("head.bias"), hook)(lambda tensor: None)
    with pytest.raises(StepError, match=r"'head.bias' has a hook on its gradient"):
        loss_of(model)
    handle.remove()
    loss_of(model).backward()


class Own(SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (make(torch.optim.LBFGS), "LBFGS cannot step this rank's rows alone"),
        (make(torch.optim.Adafactor), "Adafactor cannot step this rank's rows alone"),
        (make(torch.optim.SparseAdam), "SparseAdam cannot step this rank's rows alone"),
        (make(Own, lr=0.1), "Own cannot step this rank's rows alone"),
        (make(Adam, differentiable=True), "differentiable=True"),
    ],
)
def test_what_needs_whole_parameters_is_refused(optimizer: Make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compiled_alone(optimizer=optimizer)
    with pytest.raises(ConfigError, match=message):
        planned(optimizer=optimizer).memory.peak_bytes  # noqa: B018
    with pytest.raises(ConfigError, match=message):
        compiled_alone(optimizer=optimizer, optimizer_in_backward=False).optimizer  # noqa: B018


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="needs an optimizer"):
        compiled_alone(optimizer=None)
    with pytest.raises(ConfigError, match="the first micro-batch would step already"):
        planned(micro_batches=2)
    with pytest.raises(AttributeError):
        compiled_alone(optimizer=None, optimizer_in_backward=False).optimizer  # noqa: B018


def test_a_parameter_in_no_group_is_named() -> None:
    model = compiled_alone(optimizer=lambda params: SGD(list(params)[:2], lr=0.1))
    with pytest.raises(StepError, match="is in no group"):
        loss_of(model).backward()


def _two_groups(named_parameters: Iterable[tuple[str, Any]]) -> Optimizer:
    named = list(named_parameters)
    inner = [param for name, param in named if name.startswith("inner")]
    head = [param for name, param in named if name.startswith("head")]
    groups = [{"params": inner, "lr": 0.1}, {"params": head, "lr": 0.01, "weight_decay": 0.1}]
    return SGD(groups, lr=0.1, momentum=0.9)


def _moved(optimizer: Optimizer) -> None:
    inner, head = (group["params"] for group in optimizer.param_groups)
    head.append(inner.pop(0))


CHANGES: dict[str, Callable[[Optimizer], Any]] = {
    "moved": _moved,
    "reversed": lambda optimizer: optimizer.param_groups.reverse(),
    "in another order": lambda optimizer: optimizer.param_groups[0]["params"].reverse(),
    "exchanged": lambda optimizer: optimizer.param_groups.__setitem__(
        slice(None), [{**g, "lr": g["lr"] / 2} for g in reversed(optimizer.param_groups)]
    ),
    "a group gone": lambda optimizer: optimizer.param_groups.pop(0),
    "a parameter gone": lambda optimizer: optimizer.param_groups[1]["params"].pop(0),
}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_groups_that_the_user_changes_count(change: str, in_backward: bool) -> None:
    eager = Uneven()
    model: Any = compiled_alone(optimizer=_two_groups, optimizer_in_backward=in_backward)
    model.load_state_dict(eager.state_dict())
    optimizers = {eager: _two_groups(eager.named_parameters()), model: model.optimizer}
    for module, optimizer in optimizers.items():
        train(module, optimizer, UNEVEN, 2)
        CHANGES[change](optimizer)
    if in_backward and "gone" in change:  # the program steps what nothing says how to step
        before = {name: full(param).clone() for name, param in model.named_parameters()}
        with pytest.raises(StepError, match="is in no group"):
            loss_of(model).backward()
        gone = "inner.weight" if change == "a group gone" else "head.weight"
        assert torch.equal(before[gone], full(model.get_parameter(gone)))
        return
    for module, optimizer in optimizers.items():
        train(module, optimizer, UNEVEN, 2)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(full(ours), theirs)
