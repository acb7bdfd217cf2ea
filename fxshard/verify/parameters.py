"""Parameters: each is gathered from its shard, read unsharded, and never saved for backward."""

from __future__ import annotations

from typing import Any, cast

from torch import fx

from fxshard.ir import dump, ops, tags, transfers
from fxshard.ir.program import Fact, Program
from fxshard.verify import walk
from fxshard.verify.extensions import as_extensions_say, not_saved
from fxshard.verify.failure import fail


def params_unsharded(program: Program) -> None:
    seen: dict[str, fx.Node] = {}
    stream = "load" if program.offloaded else "unshard"
    readers = {
        target: spec.name
        for target, spec in ops.OPERATORS.items()
        if (spec.role, spec.stream) == ("unshard", stream) or target is ops.kept
    }
    for node in program.graph.find_nodes(op="placeholder"):
        tag = tags.get(node)
        if tag.role == "param":
            what = f"the full parameter {tag.fqn!r} is an input."
            fail(program, Fact.PARAMS_UNSHARDED, node, what)
        if tag.role != "shard":
            continue
        param = program.params[tag.fqn or ""]
        _is_the_shard(program, node, seen)
        alone = program.grid(param.fqn).shards == 1
        if not program.offloaded and alone and param.compute_dtype is param.dtype:
            continue  # it is unsharded already
        for user in node.users:
            makes = tags.get(user).role == "pre_gather" or user.target is ops.reduce_now
            if param.extension is not None and (makes or user.target is ops.all_gather):
                continue  # `as_extensions_say` knows which may
            if user.target not in (*readers, ops.step):
                fail(
                    program,
                    Fact.PARAMS_UNSHARDED,
                    user,
                    f"%{user.name} reads the shard of {tag.fqn!r}; only "
                    f"{' or '.join(readers.values())} may.",
                )
    _sent_as_named(program)
    _kept_as_named(program)
    as_extensions_say(program)
    for launch in walk.unshards(program):
        _unpacked_as_packed(program, launch)
        for item in transfers.unsharded(launch):
            fqn = tags.get(item).fqn
            want = program.params[fqn or ""]
            if want.extension is not None:
                continue
            shape, dtype = tuple(item.meta["val"].shape), item.meta["val"].dtype
            unsharded = program.layouts[want.fqn].unsharded_shape
            if shape != unsharded or dtype is not want.compute_dtype:
                fail(
                    program,
                    Fact.PARAMS_UNSHARDED,
                    item,
                    f"%{item.name} is {list(shape)} of {dtype}, expected "
                    f"{list(unsharded)} of {want.compute_dtype}.",
                )
            for user in item.users:
                if shape != want.shape and tags.get(user).role not in ROLES_WITH_PADDING:
                    fail(
                        program,
                        Fact.PARAMS_UNSHARDED,
                        user,
                        f"%{user.name} reads {fqn!r} with its padding; only a cut may.",
                    )


def _is_the_shard(program: Program, node: fx.Node, seen: dict[str, fx.Node]) -> None:
    """`node` is the only shard of its name, and has its shape and dtype."""
    fqn, val = tags.get(node).fqn or "", node.meta["val"]
    param = program.params[fqn]
    if fqn in seen:
        what = f"%{node.name} is the shard of {fqn!r}, as %{seen[fqn].name} is."
        fail(program, Fact.PARAMS_UNSHARDED, node, what)
    seen[fqn] = node
    shape = program.layouts[fqn].shard_shape
    if (tuple(val.shape), val.dtype) != (shape, param.dtype):
        what = f"%{node.name} is {dump.types(val)}, but a shard of {fqn!r} is {list(shape)} of "
        fail(program, Fact.PARAMS_UNSHARDED, node, what + f"{param.dtype}.")


def _sent_as_named(program: Program) -> None:
    """Shards, their copies and what is gathered of them bear one name, and one group's ranks."""
    fact = Fact.PARAMS_UNSHARDED
    for node in program.graph.nodes:
        spec = ops.of(node)
        if spec.role not in ("unshard", "reshard"):
            continue
        for shard in tags.operands(node):
            if tags.get(shard).role not in ("shard", "unshard", "reshard", "pre_gather"):
                fail(program, fact, node, f"%{node.name} takes %{shard.name}, which is no shard.")
        if node.target is ops.pack:
            continue
        for item in node.users:
            if not walk.is_item_of(item, node):
                continue
            taken, fqn = tags.operands(node)[walk.item_index(item)], tags.get(item).fqn
            if tags.get(taken).fqn != fqn:
                what = f"%{item.name} stands for {fqn!r}, but takes {tags.get(taken).fqn!r}."
                fail(program, fact, item, what)
            if not spec.collective:
                continue
            makers = [
                n for n in map(walk.maker, transfers.sent_copies(node)) if n.target is ops.reshard
            ]
            own = {tags.get(sent).fqn or "" for sent in tags.operands(node)}
            own |= set(walk.moved(node))
            shared = {program.grid(fqn).group("shard") for fqn in own & program.params.keys()}
            has = ops.group(makers[0]) if makers else " and ".join(sorted(shared))
            if ops.group(node) != has:
                what = f"%{node.name} gathers in {ops.group(node)!r} what {has!r} shares."
                fail(program, fact, node, what)


def _kept_as_named(program: Program) -> None:
    """What is taken was kept, once, under the names of its shards."""
    left = set(program.kept)
    for node in program.graph.find_nodes(op="call_function", target=ops.kept):
        fqns = [tags.get(shard).fqn for shard in tags.operands(node)]
        if list(node.args[1]) != fqns or not left.issuperset(fqns):
            what = f"%{node.name} takes {list(node.args[1])} for {fqns}; kept are {sorted(left)}."
            fail(program, Fact.PARAMS_UNSHARDED, node, what)
        left.difference_update(fqns)


def _unpacked_as_packed(program: Program, launch: fx.Node) -> None:
    """What several shards were packed into is taken apart once, in the same pieces and order.

    So is what a parameter was gathered in that is cut along another dimension than 0.
    """
    fact = Fact.PARAMS_UNSHARDED
    for item in (user for user in launch.users if walk.is_item_of(user, launch)):
        sent = tags.operands(launch)[walk.item_index(item)]
        maker = walk.maker(sent)
        packed = tags.operands(maker) if maker.target is ops.pack else [sent]
        names = [tags.get(shard).fqn or "" for shard in packed]
        dims = [program.layouts[fqn].dim for fqn in names]
        copied = ops.of(launch).collective and (maker.target is ops.pack or any(dims))
        unpacks = [user for user in item.users if user.target is ops.unpack]
        if len(unpacks) != int(copied):
            what = f"%{item.name} is unpacked {len(unpacks)} times; what was sent says otherwise."
            fail(program, fact, item, what)
        if not unpacks:
            continue
        for user in item.users:
            if user.target not in (ops.wait, ops.unpack, ops.free):
                fail(program, fact, user, f"%{user.name} reads %{item.name}, which is packed.")
        parts = {walk.item_index(part): tags.get(part).fqn for part in unpacks[0].users}
        shards = [(fqn, list(n.meta["val"].shape)) for fqn, n in zip(names, packed, strict=True)]
        _, size, chunks = cast("tuple[Any, int, list[list[int]]]", unpacks[0].args[:3])
        pieces = [(parts.get(i), list(chunk)) for i, chunk in enumerate(chunks)]
        if pieces != shards or size != launch.args[1] or len(parts) != len(unpacks[0].users):
            what = f"%{unpacks[0].name} takes apart {pieces}, but %{maker.name} packed {shards}."
            fail(program, fact, unpacks[0], what)
        along = list(cast("list[int]", ops.argument(unpacks[0], "dims"))) or [0] * len(dims)
        if along != dims:
            what = f"%{unpacks[0].name} takes {names} apart along {along}, but they are cut along "
            fail(program, fact, unpacks[0], f"{what}{dims}.")


def no_param_saved(program: Program) -> None:
    not_saved(program)
    for launch in walk.unshards(program):
        tag = tags.get(launch)
        stays = program.units[tag.unit or 0].reshard is False
        for node in (launch, *walk.aliases(launch)):
            for user in node.users:
                if user.op == "output" or (tags.get(user).phase != tag.phase and not stays):
                    fail(
                        program,
                        Fact.NO_PARAM_SAVED,
                        user,
                        f"%{user.name} reads %{node.name}, an unsharded parameter of unit "
                        f"{program.units[tag.unit or 0].name!r}, outside of {tag.phase}.",
                    )


ROLES_WITH_PADDING = ("unshard", "reshard", "wait", "free")
