"""The fact OFFLOADED: what leaves comes back whole, once, in time, and little is on its way."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import fx

from fxshard.errors import VerifyError
from fxshard.ir import ops, tags
from fxshard.ir.program import Program
from fxshard.verify.offloads import offloaded
from tests.passes.test_streams import small

Fault = Callable[[Program], Any]


def launches(program: Program, target: Any) -> list[fx.Node]:
    return list(program.graph.find_nodes(op="call_function", target=target))


def wait_of(program: Program, launch: fx.Node) -> fx.Node:
    pair = tags.get(launch).pair
    (wait,) = (n for n in launches(program, ops.wait) if tags.get(n).pair == pair)
    return wait


def reads_what_left(program: Program) -> None:
    left = tags.operands(launches(program, ops.offload)[0])[0]
    back = next(iter(launches(program, ops.reload)[-1].users))
    reader = next(user for user in back.users if user.target is not ops.wait)
    reader.replace_input_with(back, left)


def comes_back_twice(program: Program) -> None:
    launch = launches(program, ops.reload)[0]
    with program.graph.inserting_after(launch):
        twin = program.graph.node_copy(launch)
    twin.meta = dict(launch.meta)


def another_comes_back(program: Program) -> None:
    first, second = launches(program, ops.reload)
    first.args, second.args = second.args, first.args


def under_another_name(program: Program) -> None:
    tags.update(next(iter(launches(program, ops.offload)[0].users)), fqn="%x_3")


def back_under_another_name(program: Program) -> None:
    tags.update(next(iter(launches(program, ops.reload)[0].users)), fqn="%x_3")


def otherwise_laid_out(program: Program) -> None:
    item = next(iter(launches(program, ops.reload)[0].users))
    item.meta["val"] = item.meta["val"].t()


def to_another_device(program: Program) -> None:
    launch = launches(program, ops.reload)[0]
    launch.args = (launch.args[0], "meta")


def in_the_other_phase(program: Program) -> None:
    tags.update(launches(program, ops.offload)[0], phase="backward")


def late_wait(program: Program) -> None:
    first = launches(program, ops.offload)[0]
    program.phase("forward")[-1].append(wait_of(program, first))


def early_launches(program: Program) -> None:
    """All come back where backward begins."""
    at = program.phase("backward")[0]
    for launch in launches(program, ops.reload)[::-1]:
        for node in (launch, *launch.users):
            if node.target is not ops.wait and node is not at:
                at.prepend(node)
    program.reload_ahead = 0


def nobody_reads_it(program: Program) -> None:
    back = next(iter(launches(program, ops.reload)[0].users))
    other = next(n for n in program.graph.nodes if tags.get(n).role == "input")
    back.replace_all_uses_with(other, lambda user: user.target is not ops.wait)


FAULTS: dict[str, Fault] = {
    "which is on the CPU by then": reads_what_left,
    "has 2 readers, expected one reload": comes_back_twice,
    "stands for %x_1, but takes %x_2_on_cpu|stands for %x_2, but takes %x_1_on_cpu": (
        another_comes_back
    ),
    "stands for %x_3, but takes %x_1": under_another_name,
    "stands for %x_3, but takes %x_2_on_cpu": back_under_another_name,
    "lies otherwise": otherwise_laid_out,
    "does not copy to cpu": to_another_device,
    "is not in forward": in_the_other_phase,
    "may still be on its way": late_wait,
    "is the launch of 2 units' activations before their use; the limit is ahead": early_launches,
    "brings back what nothing reads": nobody_reads_it,
}


@pytest.mark.parametrize("said", FAULTS)
def test_what_leaves_or_comes_back_otherwise_is_noticed(said: str) -> None:
    program = small("activations")
    offloaded(program)
    FAULTS[said](program)
    with pytest.raises(VerifyError, match=said):
        offloaded(program)
