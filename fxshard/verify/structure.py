"""The graph as such: its edges, tags, units, and launches with their waits."""

from __future__ import annotations

from torch import fx

from fxshard._torch.operators import schema_of
from fxshard._torch.traced_collectives import WAIT, is_waited_for
from fxshard.errors import VerifyError
from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Fact, Program
from fxshard.verify import walk
from fxshard.verify.failure import fail

SHARDED = ("param", "shard", "accumulated", "partial")  # roles of placeholders


def well_formed(program: Program) -> None:
    """Values are made, read, then written over; each that is returned has a name.

    A storage that is written over (a buffer at the end of forward, an operand by reinplace) is read
    through the node that wrote it from then on: a read of an older alias expects the old value.
    """
    fact = Fact.WELL_FORMED
    made: set[fx.Node] = set()
    fresh: dict[int, tuple[fx.Node, set[fx.Node]]] = {}  # storage -> its writer, what is made since
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            if source not in made:
                what = f"%{node.name} reads %{source.name} before it has been defined."
                fail(program, fact, node, what)
            for storage in tags.storage_ids(source) & fresh.keys():
                writer, since = fresh[storage]
                if source not in since and node.target not in ops.OPERATORS:
                    what = (
                        f"%{node.name} reads %{source.name}, which %{writer.name} has written over."
                    )
                    fail(program, fact, node, what)
        made.add(node)
        for storage in tags.storage_ids(node) & fresh.keys():
            fresh[storage][1].add(node)
        if tags.writes(node) and node.target not in ops.OPERATORS:
            fresh |= {storage: (node, {node}) for storage in walk.written(node)}
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise VerifyError(fact.name.lower(), str(error)) from error
    values, results = len(program.values), len(program.results)
    if values != results:
        what = f"the graph returns {values} values, but {results} have a name."
        raise VerifyError(fact.name.lower(), what, node=program.output.name)


def tagged(program: Program) -> None:
    seen_backward = False
    for node in program.graph.nodes:
        if "fxshard" not in node.meta:
            fail(program, Fact.TAGGED, node, f"%{node.name} has no tag; tag nodes when made.")
        tag = tags.get(node)
        if node.op == "placeholder":
            _is_given(program, node)
        if node.op != "call_function":
            continue
        if tag.role in (*SHARDED, "ignored", *tags.GIVEN):
            what = f"%{node.name} is computed, and tagged as what comes in ({tag.role})."
            fail(program, Fact.TAGGED, node, what)
        if tag.phase == "backward":
            seen_backward = True
        elif seen_backward:
            fail(program, Fact.TAGGED, node, f"forward node %{node.name} stands in backward.")
        returns = getattr(schema_of(node.target), "returns", [None])
        if returns and "val" not in node.meta:
            fail(program, Fact.TAGGED, node, f"%{node.name} has no fake value.")
        # Who reads a storage is found through the aliases of fake values: they must be right.
        if tags.shares_by_schema(node) and not tags.aliases_input(node):
            what = f"%{node.name} is a view, but its fake value is no alias of its input's."
            fail(program, Fact.TAGGED, node, what)


def _is_given(program: Program, node: fx.Node) -> None:
    """A placeholder has the tag that capture gave it, or is a parameter: tags bind the values."""
    tag = tags.get(node)
    given = (program.given or {}).get(node.name)
    if given is not None or tag.role in tags.GIVEN:
        right = program.given is None or given == (tag.role, tag.fqn)
    else:
        stays = tag.fqn in program.ignored
        right = tag.role in (*SHARDED, "ignored") and stays == (tag.role == "ignored")
    if not right:
        what = f"%{node.name} comes in as {tag.role} {tag.fqn!r}, which it is not."
        fail(program, Fact.TAGGED, node, what)


def units_assigned(program: Program) -> None:
    """Operators belong to a unit, sharded parameters to theirs."""
    units = program.units
    owner = {param.fqn: i for i, unit in enumerate(units) for param in unit.params}
    for node in program.graph.nodes:
        tag = tags.get(node)
        if node.op == "call_function":
            right = tag.unit in range(len(units))
        else:
            right = tag.role not in SHARDED or tag.unit == owner.get(tag.fqn or "")
        if not right:
            fail(program, Fact.UNITS_ASSIGNED, node, f"%{node.name} belongs to unit {tag.unit}.")


def unshard_paired(program: Program) -> None:
    """Every launch has one wait after it, and nothing but that wait comes before it."""
    fact = Fact.UNSHARD_PAIRED
    order = walk.order(program)
    waits = walk.by_pair(program, ops.wait)
    for node in program.graph.nodes:
        for item in node.users if ops.of(node).asynchronous else ():
            if tags.get(item).pair != tags.get(node).pair:
                what = f"%{item.name} is of another collective than %{node.name}, which makes it."
                fail(program, fact, item, what)
        if ops.of(node).prepares and not transfers.is_launch(node):
            for reader in (user for item in node.users for user in item.users):
                if not (ops.of(reader).asynchronous or reader.target is ops.free):
                    what = f"%{reader.name} reads what %{node.name} makes, which nothing waits for."
                    fail(program, fact, reader, what)
                if tags.get(reader).pair != tags.get(node).pair:
                    what = f"%{node.name} is of another collective than %{reader.name}, its reader."
                    fail(program, fact, node, what)
    for launch in walk.launches(program):
        tag = tags.get(launch)
        mine = waits.get(tag.pair, [])
        if len(mine) != 1:
            fail(program, fact, launch, f"%{launch.name} has {len(mine)} waits, expected 1.")
        if sorted(map(walk.item_index, launch.users)) != list(range(len(tags.operands(launch)))):
            fail(
                program,
                fact,
                launch,
                f"%{launch.name} has not one getitem per tensor that it takes.",
            )
        wait = mine[0]
        if order[wait] < order[launch]:
            fail(program, fact, wait, f"%{wait.name} stands before its launch %{launch.name}.")
        held = tags.operands(launch) if ops.of(launch).holds else []
        if set(tags.operands(wait)) != {*launch.users, *held}:
            fail(program, fact, wait, f"%{wait.name} does not wait for all of %{launch.name}.")
        for reader in walk.alias_readers(launch):
            if order[reader] < order[wait] and not walk.is_item_of(reader, launch):
                fail(
                    program,
                    fact,
                    reader,
                    f"%{reader.name} reads what %{launch.name} is still writing: "
                    f"its wait %{wait.name} comes later.",
                )
        _nobody_interferes(program, launch, wait)
    for call in filter(is_waited_for, program.graph.nodes):
        _is_waited_for(program, call, order)


def _is_waited_for(program: Program, call: fx.Node, order: dict[fx.Node, int]) -> None:
    """A collective that the model calls, and that no pass has launched, is waited for, then read.

    One that nothing reads needs no wait.
    """
    waited = len(order)
    aliases: dict[fx.Node, None] = {call: None}
    todo = [call]
    while todo:
        for user in todo.pop().users:
            if user.target is WAIT:
                waited = min(waited, order[user])
            elif user not in aliases and tags.aliases_input(user) and not tags.writes(user):
                aliases[user] = None
                todo.append(user)
    for reader in (user for node in aliases for user in node.users):
        if reader.target is WAIT or reader in aliases or walk.reads_sizes(reader):
            continue
        if order[reader] < waited:
            what = f"%{reader.name} reads what %{call.name} is still writing: nothing has waited "
            fail(program, Fact.UNSHARD_PAIRED, reader, f"{what}for it.")


def one_dtype(program: Program) -> None:
    """Every collective sends, and leaves, tensors of one dtype: backends promise no more."""
    for launch in filter(lambda node: ops.of(node).collective, program.graph.nodes):
        values = (node.meta["val"] for node in (*tags.operands(launch), *launch.users))
        dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in values})
        if len(dtypes) > 1:
            what = f"%{launch.name} moves {' and '.join(dtypes)} in one launch; give each its own."
            fail(program, Fact.ONE_DTYPE, launch, what)


def _nobody_interferes(program: Program, launch: fx.Node, wait: fx.Node) -> None:
    """Between the two nothing writes what `launch` sends, nor reads what it writes in place."""
    sent = set().union(*map(tags.storage_ids, tags.operands(launch)))
    node = launch.next
    while node is not wait:
        if ops.of(node).over != "nothing" and not walk.is_item_of(node, launch):
            touched = walk.written(node)
            if transfers.is_in_place(launch):
                touched = set().union(*map(tags.storage_ids, node.all_input_nodes))
            if touched & sent:
                what = f"%{node.name} touches what %{launch.name} works on until %{wait.name}."
                fail(program, Fact.UNSHARD_PAIRED, node, what)
        node = node.next
