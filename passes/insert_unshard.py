"""insert-unshard: gather each unit's parameters before it computes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import fx

from fxshard.errors import UnitError
from fxshard.ir import ops, tags, transfers
from fxshard.ir.layout import Grid
from fxshard.ir.program import Fact, Program
from fxshard.ir.units import Param, Unit

aten: Any = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class InsertUnshard:
    """One all-gather per bucket, dtype and phase, of the parameters that the phase reads.

    The placeholders of full parameters become placeholders of this rank's padded shards. What is
    sent is the shard, loaded from the CPU if it is offloaded, and cast to the unit's dtype, once
    per bucket. A launch moves one dtype: backends promise no more. Each parameter is gathered into
    a buffer of its own; packed ones into one, out of which they are copied. So are those that are
    cut along another dimension than 0, each out of its own. A launch and its wait stand together
    here; `prefetch` pulls them apart.

    Between forward and backward a unit is sharded (``unit.reshard`` is True: backward gathers
    again), unsharded (False: backward reads what forward gathered), or sharded over n neighbours
    (backward gathers from those). With one rank per shard group nothing is gathered. A bucket is
    gathered by the ranks of the mesh that its parameters are on.

    What an earlier call has kept (``program.kept``) is taken, and not gathered. Of a unit that
    stays unsharded after backward (``unit.stays``) backward gathers all that forward has gathered.

    A parameter of a tensor subclass with FSDP2's extension point is sent as that says: the
    operators of its ``fsdp_pre_all_gather`` (role "pre_gather") make of the shard what is sent, in
    a launch per dtype, and those of its ``fsdp_post_all_gather`` ("post_gather") what is read.

    Before::

        %w : f32[5,4] = param
        %mm = aten.mm(%x, %w)

    After (world size 2)::

        %w_shard : f32[3,4] = shard
        %unshard_0 = fxshard.all_gather([%w_shard], 2)
        %getitem = getitem(%unshard_0, 0)         # f32[6,4]
        %wait_0 = fxshard.wait([%getitem])
        %w = aten.slice(%getitem, 0, 0, 5)        # a view: cuts the padding
        %mm = aten.mm(%x, %w)
    """

    name: ClassVar[str] = "insert-unshard"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_ASSIGNED})
    ensures: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.UNSHARD_PAIRED, Fact.PARAMS_UNSHARDED, Fact.NO_PARAM_SAVED, Fact.ONE_DTYPE}
    )

    def apply(self, program: Program) -> None:
        inputs: dict[str, list[fx.Node]] = {}
        for node in program.graph.find_nodes(op="placeholder"):
            if tags.get(node).role == "param":
                inputs.setdefault(tags.get(node).fqn or "", []).append(node)
        shards: dict[str, fx.Node] = {}
        for param in program.params.values():
            if param.fqn not in inputs:
                raise ValueError(f"parameter {param.fqn!r} is sharded already")
            shards[param.fqn] = add_shard(program, param, inputs[param.fqn][0])
            if lies_ready(program, param):
                (placeholder,) = inputs.pop(param.fqn)
                replace(program, placeholder, shards[param.fqn], PHASES)
        grids = program.grids
        sources = {fqn: source(grids[program.params[fqn].mesh], n) for fqn, n in shards.items()}
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        entries = first_nodes(program)
        pairs = (tags.get(node).pair for node in program.graph.nodes)
        pair = 1 + max((number for number in pairs if number is not None), default=-1)
        left, again = set(program.kept), set[str]()
        for phase in PHASES:
            for at, params, packed in first_reads(
                program, phase, inputs, order, entries, left, again
            ):
                unit = program.units[params[0].unit]
                tag = tags.Meta(phase, "unshard", module=unit.fqn, unit=unit.index, pair=pair)
                served: tuple[tags.Phase, ...] = PHASES if unit.reshard is False else (phase,)
                parts = [sources[param.fqn] for param in params]
                if params[0].extension is not None:
                    with program.graph.inserting_before(at):
                        made, launches = unshard_extended(program, params, parts, tag)
                    for param, inner in zip(params, made, strict=True):
                        for placeholder in inputs[param.fqn]:
                            replace(program, placeholder, inner[inner_of(placeholder)], served)
                    pair += launches
                    continue
                with program.graph.inserting_before(at):
                    if params[0].fqn in left:
                        items = taken(program, params, parts, tag)
                        left -= {param.fqn for param in params}
                    else:
                        items = unshard(program, params, parts, packed, tag)
                    full = cut_padding(program, params, items, tag)
                both = [(i, inputs[param.fqn][0]) for i, param in enumerate(params)]
                reread = [i for i, placeholder in both if readers(placeholder, "backward")]
                for param, node in zip(params, full, strict=True):
                    replace(program, inputs[param.fqn][0], node, served)
                for item, node in zip(items, full, strict=True):
                    if node is not item and not node.users:  # gathered to be kept alone
                        program.graph.erase_node(node)
                if phase == "forward" and unit.stays and unit.reshard is not False:
                    again |= {param.fqn for param in params}
                if phase == "forward" and regroups(program, params[0]) and reread:
                    kept = [params[i] for i in reread]
                    sources |= reshard(program, unit, kept, [items[i] for i in reread], tag)
                pair += 1
        for node in program.graph.find_nodes(op="placeholder"):
            if tags.get(node).role == "param":
                program.graph.erase_node(node)


PHASES: tuple[tags.Phase, ...] = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class UnshardSource:
    """Where an unshard takes a parameter from.

    Attributes:
        node: this rank's rows.
        size: number of ranks in the group that holds all of them.
        group: its name.
    """

    node: fx.Node
    size: int
    group: str = "shard"


def source(grid: Grid, node: fx.Node) -> UnshardSource:
    """The shard `node` of a parameter that is on the mesh `grid`."""
    return UnshardSource(node, grid.shards, grid.group("shard"))


def lies_ready(program: Program, param: Param) -> bool:
    """True if the shard of `param` is the unsharded parameter as it is."""
    cast = param.compute_dtype is not param.dtype or param.extension is not None
    return program.grid(param.fqn).shards == 1 and not cast and not program.offloaded


def regroups(program: Program, param: Param) -> bool:
    """True if `param` is sharded over a smaller group between forward and backward."""
    after = program.units[param.unit].reshard
    return not isinstance(after, bool) and after < program.grid(param.fqn).shards


def add_shard(program: Program, param: Param, placeholder: fx.Node) -> fx.Node:
    """Placeholder of this rank's padded shard of `param`."""
    shape = program.layouts[param.fqn].shard_shape
    with program.graph.inserting_before(placeholder):
        node = program.graph.placeholder("shard_" + param.fqn.replace(".", "_"))
    tag = tags.Meta("forward", "shard", unit=param.unit, fqn=param.fqn)
    device = torch.device("cpu") if program.offloaded else placeholder.meta["val"].device
    return tags.put(node, tag, program.fake(shape, param.dtype, device))


def first_nodes(program: Program) -> dict[tuple[tags.Phase, int | None], fx.Node]:
    """First operator of each unit in each phase; where ranks differ, those are others elsewhere."""
    if program.common is not None:
        return {}
    found: dict[tuple[tags.Phase, int | None], fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            tag = tags.get(node)
            found.setdefault((tag.phase, tag.unit), node)
    return found


def first_reads(
    program: Program,
    phase: tags.Phase,
    inputs: dict[str, list[fx.Node]],
    order: dict[fx.Node, int],
    entries: dict[tuple[tags.Phase, int | None], fx.Node],
    kept: set[str],
    again: set[str],
) -> list[tuple[fx.Node, list[Param], frozenset[str]]]:
    """Per bucket that `phase` reads: where it is needed first, what is read, what of it is packed.

    Where it holds what a unit reads first, it is there when the unit begins: so that layers in
    which other operators come first are cut alike. What backward gathers `again` though it may
    not read it is there then too.
    """
    firsts: dict[str, int] = {}
    for fqn, placeholders in inputs.items():
        users = [user for placeholder in placeholders for user in readers(placeholder, phase)]
        if fqn in program.params and users:
            firsts[fqn] = min(order[user] for user in users)
        elif phase == "backward" and fqn in again:
            entry = entries.get((phase, program.params[fqn].unit))
            firsts |= {fqn: order[entry]} if entry is not None else {}
    begins: dict[int, int] = {}  # unit -> where it reads a parameter first
    for fqn, first in firsts.items():
        unit = program.params[fqn].unit
        begins[unit] = min(first, begins.get(unit, first))
    nodes = list(order)
    todo: list[tuple[int, list[Param], frozenset[str]]] = []
    for bucket in program.moving:
        params = [program.params[fqn] for fqn in bucket.fqns if fqn in firsts]
        places = [firsts[param.fqn] for param in params]
        for param, first in zip(params, list(places), strict=True):
            entry = entries.get((phase, param.unit)) if param.unit else None
            if entry is not None and first == begins[param.unit]:
                places.append(order[entry])
        for together in launched_together(program, params, kept):
            todo.append((min(places), together, bucket.packed))
    todo.sort(key=lambda item: item[0])
    return [(nodes[place], params, packed) for place, params, packed in todo]


def launched_together(program: Program, params: list[Param], kept: set[str]) -> list[list[Param]]:
    """`params` by launch: by the dtype that is moved, and apart what one rank loads as it is.

    What is `kept` has a launch of its own, which moves nothing. Those with an extension stand
    together: they have a launch per dtype that they send.
    """
    found: dict[tuple[torch.dtype | None, bool], list[Param]] = {}
    for param in params:
        as_it_is = program.grid(param.fqn).shards == 1 and param.compute_dtype is param.dtype
        if param.extension is None:
            key = None if as_it_is else param.compute_dtype, param.fqn in kept
            found.setdefault(key, []).append(param)
    extended = [param for param in params if param.extension is not None]
    return [*found.values(), *([extended] if extended else [])]


def readers(placeholder: fx.Node, phase: tags.Phase) -> list[fx.Node]:
    """Operators of `phase` that read the full parameter directly."""
    return [user for user in placeholder.users if tags.get(user).phase == phase]


def unshard(
    program: Program,
    params: list[Param],
    sources: list[UnshardSource],
    packed: frozenset[str],
    tag: tags.Meta,
) -> list[fx.Node]:
    """Append what makes unsharded parameters, padded, of `sources`, and the wait for it."""
    nodes = [source.node for source in sources]
    fqns = [param.fqn for param in params]
    size, group = sources[0].size, sources[0].group
    if program.offloaded and tags.get(nodes[0]).role == "shard":
        args = (nodes, program.device)
        nodes = transfers.insert_operator(program, ops.load, args, fqns, tag, f"load_{tag.pair}")
    small = [i for i, fqn in enumerate(fqns) if fqn in packed and size > 1]
    small = small if len(small) > 1 else []
    alone = [i for i in range(len(params)) if i not in small]
    dtype = params[0].compute_dtype
    casts = [i for i in alone if nodes[i].meta["val"].dtype is not params[i].compute_dtype]
    if casts:
        cast = ([nodes[i] for i in casts], dtype)
        names = [fqns[i] for i in casts]
        made = transfers.insert_operator(program, ops.cast, cast, names, tag, f"cast_{tag.pair}")
        for i, node in zip(casts, made, strict=True):
            nodes[i] = node
    made = [nodes[i] for i in alone]
    if small:
        sent = ([nodes[i] for i in small], dtype)
        made += transfers.insert_operator(program, ops.pack, sent, [""], tag, f"pack_{tag.pair}")
    if size > 1:
        gather = args_in(made, size, group)
        names = [*(fqns[i] for i in alone), *([""] if small else [])]
        made = transfers.insert_operator(
            program, ops.all_gather, gather, names, tag, f"unshard_{tag.pair}"
        )
    transfers.insert_wait(program, made, tag)
    full: dict[int, fx.Node] = {}
    for members, node in zip(
        [*([i] for i in alone), *([small] if small else [])], made, strict=True
    ):
        found, inside = [node], [params[i] for i in members]
        if len(members) > 1 or (size > 1 and program.layouts[fqns[members[0]]].dim):
            found = unpack(program, inside, node, size, tag)
        full |= zip(members, found, strict=True)
    return [full[i] for i in range(len(params))]


def args_in(nodes: list[fx.Node], size: int, group: str) -> tuple[Any, ...]:
    """The arguments of a gather: the group by its name, unless it is the usual one."""
    return (nodes, size) if group == "shard" else (nodes, size, group)


def taken(
    program: Program, params: list[Param], sources: list[UnshardSource], tag: tags.Meta
) -> list[fx.Node]:
    """Append what takes the unsharded parameters, padded, that an earlier call has kept."""
    fqns = [param.fqn for param in params]
    shapes = [list(program.layouts[fqn].unsharded_shape) for fqn in fqns]
    shards = [source.node for source in sources]
    args = (shards, fqns, shapes, params[0].compute_dtype, program.device)
    made = transfers.insert_operator(program, ops.kept, args, fqns, tag, f"kept_{tag.pair}")
    transfers.insert_wait(program, made, tag)
    return made


def unpack(
    program: Program, params: list[Param], flat: fx.Node, size: int, tag: tags.Meta
) -> list[fx.Node]:
    """Append the copies of `params` out of the buffer that they were gathered in."""
    layouts = [program.layouts[param.fqn] for param in params]
    chunks = [list(layout.chunk_shape(size)) for layout in layouts]
    args: tuple[Any, ...] = ([flat], size, chunks)
    if any(layout.dim for layout in layouts):
        lengths = [layout.unsharded_shape[layout.dim] for layout in layouts]
        args += ([layout.dim for layout in layouts], lengths)
    copies = tags.changed(tag, role="unpack")
    fqns = [param.fqn for param in params]
    made = transfers.insert_operator(program, ops.unpack, args, fqns, copies, f"unpack_{tag.pair}")
    for item in made:
        tags.update(item, role="unshard")
    return made


def unshard_extended(
    program: Program, params: list[Param], sources: list[UnshardSource], tag: tags.Meta
) -> tuple[list[dict[str, fx.Node]], int]:
    """Append what makes unsharded parameters of tensor subclasses, and the waits for it.

    Returns:
        Per parameter what it is made of, by the names of the tensors inside ("": it is plain); and
        the number of launches.
    """
    refuse_elsewhere(program, params)
    extensions = [param.extension for param in params if param.extension is not None]
    size, group = sources[0].size, sources[0].group
    traced = [each.traced(size, program.device) for each in extensions]
    made: list[list[fx.Node]] = []  # per parameter, what of its shard is sent, and what is kept
    for param, own, source in zip(params, traced, sources, strict=True):
        pre = tags.changed(tag, role="pre_gather", fqn=param.fqn)
        made.append(transfers.insert_traced(program, own.pre, [source.node], pre, (size, group)))
    launches: dict[torch.dtype, list[tuple[int, int]]] = {}
    for i, own in enumerate(traced):
        for k in range(own.sent):
            launches.setdefault(made[i][k].meta["val"].dtype, []).append((i, k))
    if size > 1:
        for number, places in enumerate(launches.values()):
            mine = tags.changed(tag, pair=(tag.pair or 0) + number)
            sent, fqns = [made[i][k] for i, k in places], [params[i].fqn for i, _ in places]
            name = f"unshard_{mine.pair}"
            args = args_in(sent, size, group)
            items = transfers.insert_operator(program, ops.all_gather, args, fqns, mine, name)
            transfers.insert_wait(program, items, mine)
            for (i, k), item in zip(places, items, strict=True):
                made[i][k] = item
    found: list[dict[str, fx.Node]] = []
    for param, own, given in zip(params, traced, made, strict=True):
        post = tags.changed(tag, role="post_gather", fqn=param.fqn)
        results = transfers.insert_traced(program, own.post, given, post, (size, group))
        found.append(dict(zip(own.form.inner or ("",), results, strict=True)))
    return found, len(launches)


def inner_of(placeholder: fx.Node) -> str:
    """Which of the tensors inside of a parameter a placeholder stands for; "" if it is plain."""
    return tags.get(placeholder).inner


def refuse_elsewhere(program: Program, params: list[Param]) -> None:
    """Raise UnitError where shards of tensor subclasses would be sent from elsewhere than a rank's
    own memory: FSDP2 has no smaller groups for them either.
    """
    unit = program.units[params[0].unit]
    what = ""
    for param in params:
        if param.extension is not None:
            param.extension.require_rows(param.shard_dim)
    if program.offloaded:
        what = "parameters are offloaded to the CPU. Leave offload out"
    elif regroups(program, params[0]):
        what = f"reshard_after_forward={unit.reshard} shards it over a smaller group. Give a bool"
    if what:
        raise UnitError(
            f"parameter {params[0].fqn!r} is of a tensor subclass that makes what is gathered of "
            f"its shard, and {what}."
        )


def cut_padding(
    program: Program, params: list[Param], items: list[fx.Node], tag: tags.Meta
) -> list[fx.Node]:
    """Append a view of each gathered parameter without its padding rows, where it has some."""
    full: list[fx.Node] = []
    for param, item in zip(params, items, strict=True):
        node = item
        if item.meta["val"].shape != param.shape:
            node = program.graph.call_function(aten.slice.Tensor, (item, 0, 0, param.shape[0]))
            tags.put(node, tags.changed(tag, fqn=param.fqn), program.refake(node))
        full.append(node)
    return full


def replace(
    program: Program, placeholder: fx.Node, full: fx.Node, phases: tuple[tags.Phase, ...]
) -> None:
    """Let the readers of `placeholder` in `phases` read `full`."""
    for phase in phases:
        for user in readers(placeholder, phase):
            user.replace_input_with(placeholder, full)
    program.refresh_views(full, tags.storage_ids(placeholder))


def reshard(
    program: Program, unit: Unit, params: list[Param], items: list[fx.Node], tag: tags.Meta
) -> dict[str, UnshardSource]:
    """After the last reader in forward, keep this rank's rows in a smaller group."""
    size = int(unit.reshard)
    group = program.grid(params[0].fqn).group(f"reshard{size}")
    storages = set().union(*map(tags.storage_ids, items))
    reading: set[fx.Node] = set()
    todo = list(items)
    while todo:
        for user in todo.pop().users:
            if user not in reading and user.op == "call_function":
                reading.add(user)
                todo += [user] if tags.storage_ids(user) & storages else []
    last = max(node for node in reading if tags.get(node).phase == "forward")
    fqns = [param.fqn for param in params]
    role = tags.changed(tag, role="reshard")
    layouts = [program.layouts[fqn] for fqn in fqns]
    args: tuple[Any, ...] = (items, size, group)
    if any(layout.dim for layout in layouts):
        rows = [layout.chunk_shape(size)[layout.dim] for layout in layouts]
        args += ([layout.dim for layout in layouts], rows)
    with program.graph.inserting_before(last.next):
        parts = transfers.insert_operator(
            program, ops.reshard, args, fqns, role, f"reshard_{tag.pair}"
        )
    return {fqn: UnshardSource(part, size, group) for fqn, part in zip(fqns, parts, strict=True)}
