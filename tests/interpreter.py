"""Programs interpreted: on all ranks, with real numbers, streams as late or as early as may be.

An oracle: it shares nothing with the executor, the worlds or the verifier. It runs a program at any
point of the pipeline, by its schedule if it has one; each rank has a batch and gradients of its
own. What a launch makes is NaN until it has run, what is freed is NaN from then on, and a value
that is read before it is there is an error: a number that comes out is a number that was computed.

What a program means
====================
Before insert-unshard it is one rank's joint graph on full parameters: per rank, its outputs,
gradients, and buffers afterwards. `Found` holds these. From insert-reduce on a gradient is the
reduced one, which `reduced` makes out of those of the ranks: cast, added to what was accumulated,
summed in the order of the ranks, first over those that share a parameter, then over the replicas,
each sum divided by its number of ranks. Every other pass leaves `Found` as it is, bit for bit.

One file because each operator has its meaning here and nowhere else.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxshard.ir import ops, tags
from fxshard.ir.program import Param, Program

Values = dict[tuple[str, str], Tensor]  # (role, FQN or position) -> what goes in, of one rank
Found = dict[tuple[str, str], list[Tensor]]  # (kind, name) -> what comes out, per rank
GIVEN = ("param", "shard", "ignored", "buffer", "input", "tangent", "accumulated")
REDUCTIONS = (ops.reduce_scatter, ops.all_reduce, ops.comm_hook)


class Wrong(Exception):
    """The program reads what is not there, waits for ever, or sends what does not fit."""


@dataclasses.dataclass
class Step:
    """A node, or a row of the schedule, on its stream."""

    node: fx.Node
    stream: str
    waits: list[str]
    records: list[str]


Batch = Callable[[int], Sequence[Any]]  # rank -> flat inputs


def values_of(program: Program, ranks: int, batch: Batch | None = None) -> list[Values]:
    """Anything that goes into a program that no pass has touched: rank by rank another batch.

    Args:
        batch: the flat inputs of a rank; None: random numbers.
    """
    alike, found = torch.Generator().manual_seed(0), []
    held = {
        (("param" if tag.role == "ignored" else tag.role), tag.fqn or ""): some(node, alike)
        for node in program.graph.find_nodes(op="placeholder")
        if (tag := tags.get(node)).role in ("param", "ignored", "buffer")
        and not (tag.role == "buffer" and tag.fqn in program.constants)
    }
    for rank in range(ranks):
        own = torch.Generator().manual_seed(rank + 1)
        mine = dict(held)
        for node in program.graph.find_nodes(op="placeholder"):
            tag = tags.get(node)
            if tag.role == "input":
                given = batch(rank)[int(tag.fqn or 0)] if batch else some(node, own)
                mine["input", tag.fqn or ""] = given
            elif tag.role == "tangent":
                mine["tangent", tag.fqn or ""] = some(node, own)
        for fqn in sorted(program.accumulated):
            param = program.params[fqn]
            dtype = program.units[param.unit].precision.reduce_dtype or param.compute_dtype
            mine["accumulated", fqn] = torch.randn(param.shape, generator=own).to(dtype)
        found.append(mine)
    return found


def some(node: fx.Node, generator: torch.Generator) -> Tensor:
    val = node.meta["val"]
    if val.is_floating_point():
        numbers = torch.randn(val.shape, generator=generator)
        if tags.get(node).role == "buffer":
            numbers = numbers.abs() + 0.5  # a variance
        return numbers.to(val.dtype)
    return torch.randint(0, 3, val.shape, generator=generator).to(val.dtype)


def interpreted(program: Program, values: Sequence[Values]) -> Found:
    """What a program gives, however late and early its streams are.

    Raises:
        Wrong: the program cannot run, or its numbers depend on which stream is fast.
    """
    ways = [(False, "compute"), (False, "-compute")]
    streams = {tags.get(n).stream for n in program.graph.nodes if n.op == "call_function"}
    if len(streams) > 1:
        ways += [(True, sign + stream) for stream in sorted(streams) for sign in ("", "-")]
    first, *others = (Machine(program, values, *way).run() for way in ways)
    for (by_events, mode), other in zip(ways[1:], others, strict=True):
        for key in first:
            if not same(first[key], other[key]):
                how = "by events" if by_events else "by waits"
                raise Wrong(f"{key} is another where {mode} goes first or (-) last, {how}")
    return first


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Bit for bit, on all ranks."""
    return len(one) == len(other) and all(
        a.dtype is b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7)) and not wrong(a)
        for a, b in zip(one, other, strict=True)
    )


def wrong(value: Tensor) -> bool:
    return value.is_floating_point() and bool(value.isnan().any())


def reduced(program: Program, found: Found, values: Sequence[Values]) -> Found:
    """What a program gives after insert-reduce, of what it gives before it."""
    result: Found = {}
    for (kind, name), mine in found.items():
        param = program.params.get(name)
        if kind != "grad" or param is None:
            result[kind, name] = mine
            continue
        precision = program.units[param.unit].precision
        dtype = precision.reduce_dtype or mine[0].dtype
        before = [each.get(("accumulated", name)) for each in values]
        if name in program.accumulated:
            both = zip(before, mine, strict=True)
            mine = [held.to(dtype, copy=True).add_(grad) for held, grad in both]  # type: ignore[union-attr]
        mine = [grad.to(dtype) for grad in mine]
        if not program.sync:
            result["accumulated", name] = mine
            continue
        world = program.world_size
        groups = [mine[i : i + world] for i in range(0, len(mine), world)]
        total = mean([mean(group) for group in groups])
        if not precision.keep_low_precision_grads:
            total = total.to(param.dtype)
        result["grad", name] = [total] * len(mine)
    for name in program.accumulated:  # nothing was added in this step
        if ("grad", name) not in found:
            held = [each["accumulated", name] for each in values]
            ghost = reduced(program, {("grad", name): [torch.zeros_like(h) for h in held]}, values)
            result |= ghost
    return result


def mean(ranks: Sequence[Tensor]) -> Tensor:
    return total(ranks) / len(ranks)


def total(ranks: Sequence[Tensor]) -> Tensor:
    """In the order of the ranks."""
    first, *others = ranks
    first = first.clone()
    for other in others:
        first += other
    return first


class Machine:
    """One step of a program on all ranks.

    Args:
        program: at any point of the pipeline.
        values: what goes in, per rank.
        by_events: streams are ordered by the events of the tags, as on CUDA; else a launch begins
            where the host comes to it, and is over at its wait, as with gloo.
        mode: the stream that goes first where several can go on, or with "-" last.
    """

    def __init__(
        self, program: Program, values: Sequence[Values], by_events: bool, mode: str
    ) -> None:
        self.program, self.by_events, self.mode = program, by_events, mode
        self.world, self.ranks = program.world_size, program.world_size * program.replicas
        assert len(values) == self.ranks
        self.given = [{key: v.clone() for key, v in each.items()} for each in values]
        self.envs: list[dict[fx.Node, Any]] = [{} for _ in range(self.ranks)]
        self.stepped: dict[str, list[Tensor]] = {}
        self.recorded: set[str] = set()
        self.gone: list[Tensor] = []  # freed, and not yet given out again
        states = (torch.Generator().manual_seed(rank).get_state() for rank in range(self.ranks))
        self.generators = list(states)

    def run(self) -> Found:
        kinds = {"forward": ["output"], "backward": ["grad", "accumulated"]}
        results = self.program.results
        found: Found = {}
        if self.program.schedule is None:
            graph = self.program.graph
            self.bind(graph, [])
            for phase in kinds:
                self.execute(phase, self.program.phase(phase))  # type: ignore[arg-type]
            found = self.named([*results], graph.output_node().args[0])
        else:
            saved: list[list[Any]] = []
            for phase, graph in self.program.schedule.phases():
                self.envs = [{} for _ in self.envs]
                self.bind(graph, saved)
                self.execute(phase, [n for n in graph.nodes if n.op.startswith("call")])
                returned: Any = graph.output_node().args[0]
                if phase == "forward":
                    returned, kept = returned
                    saved = [[self.value(rank, n) for rank in range(self.ranks)] for n in kept]
                found |= self.named([r for r in results if r.kind in kinds[phase]], returned)
        for fqn, grads in self.stepped.items():
            found["grad", fqn] = self.unsharded(self.program.params[fqn], grads)
        names = self.given[0]
        kept_by_caller = ["buffer"] + ["accumulated"] * (not self.program.sync)
        for key in names:
            if key[0] in kept_by_caller and ((key[0] == "buffer") or self.adds(key[1])):
                found[key] = [each[key] for each in self.given]
        return found

    def adds(self, fqn: str) -> bool:
        """True if gradients are added to what was accumulated of `fqn`."""
        found = self.program.graph.find_nodes(op="placeholder")
        return any((tags.get(n).role, tags.get(n).fqn) == ("accumulated", fqn) for n in found)

    # -- what comes in and goes out ----------------------------------------------------------------

    def bind(self, graph: fx.Graph, saved: Sequence[list[Any]]) -> None:
        handed = iter(saved)
        for node in graph.find_nodes(op="placeholder"):
            if tags.get(node).role in GIVEN:
                each = [self.argument(node, rank) for rank in range(self.ranks)]
            else:
                each = next(handed)
            for env, value in zip(self.envs, each, strict=True):
                env[node] = value

    def argument(self, node: fx.Node, rank: int) -> Tensor:
        tag, dtype = tags.get(node), node.meta["val"].dtype
        name, mine = tag.fqn or "", self.given[rank]
        if tag.role in ("buffer", "accumulated"):
            if (tag.role, name) not in mine:
                return self.program.constants[name]
            mine[tag.role, name] = mine[tag.role, name].to(dtype)
            return mine[tag.role, name]
        if tag.role != "shard":
            key = ("param", name) if tag.role == "ignored" else (tag.role, name)
            return mine[key].to(dtype, copy=True)
        held = ("shard", name)
        if held not in mine:  # one and the same in both phases, for it is stepped
            param = self.program.params[name]
            full, dim = mine["param", name].to(dtype), param.shard_dim
            chunks = cut(full, dim, math.ceil(param.shape[dim] / self.world), self.world)
            mine[held] = chunks[rank % self.world]
        return mine[held]

    def named(self, results: Sequence[Any], nodes: Any) -> Found:
        sent = any(n.target in REDUCTIONS for n in self.program.graph.nodes)
        found: Found = {}
        for result, node in zip(results, nodes, strict=True):
            each = [self.value(rank, node).detach().clone() for rank in range(self.ranks)]
            if result.kind == "grad" and result.name in self.program.params and sent:
                each = self.unsharded(self.program.params[result.name], each)
            found[result.kind, result.name] = each
        return found

    def unsharded(self, param: Param, shards: Sequence[Tensor]) -> list[Tensor]:
        """The full gradient, as the replica of each rank has it."""
        starts = [rank - rank % self.world for rank in range(self.ranks)]
        dim, rows = param.shard_dim, range(param.shape[param.shard_dim])
        full = [torch.cat(list(shards[s : s + self.world]), dim) for s in starts]
        return [each.index_select(dim, torch.tensor(rows, dtype=torch.int64)) for each in full]

    # -- streams -----------------------------------------------------------------------------------

    def execute(self, phase: str, nodes: Sequence[fx.Node]) -> None:
        """Run a phase until the compute stream is through it, then what is left on the others."""
        for node in nodes:
            if ops.of(node).asynchronous:
                self.allocate(node)
        queues: dict[str, list[Step]] = {}
        for step in self.tagged(nodes) if self.by_events else self.paired(nodes):
            queues.setdefault(step.stream, []).append(step)
        self.recorded.add(f"c_{phase}")
        name = self.mode.removeprefix("-")
        order = sorted(queues, key=lambda s: (s == name) == self.mode.startswith("-"))
        while any(queues.values()):
            stream = next((s for s in order if queues[s] and self.can(queues[s][0])), None)
            if stream is None:
                raise Wrong(f"deadlock: {[str(q[0].node) for q in queues.values() if q]}")
            step = queues[stream].pop(0)
            self.step(step.node)
            self.recorded.update(step.records)

    def can(self, step: Step) -> bool:
        return self.recorded.issuperset(step.waits)

    def tagged(self, nodes: Sequence[fx.Node]) -> Iterator[Step]:
        """By the events of the tags; those inside of a region are recorded after it."""
        for node in nodes:
            tag = tags.get(node)
            inside = [tags.get(n).records for n in node.meta.get("run", (node,))]
            yield Step(node, tag.stream, list(tag.waits), [e for e in inside if e])

    def paired(self, nodes: Sequence[fx.Node]) -> Iterator[Step]:
        """By what the host does: a launch begins where it stands, and is over at its wait."""
        open_pairs: dict[int | None, list[str]] = {}
        here = ""
        for number, node in enumerate(nodes):
            pair, event = tags.get(node).pair, f"{id(self)} {node.name} {number}"
            if ops.of(node).asynchronous:
                waits = [*open_pairs.get(pair, []), *([here] if here else [])]
                open_pairs.setdefault(pair, []).append(event)
                yield Step(node, str(node.target), waits, [event])
                continue
            waits = open_pairs.pop(pair, []) if node.target is ops.wait else []
            yield Step(node, "compute", waits, [event])
            here = event

    # -- what runs ---------------------------------------------------------------------------------

    def value(self, rank: int, node: fx.Node) -> Any:
        """Views and results of lists are there as soon as what they are of is."""
        env = self.envs[rank]
        if node not in env:
            if is_in_place(node):
                return [self.value(rank, n) for n in tags.operands(node)]
            if node.op == "call_module" and all(map(is_view, node.meta["run"])):
                self.region(node)
                return env[node]
            if not is_view(node):
                raise Wrong(f"%{node} is read before it is there")
            of = node.args[0]
            if isinstance(of, fx.Node) and of.op == "call_module" and of not in env:
                return self.through(rank, of, node.args[1])
            env[node] = self.called(rank, node)
        return env[node]

    def through(self, rank: int, row: fx.Node, at: Any) -> Any:
        """A result of a region that is to run yet: of views in it alone, of what is there."""
        assert self.program.schedule is not None
        region = self.program.schedule.regions[str(row.target)].graph
        inputs = dict(zip(region.find_nodes(op="placeholder"), row.all_input_nodes, strict=True))

        def made(node: fx.Node) -> Any:
            if node in inputs:
                return self.value(rank, inputs[node])
            if not is_view(node):
                raise Wrong(f"%{row} is read before it is there")
            with torch.no_grad():
                return node.target(  # type: ignore[operator]
                    *fx.node.map_arg(node.args, made), **fx.node.map_arg(node.kwargs, made)
                )

        returned: Any = region.output_node().args[0]
        return made(returned[at])

    def called(self, rank: int, node: fx.Node) -> Any:
        args = fx.node.map_arg(node.args, lambda n: self.value(rank, n))
        kwargs = fx.node.map_arg(node.kwargs, lambda n: self.value(rank, n))
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def allocate(self, node: fx.Node) -> None:
        """What a launch writes is nothing yet."""
        if not is_in_place(node):
            for env in self.envs:
                values = node.meta["val"]
                made = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in values]
                env[node] = [ruined(value) for value in made]

    def step(self, node: fx.Node) -> None:
        quiet = node.op == "call_module" or is_quiet(node) or is_view(node)
        if not (self.by_events and quiet):
            self.ruin_freed()
        if node.op == "call_module":
            self.region(node)
        elif node.target in ops.OPERATORS:
            OPERATORS[node.target](self, node)
        elif not is_view(node):
            self.compute(node)

    def compute(self, node: fx.Node) -> None:
        """An operator of the model, on all ranks."""
        if "_c10d_functional" in str(node.target):
            functional(self, node)
            return
        for rank in range(self.ranks):
            self.envs[rank][node] = self.drawing(rank, node)

    def ruin_freed(self) -> None:
        """On CUDA, memory that is freed is another's from the next kernel of its stream on."""
        for value in self.gone:
            ruined(value)
        self.gone = []

    def drawing(self, rank: int, node: fx.Node) -> Any:
        if not tags.is_random(node):
            return self.called(rank, node)
        torch.set_rng_state(self.generators[rank])
        made = self.called(rank, node)
        self.generators[rank] = torch.get_rng_state()
        return made

    def region(self, row: fx.Node) -> None:
        schedule = self.program.schedule
        assert schedule is not None
        region = schedule.regions[str(row.target)].graph
        inputs, outer = region.find_nodes(op="placeholder"), self.envs
        given = [[self.value(rank, n) for n in row.all_input_nodes] for rank in range(self.ranks)]
        self.envs = [dict(zip(inputs, values, strict=True)) for values in given]
        for node in region.nodes:
            if node.op == "call_function" and not is_view(node):
                self.ruin_freed()
                self.compute(node)
        returned: Any = region.output_node().args[0]
        for rank in range(self.ranks):
            outer[rank][row] = [self.value(rank, n) for n in returned]
        self.envs = outer

    def operands(self, node: fx.Node) -> list[list[Tensor]]:
        """Per rank, the list that an operator of ours takes."""
        return [[self.value(rank, n) for n in tags.operands(node)] for rank in range(self.ranks)]

    def members(self, node: fx.Node) -> list[list[int]]:
        """The ranks that take part together, group by group."""
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        usual = "replicate" if node.target is ops.all_reduce else "shard"
        at = names.index("group") if "group" in names else len(node.args)
        group = str(node.args[at]) if at < len(node.args) else usual
        everybody = list(range(self.ranks))
        if group == "replicate":
            found = [everybody[i :: self.world] for i in range(self.world)]
        else:
            size = self.world if group == "shard" else int(group.removeprefix("reshard"))
            found = [everybody[i : i + size] for i in range(0, self.ranks, size)]
        if any(len(each) != node.args[1] for each in found):
            raise Wrong(f"%{node} says that {group} has {node.args[1]} ranks")
        return found

    def write(self, rank: int, node: fx.Node, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self.envs[rank][node], values, strict=True):
            if buffer.shape != value.shape or buffer.dtype is not value.dtype:
                raise Wrong(f"%{node} makes {value.shape}, and says {buffer.shape}")
            buffer.copy_(value)


def is_quiet(node: fx.Node) -> bool:
    """True for what runs no kernel on the compute stream."""
    return ops.of(node).asynchronous or node.target in (ops.wait, ops.free, ops.join)


def is_view(node: fx.Node) -> bool:
    """True for what the host does at once: it touches no data."""
    target = node.target
    return target is operator.getitem or bool(getattr(target, "is_view", False))


def is_in_place(node: fx.Node) -> bool:
    """True for what is reduced where it lies."""
    return node.target is ops.all_reduce or (node.target is ops.comm_hook and node.args[1] == 1)


def ruined(value: Tensor) -> Tensor:
    if value.dtype is torch.bool:
        return value.fill_(True)
    return value.fill_(math.nan if value.is_floating_point() else torch.iinfo(value.dtype).min)


# -- our operators ---------------------------------------------------------------------------------


def all_gather(machine: Machine, node: fx.Node) -> None:
    sent = machine.operands(node)
    for members in machine.members(node):
        whole = [torch.cat(list(each)) for each in zip(*(sent[m] for m in members), strict=True)]
        for rank in members:
            machine.write(rank, node, whole)


def reduce_scatter(machine: Machine, node: fx.Node) -> None:
    sent = machine.operands(node)
    for members in machine.members(node):
        each = [combined(node, v) for v in zip(*(sent[m] for m in members), strict=True)]
        for i, rank in enumerate(members):
            machine.write(rank, node, [whole.chunk(len(members))[i] for whole in each])


def all_reduce(machine: Machine, node: fx.Node) -> None:
    sent = machine.operands(node)
    for members in machine.members(node):
        each = [combined(node, v) for v in zip(*(sent[m] for m in members), strict=True)]
        for rank in members:
            for buffer, value in zip(sent[rank], each, strict=True):
                buffer.copy_(value)
            machine.envs[rank][node] = sent[rank]


def functional(machine: Machine, node: fx.Node) -> None:
    """A collective that the model calls, of two neighbours, or its wait."""
    sent = [machine.value(rank, tags.source(node)) for rank in range(machine.ranks)]
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    for rank in range(machine.ranks):
        pair = sent[rank // 2 * 2 : rank // 2 * 2 + 2]
        moved = sent[rank] if name == "wait_tensor" else between(node, name, pair, rank % 2)
        machine.envs[rank][node] = moved


def of_model(machine: Machine, node: fx.Node) -> None:
    """The same, launched."""
    sent = [each for (each,) in machine.operands(node)]
    name = str(node.target).removeprefix("fxshard.model_").removesuffix(".default")
    for rank in range(machine.ranks):
        pair = sent[rank // 2 * 2 : rank // 2 * 2 + 2]
        machine.write(rank, node, [between(node, name, pair, rank % 2)])


def between(node: fx.Node, name: str, pair: Sequence[Tensor], me: int) -> Tensor:
    """What `me` of two ranks gets in a collective."""
    if name.startswith("all_gather"):
        return torch.cat(list(pair))
    if name.startswith("all_to_all"):
        return torch.cat([each.chunk(2)[me] for each in pair])
    if name == "broadcast":
        return pair[0].clone()
    (op,) = (a for a in node.args if a in ("sum", "avg", "max"))
    stacked = torch.stack(list(pair))
    whole = {"sum": stacked.sum, "avg": stacked.mean, "max": stacked.amax}[op](0)
    return whole.chunk(2)[me].clone() if name.startswith("reduce_scatter") else whole


def combined(node: fx.Node, ranks: Sequence[Tensor]) -> Tensor:
    op = str(node.args[3]) if len(node.args) > 3 else "avg"
    if op in ("avg", "sum"):
        return mean(ranks) if op == "avg" else total(ranks)
    stacked = torch.stack(list(ranks))
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def comm_hook(machine: Machine, node: fx.Node) -> None:
    """The user's function averages over all ranks."""
    sent = machine.operands(node)
    world, size = machine.world, int(node.args[1])  # type: ignore[arg-type]
    blocks = [sent[i : i + world] for i in range(0, machine.ranks, world)]
    whole = mean([mean([flat for (flat,) in block]) for block in blocks])
    for rank, (flat,) in enumerate(sent):
        if size == 1:
            flat.copy_(whole)
            machine.envs[rank][node] = [flat]
        else:
            machine.write(rank, node, [whole.chunk(size)[rank % world]])


def copied(machine: Machine, node: fx.Node) -> None:
    """cast, load, store, offload, reload."""
    for rank, values in enumerate(machine.operands(node)):
        dtype = node.args[1] if node.target is ops.cast else None
        machine.write(rank, node, [v.to(dtype or v.dtype) for v in values])


def pack(machine: Machine, node: fx.Node) -> None:
    for rank, values in enumerate(machine.operands(node)):
        machine.write(rank, node, [torch.cat([v.to(node.args[1]).flatten() for v in values])])  # type: ignore[arg-type]


def unpack(machine: Machine, node: fx.Node) -> None:
    _, size, chunks, *along = node.args
    dims, lengths = along or ([0] * len(chunks), [size * chunk[0] for chunk in chunks])  # type: ignore
    for rank, ((packed,),) in enumerate(zip(machine.operands(node), strict=True)):
        made, rows = [], packed.view(size, -1)
        for chunk, dim, length in zip(chunks, dims, lengths, strict=True):  # type: ignore[arg-type]
            taken = math.prod(chunk)
            made.append(put_together(rows[:, :taken], chunk, dim, length))
            rows = rows[:, taken:]
        machine.envs[rank][node] = made


def put_together(rows: Tensor, chunk: Sequence[int], dim: int, length: int) -> Tensor:
    """The tensor of `length` rows along `dim` whose `cut` ones are `rows`."""
    parts, left = [], length
    for row in rows:
        taken = min(chunk[dim], left)
        shape = [taken if d == dim else n for d, n in enumerate(chunk)]
        parts.append(row[: math.prod(shape)].reshape(shape))
        left -= taken
    return torch.cat(parts, dim)


def cut(full: Tensor, dim: int, rows: int, ranks: int) -> list[Tensor]:
    """Chunks of `rows` rows along `dim`: what a rank has, and zeros after it."""
    found = []
    for rank in range(ranks):
        mine = [row for row in range(full.shape[dim]) if row // rows == rank]
        taken = full.index_select(dim, torch.tensor(mine, dtype=torch.int64)).flatten()
        shape = [rows if d == dim else n for d, n in enumerate(full.shape)]
        filled = torch.cat([taken, taken.new_zeros(math.prod(shape) - taken.numel())])
        found.append(filled.reshape(shape))
    return found


def reshard(machine: Machine, node: fx.Node) -> None:
    sent, along = machine.operands(node), node.args[3:]
    for members in machine.members(node):
        for i, rank in enumerate(members):
            if along:
                each = zip(sent[rank], *along, strict=True)  # type: ignore[arg-type]
                machine.envs[rank][node] = [cut(*one, len(members))[i] for one in each]
            else:
                machine.envs[rank][node] = [v.chunk(len(members))[i].clone() for v in sent[rank]]


def wait(machine: Machine, node: fx.Node) -> None:
    """Who waits for what is said by tags, or by pairs."""


def free(machine: Machine, node: fx.Node) -> None:
    for values in machine.operands(node):
        for value in values:
            machine.gone.append(value.new_empty(0).set_(value.untyped_storage()))


def join(machine: Machine, node: fx.Node) -> None:
    """Nothing is read: other ranks do that."""


def step(machine: Machine, node: fx.Node) -> None:
    """The optimizer: what it takes is noted, and the shards are others from here on."""
    grads, (_, shards, fqns) = machine.operands(node), node.args
    for i, (shard, fqn) in enumerate(zip(shards, fqns, strict=True)):  # type: ignore[arg-type]
        machine.stepped[fqn] = [mine[i].clone() for mine in grads]
        for rank in range(machine.ranks):
            machine.value(rank, shard).sub_(grads[rank][i])


OPERATORS = {
    ops.all_gather: all_gather,
    ops.reduce_scatter: reduce_scatter,
    ops.all_reduce: all_reduce,
    ops.comm_hook: comm_hook,
    **{target: of_model for target, spec in ops.OPERATORS.items() if spec.of_model},
    ops.cast: copied,
    ops.load: copied,
    ops.store: copied,
    ops.offload: copied,
    ops.reload: copied,
    ops.pack: pack,
    ops.unpack: unpack,
    ops.reshard: reshard,
    ops.wait: wait,
    ops.free: free,
    ops.join: join,
    ops.step: step,
}
