"""Every way in which ranks could wait for each other, or read too early, across groups of ranks.

For each kind of group (tensor, expert and context parallelism, replicas, experts on a mesh of their
own), and for what backward sends again: the fault is put into the program of one rank, and either
the verifier refuses that, or its certificate is another, and ranks say where. What does harm if all
ranks do it alike, the verifier alone refuses.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from fxshard import verify
from fxshard._torch.traced_collectives import WAIT, is_collective
from fxshard.errors import VerifyError
from fxshard.ir import ops, tags
from fxshard.ir.program import Program
from fxshard.runtime.world.peers import first_difference
from fxshard.verify.certificate import collectives
from tests.verify.groups_programs import PLANS, program, refused_after
from tests.verify.test_certificate import with_argument
from tests.verify.test_faults import again

NUMBER = torch.ops.aten._local_scalar_dense.default
Fault = Callable[[Program, fx.Node], bool]  # changes the program around a launch; False: no place


def nodes(broken: Program) -> list[fx.Node]:
    return list(broken.graph.nodes)


def launches(broken: Program) -> list[fx.Node]:
    """Collectives of all kinds, in order; without those that stay in regions."""
    return [node for node in broken.graph.nodes if ops.of(node).collective]


def wait_of(broken: Program, launch: fx.Node) -> fx.Node:
    (found,) = (
        node
        for node in broken.graph.find_nodes(op="call_function", target=ops.wait)
        if tags.get(node).pair == tags.get(launch).pair
    )
    return found


def readers(launch: fx.Node) -> list[fx.Node]:
    """Those of its results that touch data, in order."""
    found = [user for item in launch.users for user in item.users]
    return sorted(node for node in found if node.op == "call_function" and node.target != ops.wait)


# -- faults of one launch --------------------------------------------------------------------------


def no_wait(broken: Program, launch: fx.Node) -> bool:
    broken.graph.erase_node(wait_of(broken, launch))
    return True


def waits_too_late(broken: Program, launch: fx.Node) -> bool:
    found = readers(launch)
    if found:
        found[0].append(wait_of(broken, launch))
    return bool(found)


def waits_before_its_launch(broken: Program, launch: fx.Node) -> bool:
    launch.prepend(wait_of(broken, launch))
    return True


def before_what_it_sends(broken: Program, launch: fx.Node) -> bool:
    sent = tags.operands(launch)[0]
    if sent.op == "call_function":
        sent.prepend(launch)
    return sent.op == "call_function"


def before_the_wait_for_what_it_sends(broken: Program, launch: fx.Node) -> bool:
    """What it sends has been received, or was computed from that."""
    behind = closure(launch)
    for other in reversed([each for each in launches(broken) if each in behind]):
        wait = wait_of(broken, other)
        moved = [n for n in nodes(broken) if n in behind and after(n, wait)]
        if all(movable(n) for n in moved):
            for node in [*moved, launch, *launch.users]:
                wait.prepend(node)
            return True
    return False


def after(node: fx.Node, place: fx.Node) -> bool:
    return bool(place < node)


def movable(node: fx.Node) -> bool:
    """It computes; its place is that of its data."""
    return node.op == "call_function" and node.target not in ops.OPERATORS


def closure(node: fx.Node) -> set[fx.Node]:
    """All that a node depends on."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        new = [n for n in todo.pop().all_input_nodes if n not in found]
        found.update(new)
        todo += new
    return found


def of_another_group(broken: Program, launch: fx.Node) -> bool:
    for other in launches(broken):
        if ops.group(other) != ops.group(launch):
            with_argument("group", ops.group(other))(launch)
            if ops.of(launch).of_model and ops.of(other).of_model:
                with_argument("ranks", ops.argument(other, "ranks"))(launch)
            return True
    return False


def of_another_size(broken: Program, launch: fx.Node) -> bool:
    with_argument("size", launch.args[1] + 1)(launch)  # type: ignore[operator]
    return True


def other_splits(broken: Program, launch: fx.Node) -> bool:
    if launch.target is not ops.model_all_to_all:
        return False
    into, sent = list(launch.args[4]), list(launch.args[5])  # type: ignore[arg-type]
    if into == sent:
        into, sent = into[::-1], sent[1:] + sent[:1]
    with_argument("into", sent)(launch)
    with_argument("sent", into)(launch)
    return into != sent


def fewer_rows(broken: Program, launch: fx.Node) -> bool:
    if launch.target is not ops.model_all_to_all:
        return False
    into = list(launch.args[4])  # type: ignore[arg-type]
    with_argument("into", [*into[:-1], 0 if into[-1] != 0 else 1])(launch)
    return True


def another_reduction(broken: Program, launch: fx.Node) -> bool:
    found = ops.argument(launch, "op")
    if found is not None:
        with_argument("op", "max" if found != "max" else "sum")(launch)
    return found is not None


def on_another_stream(broken: Program, launch: fx.Node) -> bool:
    tags.update(launch, stream="compute")
    return True


def on_the_stream_of_others(broken: Program, launch: fx.Node) -> bool:
    streams = {tags.get(n).stream for n in launches(broken)} - {tags.get(launch).stream}
    if streams:
        tags.update(launch, stream=min(streams))
    return bool(streams)


def without_its_event(broken: Program, launch: fx.Node) -> bool:
    waits = tags.get(launch).waits
    tags.update(launch, waits=())
    return bool(waits)


def nobody_records_it(broken: Program, launch: fx.Node) -> bool:
    records = tags.get(launch).records
    tags.update(launch, records=None)
    return bool(records)


def reads_its_size_too_early(broken: Program, launch: fx.Node) -> bool:
    """A number that is read from what comes, before that is there."""
    wait = wait_of(broken, launch)
    for number in broken.graph.find_nodes(op="call_function", target=NUMBER):
        behind = closure(number)
        moved = [n for n in nodes(broken) if n in behind and after(n, wait)]
        if launch in behind and all(map(movable, moved)):
            for node in [*moved, number]:
                wait.prepend(node)
            return True
    return False


def backward_reads_the_first(broken: Program, launch: fx.Node) -> bool:
    """What was sent in forward, where backward sends it again."""
    if not tags.get(launch).recomputed:
        return False
    (item,) = launch.users
    for other in launches(broken):
        same = other.target is launch.target and tags.get(other).checkpoint is not None
        if same and tags.get(other).phase == "forward" and not tags.get(launch).save:
            (first,) = other.users
            alike = first.meta["val"].shape == item.meta["val"].shape
            if alike and tags.get(other).checkpoint == tags.get(launch).checkpoint:
                wait = wait_of(broken, launch)
                item.replace_all_uses_with(first, lambda user, wait=wait: user is not wait)  # type: ignore[misc]
                return True
    return False


# -- faults of the order, which another rank has to see -------------------------------------------


def swapped(broken: Program, launch: fx.Node) -> bool:
    """The next launch of another group comes first, as far as data allow."""
    for other in itertools.dropwhile(lambda each: each is not launch, launches(broken)):
        if ops.group(other) == ops.group(launch):
            continue
        behind = closure(other)
        between = [n for n in nodes(broken) if after(n, launch) and n in behind]
        if launch in behind or not all(movable(n) for n in between):
            return False
        items = list(other.users)
        for node in [*between, other, *items]:
            launch.prepend(node)
        return True
    return False


def left_out(broken: Program, launch: fx.Node) -> bool:
    """Its results are its operands."""
    wait = wait_of(broken, launch)
    if len(wait.args[0]) > 2 or tags.get(launch).role != "transfer":  # type: ignore[arg-type]
        return False
    (item,), (sent,) = launch.users, tags.operands(launch)
    broken.graph.erase_node(wait)
    item.replace_all_uses_with(sent)
    broken.graph.erase_node(item)
    broken.graph.erase_node(launch)
    return True


def twice(broken: Program, launch: fx.Node) -> bool:
    with broken.graph.inserting_before(launch):
        twin = broken.graph.node_copy(launch, lambda node: node)
    twin.meta = dict(launch.meta)
    return True


BY_THE_VERIFIER: dict[str, Fault] = {
    each.__name__: each
    for each in (
        *(no_wait, waits_too_late, waits_before_its_launch, before_what_it_sends),
        *(before_the_wait_for_what_it_sends, of_another_group, of_another_size, other_splits),
        *(fewer_rows, another_reduction, on_another_stream, on_the_stream_of_others),
        *(without_its_event, nobody_records_it, reads_its_size_too_early),
        backward_reads_the_first,
    )
}
BY_OTHER_RANKS: dict[str, Fault] = {each.__name__: each for each in (swapped, left_out, twice)}


def kinds(name: str) -> list[int]:
    """The first and the last launch of each group, operator, phase, and of what is repeated."""
    found: dict[Any, list[int]] = {}
    for number, node in enumerate(launches(program(name))):
        tag = tags.get(node)
        kind = node.target, ops.group(node), tag.phase, tag.recomputed, tag.role
        found.setdefault(kind, []).append(number)
    return sorted({each for numbers in found.values() for each in (numbers[0], numbers[-1])})


@functools.cache
def right(name: str) -> list[str]:
    return collectives(program(name))


def seeded(name: str, fault: Fault) -> Iterator[tuple[str, Program]]:
    """Programs with the fault, one for each kind of launch that has a place for it."""
    for number in kinds(name):
        broken = again(program(name))
        launch = launches(broken)[number]
        said = str(launch)
        with broken.fake_mode:
            if fault(broken, launch):
                yield f"{fault.__name__} %{said} of {ops.group(launch)!r}", broken


@pytest.mark.parametrize("name", PLANS)
def test_every_collective_of_the_model_is_launched(name: str) -> None:
    left = [node for node in program(name).graph.nodes if "c10d" in str(node.target)]
    assert left == [] and launches(program(name))


@pytest.mark.parametrize("name", PLANS)
def test_programs_are_right_and_have_the_groups(name: str) -> None:
    verify.verify(again(program(name)))
    assert collectives(again(program(name))) == right(name)
    groups = {ops.group(node) for node in launches(program(name))}
    wanted = {
        "tp": {"shard", "tp"},
        "ep": {"shard", "shard@dp", "ep"},
        "ep, not recomputed": {"shard", "shard@dp", "ep"},
        "ep x tp": {"shard", "shard@rest", "ep", "tp"},
        "hybrid x ep": {"shard", "replicate", "replicate@copies_dp", "ep"},
        "cp, ring": {"shard", "cp"},
        "cp, all-gather": {"shard", "cp"},
        "hybrid": {"shard", "replicate"},
        "hybrid x tp": {"shard", "replicate", "tp"},
    }[name]
    assert groups == wanted
    repeated = {ops.group(n) for n in launches(program(name)) if tags.get(n).recomputed}
    assert ({"tp", "ep", "cp"} & groups == repeated & {"tp", "ep", "cp"}) == (
        "recomputed" not in name and name != "hybrid x tp"
    )


@pytest.mark.parametrize("kind", BY_THE_VERIFIER)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.sample(40)
def test_the_verifier_shows_the_row(name: str, kind: str) -> None:
    for what, broken in seeded(name, BY_THE_VERIFIER[kind]):
        with pytest.raises(VerifyError) as caught:
            verify.verify(broken)
            pytest.fail(f"accepted: {what}")
        assert caught.value.node and str(caught.value.node) in caught.value.excerpt, what


@pytest.mark.parametrize("kind", BY_OTHER_RANKS)
@pytest.mark.parametrize("name", PLANS)
def test_the_verifier_or_another_rank_shows_the_row(name: str, kind: str) -> None:
    wanted = right(name)
    for what, broken in seeded(name, BY_OTHER_RANKS[kind]):
        try:
            verify.verify(broken)
        except VerifyError as error:
            assert error.node and str(error.node) in error.excerpt, what
            continue
        found = collectives(broken)
        assert found != wanted, f"accepted: {what}"
        _, theirs, ours = first_difference("\n".join(wanted), "\n".join(found))
        assert theirs != ours


@pytest.mark.parametrize("kind", [*BY_THE_VERIFIER, *BY_OTHER_RANKS])
def test_each_fault_has_a_place(kind: str) -> None:
    fault = (BY_THE_VERIFIER | BY_OTHER_RANKS)[kind]
    assert any(True for name in PLANS for _ in seeded(name, fault))


# -- faults of passes, which all ranks have alike -------------------------------------------------


def calls(broken: Program, *, again: bool = False, group: str = "") -> list[fx.Node]:
    """Collectives that the model calls, before they are launched."""
    return [
        node
        for node in broken.graph.nodes
        if is_collective(node) and tags.get(node).recomputed == again
        if not group or broken.group_of(node) == group
    ]


def of_splits(broken: Program, *, again: bool = False) -> list[fx.Node]:
    """Those whose splits are found in the data."""
    found = [n for n in calls(broken, again=again) if "all_to_all" in str(n.target)]
    return [node for node in found if list(node.args[1]) != list(node.args[2])]  # type: ignore[arg-type]


def splits_the_other_way(broken: Program, *, again: bool = False) -> bool:
    for node in of_splits(broken, again=again):
        node.args = (node.args[0], node.args[2], node.args[1], *node.args[3:])
    return bool(of_splits(broken, again=again))


def in_the_other_order(broken: Program) -> bool:
    """What is sent first is sent to the others, and back: splits of one are those of the next."""
    found = of_splits(broken, again=True)
    for node in found[:1]:
        node.args = (node.args[0], node.args[2], node.args[1], *node.args[3:])
    return bool(found)


def to_others(broken: Program, *, again: bool = False) -> bool:
    groups = {node.args[-1] for node in calls(broken)}
    found = calls(broken, again=again)
    for node in found[:1]:
        others = sorted(groups - {node.args[-1]})  # type: ignore[type-var]
        node.args = (*node.args[:-1], others[0])
    return bool(found)


def never_waited_for(broken: Program) -> bool:
    waits = broken.graph.find_nodes(op="call_function", target=WAIT)
    found = [n for n in waits if WAIT not in {u.target for u in (*n.users, *n.all_input_nodes)}]
    for node in found[:1]:
        node.replace_all_uses_with(node.args[0])
        broken.graph.erase_node(node)
    return bool(found)


def waited_for_too_late(broken: Program) -> bool:
    for wait in broken.graph.find_nodes(op="call_function", target=WAIT):
        found = [user for user in wait.users if user.op == "call_function"]
        reader = min(found, default=wait)
        if reader is not wait and not tags.aliases_input(reader):
            reader.replace_input_with(wait, wait.args[0])
            reader.append(wait)
            return True
    return False


backward_splits = functools.partial(splits_the_other_way, again=True)
backward_to_others = functools.partial(to_others, again=True)
PASSES: dict[str, tuple[str, str, Callable[[Program], bool]]] = {
    "splits of forward": ("ep", "assign-units", splits_the_other_way),
    "splits of all in backward": ("ep", "checkpoint", backward_splits),
    "splits of one in backward": ("ep x tp", "checkpoint", in_the_other_order),
    "splits of replicas": ("hybrid x ep", "checkpoint", backward_splits),
    "ranks of forward": ("ep x tp", "assign-units", to_others),
    "ranks of backward": ("ep x tp", "checkpoint", backward_to_others),
}


@pytest.mark.parametrize("kind", PASSES)
def test_what_a_pass_breaks_on_all_ranks_is_refused(kind: str) -> None:
    name, behind, change = PASSES[kind]
    error = refused_after(name, behind, change)
    assert error is not None and error.node and error.node in error.excerpt


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tp", never_waited_for),
        ("tp", waited_for_too_late),
        ("ep", never_waited_for),
        ("ep", waited_for_too_late),
        ("cp, ring", never_waited_for),
        ("cp, all-gather", never_waited_for),
    ],
)
def test_what_no_pass_launches_is_waited_for(name: str, change: Callable[[Program], bool]) -> None:
    left_out = "launch-collectives"
    assert refused_after(name, "checkpoint", lambda program: True, left_out) is None
    error = refused_after(name, "checkpoint", change, left_out)
    assert error is not None and error.fact == "unshard_paired", error
    assert "nothing has waited for it" in str(error) and str(error.node) in error.excerpt
