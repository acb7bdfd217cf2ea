"""The optimizer in the program: stepped unit by unit inside of backward, and on local shards.

The reference is FSDP2 with the same torch optimizer, stepping after backward.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

import fxshard
from fxshard import pipeline, verify
from fxshard.config.checked import Config
from fxshard.errors import VerifyError
from fxshard.ir import dump, ops, tags
from fxshard.ir.program import Program, Result
from fxshard.passes.insert_step import InsertStep
from fxshard.verify.gradients import reduced_once
from fxshard.verify.steps import stepped_once
from tests import graphs
from tests.codegen.optimizer_in_program_cases import (
    BF16,
    EACH,
    OPTIMIZERS,
    UNEVEN,
    Make,
    Uneven,
    assert_same,
    built,
    fsdp2,
    planned,
    train,
)
from tests.runtime import test_checkpoints as checkpoints
from tests.zoo import MODELS, Case

CASES = MODELS | {"uneven": UNEVEN}


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


@pytest.mark.parametrize("name", EACH)
@pytest.mark.sample(2)
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
@pytest.mark.sample(3)
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
    """Nothing reduces them: the user may, between backward and step."""
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


def steps(program: Program) -> list[Any]:
    return program.graph.find_nodes(op="call_function", target=ops.step)


LAYOUTS = pytest.mark.parametrize("layout", [{}, graphs.APART], ids=["packed", "apart"])


@LAYOUTS
def test_each_unit_is_stepped_after_its_reduction_and_its_gradients_are_freed(
    layout: dict[str, Any],
) -> None:
    rows = [(r.operation, r.units[0]) for r in dump.rows(planned(**layout).program)]
    assert [row for row in rows if row[0] == "step"] == [("step", "(root)"), ("step", "inner")]
    program = planned(MODELS["mlp13"], **layout).program
    assert [r for r in program.results if r.kind == "grad"] == []
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    assert len(steps(program)) == len(program.units)
    assert sorted(fqn for step in steps(program) for fqn in step.args[2]) == sorted(program.params)
    frees = program.graph.find_nodes(op="call_function", target=ops.free)

    def storages(node: Any) -> set[int]:
        return set().union(*map(tags.storage_ids, tags.operands(node)))

    for step in steps(program):
        (free,) = (node for node in frees if storages(node) & storages(step))
        assert order[free] == order[step] + 1


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


def test_with_one_rank_a_parameter_is_stepped_after_its_last_reader() -> None:
    program = planned(world_size=1).program
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    for step in steps(program):
        shards = set().union(*map(tags.storage_ids, step.args[1]))
        readers = [
            node
            for node in program.graph.nodes
            if node.op == "call_function"
            and set().union(*map(tags.storage_ids, node.all_input_nodes), set()) & shards
        ]
        assert max(readers, key=order.__getitem__) is step


def swapped_shards(program: Program) -> None:
    step = steps(program)[0]
    first, second = step.args[1]
    step.args = (step.args[0], [second, first], step.args[2])


def swapped_gradients(program: Program) -> None:
    step = steps(program)[0]
    first, second = step.args[0]
    step.args = ([second, first], *step.args[1:])


def lost(program: Program) -> None:
    program.graph.erase_node(steps(program)[0])


def stepped_twice(program: Program) -> None:
    step = steps(program)[0]
    with program.graph.inserting_after(step):
        again = program.graph.node_copy(step)
    again.meta = dict(step.meta)


def before_the_wait(program: Program) -> None:
    step = steps(program)[0]
    (pair,) = {tags.get(tags.source(grad)).pair for grad in tags.operands(step)}
    (wait,) = (n for n in program.graph.nodes if n.target is ops.wait and tags.get(n).pair == pair)
    parts = [n for n in program.graph.nodes if tags.get(n).pair == pair]
    for node in [*(n for n in parts if tags.get(n).role == "post_reduction"), step]:
        wait.prepend(node)


def read_later(program: Program) -> None:
    step = steps(program)[0]
    grad = tags.operands(step)[0]
    with program.graph.inserting_after(step):
        made = program.graph.call_function(torch.ops.aten.neg.default, (grad,))
    tags.put(made, dataclasses.replace(tags.get(step), role="compute"), program.refake(made))


def gather_of(program: Program, step: Any) -> Any:
    """The all-gather of backward that sends what `step` steps."""
    return next(
        node
        for node in program.phase("backward")
        if node.target is ops.all_gather and node.all_input_nodes[0] in step.args[1]
    )


def gathered_later(program: Program) -> None:
    step = steps(program)[0]
    with program.graph.inserting_after(step):
        gather = program.graph.node_copy(gather_of(program, step))
    gather.meta = dict(gather.meta) | {"fxshard": dataclasses.replace(tags.get(gather), pair=99)}


def still_in_flight(program: Program) -> None:
    step = steps(program)[0]
    pair = tags.get(gather_of(program, step)).pair
    (wait,) = (n for n in program.graph.nodes if n.target is ops.wait and tags.get(n).pair == pair)
    step.append(wait)


def returned(program: Program) -> None:
    step = steps(program)[0]
    program.results.append(Result("grad", step.args[2][0]))
    program.values = [*program.values, tags.operands(step)[0]]


def under_no_sync(program: Program) -> None:
    program.sync = False


def shorter(program: Program) -> None:
    step = steps(program)[0]
    step.args = (step.args[0], step.args[1][:1], step.args[2])


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
