"""A new operator takes one entry and a method of its name on each world; fxshard knows the rest."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxshard
from fxshard.errors import VerifyError
from fxshard.ir import dump, ops, tags, text, transfers
from fxshard.ir.program import Fact, Program
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld, Ranks
from fxshard.verify import verify
from fxshard.verify.certificate import collectives

# -- the operator ---------------------------------------------------------------------------------


def fresh(empty: ops.Empty, tensors: list[Tensor], size: int, group: str = "") -> list[Tensor]:
    return [empty(t, t.shape) for t in tensors]


broadcast = ops.define(
    ops.OpSpec(
        "broadcast(Tensor[] tensors, int size, str group='shard') -> Tensor[]",
        fake=fresh,
        stream="unshard",
        event="b",
        category="ACTIVATION",
        over="network",
    )
)


def on_this_rank(
    world: Any, tensors: list[Tensor], pair: int, group: str = "shard"
) -> list[Tensor]:
    made, members = [t.clone() for t in tensors], world.groups[group]
    with world._launch(broadcast, pair, group) as launch:
        for buffer in made:
            work = dist.broadcast(buffer, group=members, group_src=0, async_op=True)
            launch.works.append(work)
    return made


def on_all_ranks(world: InProcessWorld, ranks: Ranks) -> Ranks:
    return [[tensor.clone() for tensor in ranks[0]] for _ in ranks]


@pytest.fixture(autouse=True)
def known_to_worlds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(C10dWorld, "broadcast", on_this_rank, raising=False)
        patch.setattr(InProcessWorld, "broadcast", on_all_ranks, raising=False)
        yield


# -- a pass that uses it --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BroadcastBuffers:
    """Compute with the buffers of the first rank, as DDP does."""

    name: ClassVar[str] = "broadcast-buffers"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSHARD_PAIRED})
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        placeholders = program.graph.find_nodes(op="placeholder")
        buffers = [node for node in placeholders if tags.get(node).role == "buffer"]
        pairs = [tags.get(node).pair for node in program.graph.nodes]
        pair = 1 + max(number for number in pairs if number is not None)
        tag = tags.Meta("forward", "transfer", unit=0, pair=pair)
        args, names = (buffers, program.world_size), [tags.get(node).fqn or "" for node in buffers]
        with program.graph.inserting_before(program.phase("forward")[0]):
            made = transfers.insert_operator(program, broadcast, args, names, tag, "broadcast")
            transfers.insert_wait(program, made, tag)
        for buffer, copy in zip(buffers, made, strict=True):
            buffer.replace_all_uses_with(copy, lambda user: user.target is not broadcast)
            program.refresh_views(copy, tags.storage_ids(buffer))


def passes(default: Sequence[Any]) -> list[Any]:
    at = [each.name for each in default].index("insert-free")
    return [*default[:at], BroadcastBuffers(), *default[at:]]


class Scaled(nn.Module):
    """Two layers and two buffers, one of which backward reads."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor([1.0, 2, 3, 4, 5, 6]))
        self.register_buffer("shift", torch.arange(8.0).view(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x + self.shift.t().contiguous().t())) * self.scale
        return self.down(hidden)


BATCH = torch.arange(8.0).view(2, 4) / 8
OPTIONS: dict[str, Any] = {"units": ["up", "down"], "passes": passes}


def planned() -> Any:
    return fxshard.plan(Scaled(), (BATCH,), world_size=2, **OPTIONS)


# -- what fxshard knows of it ---------------------------------------------------------------------


def test_it_is_dumped_with_its_wait_and_its_free() -> None:
    made = planned()
    lines = dump.text(made.program).splitlines()
    launch = next(line for line in lines if "fxshard.broadcast" in line)
    (node,) = made.program.graph.find_nodes(op="call_function", target=broadcast)
    pair = tags.get(node).pair
    assert launch.endswith(f"unit=0 pair={pair} stream=unshard waits=c_forward records=b{pair}")
    assert "%broadcast : (f32[6], f32[2,4]) = fxshard.broadcast([%primals_" in launch
    rows = {(row.operation, row.what, row.phase): row for row in dump.rows(made.program)}
    row = rows["broadcast", "2 tensors", "forward"]
    assert (row.stream, row.bytes) == ("unshard", 4 * (6 + 8))
    assert rows["wait", "transfer", "forward"].waits == "unshard"
    assert rows["free", "transfer", "backward"].bytes == 4 * (6 + 8)
    assert collectives(made.program)[0].startswith(
        "0 forward fxshard.broadcast group=shard size=2 unit=0 bytes=56 [scale f32[6], shift f32["
    )


def test_its_program_is_written_and_read() -> None:
    written = text.write(planned().program)
    read = text.parse(written)
    assert text.write(read) == written
    verify(read)


def test_it_is_verified() -> None:
    def has_no_wait(program: Program, launch: Any) -> None:
        for wait in program.graph.find_nodes(op="call_function", target=ops.wait):
            if tags.get(wait).pair == tags.get(launch).pair:
                program.graph.erase_node(wait)

    def is_on_another_stream(program: Program, launch: Any) -> None:
        tags.update(launch, stream="reduce")

    def has_another_group(program: Program, launch: Any) -> None:
        launch.args = (launch.args[0], 3)

    def is_not_freed(program: Program, launch: Any) -> None:
        for free in program.graph.find_nodes(op="call_function", target=ops.free):
            if tags.get(free).pair == tags.get(launch).pair:
                program.graph.erase_node(free)

    def waits_for_nobody(program: Program, launch: Any) -> None:
        tags.update(launch, waits=())

    def has_another_shape(program: Program, launch: Any) -> None:
        launch.meta["val"] = launch.meta["val"][::-1]

    wrong = {
        has_no_wait: Fact.UNSHARD_PAIRED,
        is_on_another_stream: Fact.STREAMS_ORDERED,
        has_another_group: Fact.EQUAL_CHUNKS,
        is_not_freed: Fact.FREED,
        waits_for_nobody: Fact.STREAMS_ORDERED,
        has_another_shape: Fact.EQUAL_CHUNKS,
    }
    for change, fact in wrong.items():
        program = text.parse(text.write(planned().program))
        program.schedule = None
        (launch,) = program.graph.find_nodes(op="call_function", target=broadcast)
        change(program, launch)
        with pytest.raises(VerifyError) as caught:
            verify(program)
        assert caught.value.fact == fact.name.lower(), change.__name__


def test_its_bytes_are_known_beforehand() -> None:
    found = fxshard.validate(
        Scaled(), (BATCH,), world_size=2, numerics=True, optimizer=torch.optim.Adam, **OPTIONS
    )
    assert found.max_abs_difference == 0, found.table(only_different=True)
    assert found.numerics is not None and found.numerics.verdict != "wrong"
    plain = fxshard.plan(Scaled(), (BATCH,), world_size=2, units=["up", "down"])
    assert planned().memory.peak_bytes == plain.memory.peak_bytes + 4 * (6 + 8)
    copies = [r for r in planned().memory.ledger().ranges if r.op == "fxshard.broadcast"]
    assert [each.bytes for each in copies] == [4 * 6, 4 * 8]


def test_its_time_is_estimated() -> None:
    estimate = planned().estimate("h100")
    (row,) = (row for row in estimate.rows if row.operation == "broadcast")
    assert row.seconds > 0 and row.link_bytes == 4 * (6 + 8) / 2
    traffic = estimate.traffic()["broadcast"]
    assert (traffic.collectives, traffic.link_bytes) == (1, row.link_bytes)


# -- what it does ---------------------------------------------------------------------------------


def trained(model: Any, eager: nn.Module, batch: Tensor) -> None:
    """A step of both on one batch gives the same."""
    out, want = model(batch), eager(batch)
    torch.testing.assert_close(out, want)
    out.square().sum().backward()
    want.square().sum().backward()


def same_gradients(model: Any, eager: nn.Module) -> None:
    for got, want in zip(model.parameters(), eager.parameters(), strict=True):
        grad = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
        torch.testing.assert_close(grad, want.grad)


def test_all_ranks_in_this_process_compute_as_eager() -> None:
    model, eager = fxshard.compile(Scaled(), world_size=2, **OPTIONS), Scaled()
    trained(model, eager, BATCH)
    same_gradients(model, eager)


def run(rank: int, world_size: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(C10dWorld, "broadcast", on_this_rank, raising=False)
        model, eager = fxshard.compile(Scaled(), **OPTIONS), Scaled()
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.mul_(rank + 1)  # another on each rank; eager has the first's
        trained(model, eager, BATCH)
        same_gradients(model, eager)
        torch.testing.assert_close(model.scale, eager.scale * (rank + 1))  # its own is as it was
    return collectives(model.plan.program)


def test_two_ranks_compute_with_the_buffers_of_the_first(ranks: Any) -> None:
    first, second = ranks(2).run(run)
    assert first == second == collectives(planned().program)
