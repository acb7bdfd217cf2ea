"""The certificate: one on all ranks, another one if any rank would do anything else."""

import hashlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

import fxshard
import fxshard.codegen.emit
from fxshard import pipeline
from fxshard._torch import process_groups
from fxshard.config.checked import Config
from fxshard.errors import RankMismatchError
from fxshard.ir import dump, ops, tags
from fxshard.ir.program import Program
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.peers import first_difference
from fxshard.verify.certificate import agreement, certificate, collectives
from tests import graphs
from tests.verify.verify_cases import fresh
from tests.zoo import MODELS, models

WORLDS: list[tuple[int, ...]] = [(2,), (3,), (4,), (7,), (8,), (2, 2), (2, 4)]
SLOW = [pytest.param(shape, marks=pytest.mark.slow) for shape in [(4,), (7,), (8,), (2, 4)]]


def rewritten(program: Program, **options: Any) -> Program:
    pipeline.run(program, pipeline.default_passes(Config(**options)))
    return program


def plan(name: str, world_size: int = 2) -> fxshard.Plan:
    args, kwargs = MODELS[name].batch(0, 0)
    return fxshard.plan(MODELS[name].build(), args, kwargs, world_size=world_size)


def texts_on(rank: int, shape: tuple[int, ...], name: str) -> list[str]:
    """All of the program of one rank, as text. Ranks have other weights and other batches."""
    world_size = torch.Size(shape).numel()
    with process_groups.fake_process_group(rank, world_size):
        torch.manual_seed(rank)
        ballast = [torch.empty(rank) for _ in range(100 * rank)]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        strategy = "hybrid_shard" if len(shape) == 2 else "full_shard"
        case = MODELS[name]
        model = fxshard.compile(case.build(), mesh=mesh, strategy=strategy, units=case.units)
        program = model._fxshard.variant(*case.batch(rank, rank)).program
        del ballast
    return [
        dump.text(program),
        dump.schedule(program),
        *agreement(program),
        certificate(program),
        fxshard.codegen.emit.emit(program),
    ]


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2), *SLOW], ids=str)
@pytest.mark.sample(2)
def test_every_rank_has_one_text(shape: tuple[int, ...]) -> None:
    first, *others = [texts_on(rank, shape, "mlp13") for rank in range(torch.Size(shape).numel())]
    assert others and all(text == first for text in others)


@pytest.mark.slow
@pytest.mark.parametrize("shape", WORLDS, ids=str)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "mlp13"])
def test_every_rank_has_one_text_of_every_model(name: str, shape: tuple[int, ...]) -> None:
    first, *others = [texts_on(rank, shape, name) for rank in range(torch.Size(shape).numel())]
    assert others and all(text == first for text in others)


# -- what it says ---------------------------------------------------------------------------------


def test_collectives_in_order() -> None:
    gather, scatter = "fxshard.all_gather group=shard size=2", "fxshard.reduce_scatter group=shard"
    assert collectives(rewritten(graphs.chain())) == [
        f"0 forward {gather} unit=1 bytes=32 [layers.0.weight f32[2,4]]",
        f"1 forward {gather} unit=2 bytes=32 [layers.1.weight f32[2,4]]",
        f"2 forward {gather} unit=0 bytes=24 [head f32[2,3]]",
        *(
            f"{i} backward {line}"
            for i, line in enumerate(
                sorted_as_launched(
                    f"{scatter} size=2 op=avg unit=0 bytes=48 [head f32[4,3]]",
                    f"{gather} unit=0 bytes=24 [head f32[2,3]]",
                    f"{gather} unit=2 bytes=32 [layers.1.weight f32[2,4]]",
                    f"{scatter} size=2 op=avg unit=2 bytes=64 [layers.1.weight f32[4,4]]",
                    f"{scatter} size=2 op=avg unit=1 bytes=64 [layers.0.weight f32[4,4]]",
                ),
                3,
            )
        ),
    ]


def sorted_as_launched(*lines: str) -> list[str]:
    """`lines` in the order of the launches of the graph (which passes choose)."""
    nodes = [n for n in rewritten(graphs.chain()).phase("backward") if ops.of(n).collective]
    names = [dump.operation(n) + f" unit={tags.get(n).unit}" for n in nodes]
    found = {f"{line.split()[0]} {line[line.index('unit=') :].split()[0]}": line for line in lines}
    return [found[name] for name in names]


def test_groups_operations_and_dtypes_are_said() -> None:
    program = graphs.chain(replicas=2, precision=graphs.BF16)
    lines = collectives(rewritten(program))
    assert any("fxshard.all_reduce group=replicate size=2 op=avg" in line for line in lines)
    assert any(
        "all_gather" in line and "bytes=16 [layers.0.weight bf16[2,4]]" in line for line in lines
    )


def test_collectives_are_those_of_the_graph() -> None:
    program = plan("mlp13", world_size=3).program
    launches = [node for node in program.graph.nodes if ops.of(node).collective]
    lines = collectives(program)
    assert len(lines) == len(launches)
    for line, node in zip(lines, launches, strict=True):
        fqns = [tags.get(item).fqn or "" for item in node.users]
        assert all(f"{fqn} " in line for fqn in fqns)
    named = " ".join(lines)
    assert all(fqn in named for fqn in program.params)


def test_certificate_tells_programs_apart() -> None:
    certificates = [
        certificate(rewritten(graphs.chain(4))),
        certificate(rewritten(graphs.chain(3))),
        certificate(rewritten(graphs.layered())),
        certificate(rewritten(graphs.chain(4), backward_prefetch=2)),
    ]
    assert len(set(certificates)) == len(certificates)
    assert certificate(rewritten(graphs.chain(4))) == certificates[0]
    lines = collectives(rewritten(graphs.chain(4)))
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == certificates[0]


def test_certificate_depends_on_the_world_size() -> None:
    assert plan("tied", 2).certificate != plan("tied", 4).certificate


def test_certificate_does_not_see_what_moves_no_data() -> None:
    """Two programs that issue the same collectives may go together, whatever they compute."""
    one, two = graphs.chain(), graphs.chain()
    node = one.phase("forward")[2]
    node.target = torch.ops.aten.sigmoid.default
    assert certificate(rewritten(one)) == certificate(rewritten(two))


def test_agreement_tells_batches_and_modes_apart() -> None:
    model = models.Transformer(depth=1)

    def agreed(*shape: int) -> list[str]:
        tokens = torch.zeros(shape, dtype=torch.int64)
        return agreement(fxshard.plan(model, (tokens,), world_size=2).program)

    training = agreed(2, 8)
    assert training == agreed(2, 8)
    with torch.no_grad():
        inference = agreed(2, 8)
    assert "mode training" in training and "mode inference" in inference


# -- another program on one rank ------------------------------------------------------------------

Change = Callable[[fx.Node], None]  # of a launch


def with_argument(name: str, value: Any) -> Change:
    def change(node: fx.Node) -> None:
        names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        if name in names:
            args = (
                list(node.args)
                + [a.default_value for a in node.target._schema.arguments][len(node.args) :]
            )  # type: ignore[union-attr]
            args[names.index(name)] = value
            node.args = tuple(args)

    return change


def with_tag(**changes: Any) -> Change:
    return lambda node: tags.update(node, **changes)


def with_name(node: fx.Node) -> None:
    tags.update(next(iter(node.users)), fqn="another.weight")


def with_value(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def changed(node: fx.Node) -> None:
        operand = tags.operands(node)[-1]
        operand.meta["val"] = change(operand.meta["val"])

    return changed


def with_target(node: fx.Node) -> None:
    others = {ops.all_gather: ops.reduce_scatter, ops.reduce_scatter: ops.all_gather}
    node.target = others.get(node.target, ops.reduce_scatter)
    node.args = node.args[:2]


def fewer_tensors(node: fx.Node) -> None:
    node.args = (tags.operands(node)[:-1], *node.args[1:])


def dropped(node: fx.Node) -> None:
    node.target = ops.cast  # no collective any more


def launched_later(node: fx.Node) -> None:
    """Behind the next collective."""
    following = node.next
    while not ops.of(following).collective:
        following = following.next
        if following.op == "output":
            return
    following.append(node)


def launched_twice(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        twin = node.graph.call_function(node.target, node.args)
        twin.meta = dict(node.meta)
    for i, operand in enumerate(tags.operands(node)):
        with node.graph.inserting_after(twin):
            item = node.graph.call_function(operator.getitem, (twin, i))
            item.meta = dict(operand.meta)


CHANGES: dict[str, Change] = {
    "size": with_argument("size", 5),
    "group": with_argument("group", "elsewhere"),
    "operation": with_argument("op", "max"),
    "phase": with_tag(phase="elsewhere"),
    "unit": with_tag(unit=7),
    "fqn": with_name,
    "dtype": with_value(lambda val: val.to(torch.float64)),
    "shape": with_value(lambda val: val.view(1, -1)),
    "bytes": with_value(lambda val: val[:1]),
    "target": with_target,
    "fewer_tensors": fewer_tensors,
    "dropped": dropped,
    "launched_later": launched_later,
    "launched_twice": launched_twice,
}
PROGRAMS: dict[str, Callable[[], Program]] = {
    "full": lambda: rewritten(graphs.layered(), **graphs.APART),
    "packed": lambda: rewritten(graphs.layered()),
    "hybrid_bf16": lambda: rewritten(graphs.chain(3, replicas=2, precision=graphs.BF16)),
    "offload": lambda: rewritten(graphs.chain(offloaded=True)),
}


def changed(build: Callable[[], Program], change: Change) -> Iterator[tuple[int, list[str]]]:
    """Per collective that `change` changes: its number, and the lines of the program then."""
    right = build()
    for number in range(len(collectives(right))):
        program = fresh(right, right.world_size)
        node = [n for n in program.graph.nodes if ops.of(n).collective][number]
        before = (node.target, node.args, dict(node.meta), node.next, len(program.graph.nodes))
        what = [(n.meta["val"], tags.get(n)) for n in (*tags.operands(node), *node.users)]
        with program.fake_mode:
            change(node)
        after = (node.target, node.args, dict(node.meta), node.next, len(program.graph.nodes))
        same = [(n.meta["val"], tags.get(n)) for n in (*tags.operands(node), *node.users)]
        if (
            before != after
            or len(what) != len(same)
            or not all(a is c and b == d for (a, b), (c, d) in zip(what, same, strict=True))
        ):
            yield number, collectives(program)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sample(4)
def test_any_change_of_one_rank_is_seen(name: str) -> None:
    seen = 0
    for build in PROGRAMS.values():
        right = collectives(build())
        for number, lines in changed(build, CHANGES[name]):
            seen += 1
            assert lines != right
            first, theirs, ours = first_difference("\n".join(right), "\n".join(lines))
            assert first <= number + (name == "launched_twice") and theirs != ours
    assert seen >= 3


def agree_on(rank: int, world_size: int, lines: list[str], others: dict[int, list[str]]) -> str:
    """What a rank is told that has `others` of its number instead of `lines`, if it has."""
    world = C10dWorld(init_device_mesh("cpu", (world_size,)))
    try:
        world.agree(others.get(rank, lines), "the collectives")
    except RankMismatchError as error:
        return str(error)
    return "agreed"


def test_ranks_name_the_first_line_instead_of_hanging(ranks: Any) -> None:
    lines = collectives(PROGRAMS["full"]())
    assert ranks(3).run(agree_on, lines, {}) == ["agreed"] * 3
    swapped = [*lines[:2], lines[3], lines[2], *lines[4:]]
    for text in ranks(3).run(agree_on, lines, {2: swapped}):
        assert f"First difference, line 3: rank 0 has '{lines[2]}', rank 2 '{lines[3]}'." in text
    fewer = lines[:-1]
    for text in ranks(3).run(agree_on, lines, {1: fewer, 2: fewer}):
        assert f"rank 0 has '{lines[-1]}', rank 1, 2 '(nothing)'." in text
    other = [lines[0].replace("f32", "bf16"), *lines[1:]]
    for text in ranks(3).run(agree_on, lines, {0: other}):  # rank 0 is the odd one
        assert f"line 1: rank 0 has '{other[0]}', rank 1, 2 '{lines[0]}'." in text
    for text in ranks(3).run(agree_on, lines, {1: other, 2: swapped}):
        assert (
            f"line 1: rank 0 has '{lines[0]}', rank 1 '{other[0]}'. rank 2 differs further" in text
        )
