"""What to keep, recompute or offload so that activations fit a budget: an integer program.

This is no search over plans (`fxshard.planner`): it chooses among the values of one program, by
bytes and seconds that are sums over them, and is solved exactly. Which number of bytes is best for
a step is the planner's question, which plans the step with each number that it asks for.

Note: the program
=================
A storage that a checkpoint makes in forward is saved (s), or its operator is recomputed in backward
(a). What backward reads must be there, and so must the inputs of each recomputed operator::

    s + a >= 1                for each storage of the checkpoint that its own backward reads
    a(operator) <= s + a      for each storage of the same checkpoint that the operator reads
    a(operator) <= s          for each other storage that forward makes, which others cannot remake
    sum of bytes * s <= budget

The seconds of recomputation, the sum of seconds * a, are minimal; of all such solutions the one
with the fewest bytes is taken. An operator of whose results forward needs none runs there only for
those that are saved: else to recompute it costs nothing. Views cost nothing, parameters and the
batch are there anyway. A recomputed random operator saves the state of its generator, unless the
random operator before it is recomputed too (see `fxshard.passes.checkpoint`). As in Checkmate (Jain
et al., MLSys 2020), but each operator is recomputed at most once, where its checkpoint's backward
begins.

Note: offloading
================
With `hardware`, what is saved may be on the CPU in between (o), whatever saves it: a checkpoint's
choice, its policy, or that others read it. A copy costs nothing if it is hidden (z) behind what
computes meanwhile, in forward (f) and in backward (b), and else the time that it takes::

    o <= s
    o <= z + x          in forward and in backward, of which the seconds of x add to the others
    sum of bytes * z <= what the link carries while others compute, for each run of a unit
    sum of bytes * (s - o) <= budget

That recomputation gives more time to hide behind is not counted, nor is the rest of a run's time
that no whole tensor fills. So the step is no slower than this says. Of equally fast solutions the
one is taken with the fewest bytes on the device and twice those on the CPU: nothing is offloaded
that need not be.

Note: identical layers
======================
Checkpoints of equal form share their variables, which then count how many of them save a storage.
Nothing is lost: all constraints but the budget compare two of the variables ``a`` and ``s + a``,
so any such answer in whole numbers up to n is the sum of n answers in 0 and 1, the j-th of which
has 1 where the number is at least j, and cost and bytes are sums. A state of a generator, needed by
an operator whose predecessor is not recomputed, is ``max(0, a - a')`` on both sides. What is hidden
is so in each of them, beside which as much must compute (a last layer is often another form). The
problem is as large as the number of different layers, at any depth.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import fx

from fxshard.bytesize import size_text
from fxshard.capture import rng
from fxshard.cost import leaving
from fxshard.errors import ConfigError, TooLittleError
from fxshard.hardware import Hardware
from fxshard.ir import ops, tags
from fxshard.ir.program import Program

aten: Any = torch.ops.aten

Seconds = Callable[[fx.Node], float]
STATES = (rng.get_rng_state, rng.set_rng_state)
NODES = 20_000  # of the solver's search tree; a limit in seconds would differ between ranks


@dataclasses.dataclass
class Value:
    """A storage that forward makes.

    Attributes:
        node: the operator that makes it, or the getitem of it.
        maker: that operator.
        size: its bytes.
        bytes: what saving it costs: 0 if the model returns it.
        home: number of the checkpoint that makes it.
        forced: it is saved whatever is chosen.
        tagged: a policy of the model's own says that it is saved.
        wanted: backward of its own checkpoint reads it.
        readers: other checkpoints that read it to recompute something.
    """

    node: fx.Node
    maker: fx.Node
    size: int
    bytes: int
    home: int | None
    forced: bool = False
    tagged: bool = False
    wanted: bool = False
    readers: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What becomes of the values of forward that backward needs; the others are recomputed.

    Attributes:
        saved: forward operators, and getitems of their results, whose value checkpoints save.
        offloaded: values, of these or of what is saved in any case, that wait on the CPU.
    """

    saved: frozenset[fx.Node]
    offloaded: frozenset[fx.Node] = frozenset()


@dataclasses.dataclass(frozen=True)
class Column:
    """A variable.

    Attributes:
        seconds, size: what each of it costs, and holds on the device between the phases.
        most: its upper bound.
        parts: it need not be a whole number.
    """

    seconds: float
    size: int
    most: int
    parts: bool = False


def choose(
    program: Program,
    budget: int,
    seconds: Seconds,
    hardware: Hardware | None = None,
    least_bytes: int = leaving.LEAST_BYTES,
) -> Choice:
    """What is saved, at most `budget` bytes of activations on the device, at the least time.

    Args:
        program: with its checkpoints assigned; those of `Meta.checkpoint` numbers whose nodes have
            ``save`` keep what their policy says.
        budget: bytes on one rank between forward and backward of one micro-batch, of what the model
            returns too.
        seconds: of one operator, > 0 if it computes.
        hardware: whose link to the CPU carries what is offloaded; None: nothing is.
        least_bytes: of a tensor that may be offloaded.

    Raises:
        TooLittleError: even the fewest bytes are more; says how many they are, and of what.
        ConfigError: the solver found no choice.
    """
    problem = _Problem(program, seconds, hardware, least_bytes)
    least = problem.least()
    if least > budget:
        raise TooLittleError(
            f"checkpoint={size_text(budget)}: at least {size_text(least)} ({least:,} bytes) of "
            f"activations live from forward to backward, whatever is recomputed"
            f"{' or offloaded' if problem.ways else ''}: "
            f"{problem.largest_forced()}. What is outside of checkpointed modules, and what they "
            f"read, is saved in any case: make the units larger, or the batch smaller.",
            least,
        )
    found = problem.solve(budget)
    return Choice(frozenset(problem.saved(found)), frozenset(problem.offloaded(found)))


class _Problem:
    """The integer program of one joint graph."""

    def __init__(
        self,
        program: Program,
        seconds: Seconds,
        hardware: Hardware | None = None,
        least_bytes: int = leaving.LEAST_BYTES,
    ) -> None:
        self.program, self.seconds = program, seconds
        self.values: dict[int, Value] = {}  # by storage
        self.homes: dict[fx.Node, int | None] = {}  # the checkpoint that can recompute a node
        self.returned = {
            storage
            for node, result in zip(program.values, program.results, strict=True)
            if result.kind == "output"
            for storage in tags.storage_ids(node)
        }
        self._collect_values()
        self._collect_reads()
        self.operators = self._candidates()
        self.candidates = {node for nodes in self.operators.values() for node in nodes}
        self.previous = random_before(program)
        self.ways: dict[int, leaving.Way] = {}  # by id of the value, of those that may leave
        self.rooms: tuple[dict[int, float], dict[int, float]] = ({}, {})
        self.link = 0.0  # seconds per byte
        if hardware is not None:
            self.link = 1 / hardware.host.beta
            self._collect_ways(hardware, least_bytes)
        self.copied = self._written_buffers()
        self.constant = sum(
            value.size
            for storage, value in self.values.items()
            if value.forced or storage in self.returned
        )
        self.skipped = self._skippable()
        self._build()

    def _collect_values(self) -> None:
        held = {
            storage
            for node in self.program.graph.find_nodes(op="placeholder")
            for storage in tags.storage_ids(node)
        }
        for node in self.program.phase("forward"):
            number = tags.get(node).checkpoint
            view = tags.aliases_input(node) and node.target is not operator.getitem
            self.homes[node] = number
            if tags.aliases_input(node):
                sources = [self.homes[n] for n in _viewed(node)]
                self.homes[node] = number if all(home == number for home in sources) else None
            if view or from_parameter(node):
                continue
            maker = tags.source(node) if node.target is operator.getitem else node
            for storage in tags.storages(node):
                if id(storage) not in held and isinstance(node.meta.get("val"), torch.Tensor):
                    size = storage.nbytes()
                    cost = 0 if id(storage) in self.returned else size
                    made = Value(node, maker, size, cost, number)
                    made.tagged = tags.get(node).save or tags.get(maker).save
                    self.values.setdefault(id(storage), made)

    def _collect_reads(self) -> None:
        for reader in self.program.phase("backward"):
            for value, own in self._all_reads(reader):
                value.wanted |= own
                value.forced |= not own
        for value in self.values.values():
            value.forced |= value.wanted and value.tagged

    def _candidates(self) -> dict[int, list[fx.Node]]:
        """Per checkpoint, the operators that may be recomputed, in the order of forward."""
        todo = [value for value in self.values.values() if value.wanted and not value.forced]
        found: set[fx.Node] = set()
        while todo:
            maker = todo.pop().maker
            if maker in found:
                continue
            found.add(maker)
            number = tags.get(maker).checkpoint
            assert number is not None
            for value, own in self._reads(maker):
                if own and not value.tagged:
                    todo.append(value)
                elif not own:
                    value.readers.add(number)
        made: dict[int, list[fx.Node]] = defaultdict(list)
        for node in self.program.phase("forward"):
            if node in found:
                made[tags.get(node).checkpoint or 0].append(node)
        return made

    def _collect_ways(self, hardware: Hardware, least_bytes: int) -> None:
        """Where what may leave does so, and where it comes back."""
        forward = leaving.Runs(self.program.phase("forward"))
        backward = leaving.Runs(self.program.phase("backward"))
        first: dict[int, int] = {}  # of a checkpoint, its first run in backward
        reader: dict[int, int] = {}  # of a storage, that of what reads it first
        for place, node in enumerate(backward.nodes):
            number, run = tags.get(node).checkpoint, backward.of(place)
            if number is not None:
                first.setdefault(number, run)
            for storage in tags.read_ids(node):
                reader.setdefault(storage, run)
        for storage, moved in leaving.movable(self.program).items():
            value = self.values.get(storage)
            if value is None or value.bytes < least_bytes or not can_return(moved):
                continue
            runs = [first[number] for number in value.readers if number in first]
            runs += [first[value.home]] if value.home in self.operators else []
            runs += [reader[storage]] if storage in reader else []
            if runs:
                way = forward.of(moved.last), min(runs)
                if not leaving.stays(way, forward):
                    self.ways[id(value)] = way
        self.rooms = leaving.rooms(self.ways.values(), forward, backward, hardware, 1)

    def _all_reads(self, node: fx.Node) -> Iterator[tuple[Value, bool]]:
        """What `node` reads of storages that forward makes, and if its checkpoint makes them."""
        number = tags.get(node).checkpoint
        for source in node.all_input_nodes:
            home = self.homes.get(source)
            if source not in self.homes or from_parameter(source):
                continue
            for value in (self.values[s] for s in tags.storage_ids(source) if s in self.values):
                yield value, number is not None and home == number == value.home

    def _reads(self, node: fx.Node) -> list[tuple[Value, bool]]:
        """Of those, what may be recomputed."""
        return [(value, own) for value, own in self._all_reads(node) if not value.forced]

    def _copies(self, node: fx.Node) -> list[Value]:
        """Copies of buffers that `node` reads when it is recomputed."""
        return [self.copied[source] for source in node.all_input_nodes if source in self.copied]

    def _written_buffers(self) -> dict[fx.Node, Value]:
        """Buffers that forward writes: recomputation reads a saved copy of the old value."""
        copies: dict[int, Value] = {}  # by storage
        for node in self.program.graph.find_nodes(op="placeholder"):
            if any(map(tags.writes, node.users)):
                size = sum(s.nbytes() for s in tags.storages(node))
                copies |= dict.fromkeys(tags.storage_ids(node), Value(node, node, size, size, None))
        found: dict[fx.Node, Value] = {}
        for operators in self.operators.values() if copies else ():
            for node in operators:
                for source in node.all_input_nodes:
                    for storage in tags.storage_ids(source) & copies.keys():  # or that of its view
                        found[source] = copies[storage]
        return found

    # -- variables and constraints ---------------------------------------------------------------

    def _build(self) -> None:
        """One column per operator, storage and state of each form of checkpoint."""
        self.columns: list[Column] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self.of_operator: dict[fx.Node, int] = {}
        self.of_value: dict[int, int] = {}
        self.of_copy: dict[int, int] = {}  # by id of a value that may leave
        self.members: dict[int, list[int]] = {}  # of the form of each checkpoint, first to last
        forms: dict[Any, list[int]] = {}
        for number in sorted(self.operators):
            forms.setdefault(self._form(number), []).append(number)
        for numbers in forms.values():
            self._add_form(numbers)
            self.members |= dict.fromkeys(numbers, numbers)
        self._add_copies()

    def _is_own(self, value: Value, number: int) -> bool:
        """True if no checkpoint but `number` has to do with it."""
        if value.home == number and value.maker in self.candidates:
            return value.readers <= {number}
        return value.readers == {number} and value.maker not in self.candidates

    def _touched(self, number: int) -> list[Value]:
        """Storages that the operators of a checkpoint make and read, by first use."""
        found: dict[int, Value] = {}
        for node in self.operators[number]:
            for value, _ in self._reads(node):
                found.setdefault(id(value), value)
            for value in (*self._copies(node), *self._made(node)):
                found.setdefault(id(value), value)
        return list(found.values())

    def _made(self, node: fx.Node) -> list[Value]:
        made = (self.values.get(s) for s in sorted(tags.storage_ids(node)))
        found = [v for v in made if v is not None and v.maker is node and not v.forced]
        order = {user: i for i, user in enumerate(node.users)}
        return sorted(found, key=lambda value: order.get(value.node, -1))

    def _form(self, number: int) -> Any:
        """Equal for checkpoints whose parts of the problem differ in nothing but names."""
        operators = self.operators[number]
        at = {node: i for i, node in enumerate(operators)}
        touched = self._touched(number)
        name: dict[int, Any] = {}
        for i, value in enumerate(touched):
            name[id(value)] = i if self._is_own(value, number) else ("shared", id(value))
        storages = tuple(
            (
                *(name[id(v)], v.bytes, v.wanted and v.home == number, v.tagged),
                *(at.get(v.maker), *self._room(v)),
            )
            for v in touched
        )
        return storages, tuple(
            (
                self.seconds(node),
                tuple((name[id(value)], own) for value, own in self._reads(node)),
                tuple(name[id(copy)] for copy in self._copies(node)),
                self._state(node),
                at.get(self._predecessor(node)),
                tuple(at.get(reader) for reader in self.skipped.get(node, ())),
                node in self.skipped,
            )
            for node in operators
        )

    def _predecessor(self, node: fx.Node) -> Any:
        before = self.previous.get(node)
        same = before is not None and tags.get(before).checkpoint == tags.get(node).checkpoint
        return before if same else None

    def _state(self, node: fx.Node) -> int:
        """Bytes of the generator state that recomputing a random operator needs; 0 for others."""
        device = generator_of(node)
        if device is None:
            return 0
        return rng.CPU_STATE_BYTES if device.type == "cpu" else rng.ACCELERATOR_STATE_BYTES

    def _room(self, value: Value) -> tuple[int, int] | tuple[()]:
        """Bytes that may move with a value, there and back, at no cost; (): it cannot leave."""
        if id(value) not in self.ways:
            return ()
        leaves, returns = self.ways[id(value)]
        return round(self.rooms[0][leaves]), round(self.rooms[1][returns])

    def _column(self, seconds: float, size: int, most: int, parts: bool = False) -> int:
        self.columns.append(Column(seconds, size, most, parts))
        return len(self.columns) - 1

    def _add_form(self, numbers: list[int]) -> None:
        first, most = numbers[0], len(numbers)
        for node in self.operators[first]:
            self.of_operator[node] = self._column(self.seconds(node), 0, most)
        for value in self._touched(first):
            if id(value) not in self.of_value:
                bound = most if self._is_own(value, first) else 1
                self.of_value[id(value)] = self._column(0.0, value.bytes, bound)
        for node in self.operators[first]:
            recomputed = self.of_operator[node]
            for value, own in self._reads(node):
                self._needs(recomputed, value, own and not value.tagged, most, first)
            for copy in self._copies(node):
                self._needs(recomputed, copy, False, most, first)
            for value in self._made(node):
                if value.tagged:
                    continue
                saved = self.of_value[id(value)]
                if value.wanted:
                    self.rows.append(({saved: 1, recomputed: 1}, most, np.inf))
                if self._is_own(value, first):
                    self.rows.append(({saved: 1, recomputed: 1}, -np.inf, most))
            if self._state(node):
                state = self._column(0.0, self._state(node), most)
                before = self._predecessor(node)
                row: dict[int, float] = {recomputed: 1, state: -1}
                if before in self.of_operator:
                    row[self.of_operator[before]] = -1
                self.rows.append((row, -np.inf, 0))
        self._add_forward(first, most)

    def _add_forward(self, number: int, most: int) -> None:
        """What forward does not run where nothing of it is saved costs something where it does."""
        runs: dict[fx.Node, int] = {}
        for node in reversed(self.operators[number]):
            if node not in self.skipped:
                continue
            runs[node] = self._column(self.seconds(node), 0, most)
            for value in self._made(node):
                self.rows.append(({self.of_value[id(value)]: 1, runs[node]: -1}, -np.inf, 0))
            for reader in self.skipped[node]:
                self.rows.append(({runs[reader]: 1, runs[node]: -1}, -np.inf, 0))

    def _skippable(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """Operators of which forward needs nothing, unless it is saved; with those, of these, that
        read it.
        """
        found: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for operators in self.operators.values():
            inside = set(operators)
            for node in reversed(operators):
                if tags.is_random(node) or tags.writes(node) or self._is_kept(node):
                    continue
                readers: list[fx.Node] = []
                todo = [node]
                for each in todo:
                    for user in each.users:
                        if user.op == "output" or tags.get(user).phase == "backward":
                            readers += [user] if user.op == "output" else []
                        elif tags.aliases_input(user):
                            todo.append(user)
                        else:
                            readers.append(user)
                if all(reader in found and reader in inside for reader in readers):
                    found[node] = tuple(dict.fromkeys(readers))
        return found

    def _is_kept(self, node: fx.Node) -> bool:
        """True if a result is saved in any case, or is another checkpoint's business too."""
        number = tags.get(node).checkpoint or 0
        made = [self.values[s] for s in tags.storage_ids(node) if s in self.values]
        return any(v.forced or v.tagged or not self._is_own(v, number) for v in made)

    def _forced_alike(self) -> dict[int, Value]:
        """Of what is saved in any case, by id, the first one that is like it in another layer."""
        order: dict[int | None, int] = defaultdict(int)
        first: dict[Any, Value] = {}
        found: dict[int, Value] = {}
        for value in self.values.values():
            if value.forced:
                order[value.home] += 1
                form = None if value.home is None else self.members.get(value.home, ())
                key = str(form), order[value.home], value.bytes, self._room(value)
                found[id(value)] = first.setdefault(key, value)
        return found

    def _add_copies(self) -> None:
        """Columns for what may be offloaded; of one form, what is the same in each is one."""
        if not self.ways:
            return
        like = {id(value): value for value in self.values.values()}
        count: dict[int, int] = defaultdict(int)
        for numbers in {id(m): m for m in self.members.values()}.values():
            template = self._touched(numbers[0])
            for number in numbers:
                pairs = zip(template, self._touched(number), strict=True)
                like |= {id(v): t for t, v in pairs if self._is_own(t, numbers[0])}
        like |= self._forced_alike()
        for value in self.values.values():
            count[id(like[id(value)])] += 1
        hidden: dict[int, tuple[int, int]] = {}
        for value in self.values.values():
            saved = self.of_value.get(id(value))
            if id(value) not in self.ways or like[id(value)] is not value:
                continue
            if saved is None and not value.forced:
                continue
            most = count[id(value)]
            copied = self.of_copy[id(value)] = self._column(0.0, -value.bytes, most)
            hidden[id(value)] = self._column(0.0, 0, 1), self._column(0.0, 0, 1)
            if saved is not None:
                self.rows.append(({copied: 1, saved: -1}, -np.inf, 0))
            for part in hidden[id(value)]:
                waited = self._column(value.bytes * self.link, 0, most, parts=True)
                self.rows.append(({copied: 1, part: -most, waited: -1}, -np.inf, 0))
        for direction, room in enumerate(self.rooms):
            together: dict[int, dict[int, float]] = defaultdict(dict)
            for value in self.values.values():
                template_id = id(like[id(value)])
                if template_id in hidden and id(value) in self.ways:
                    run = self.ways[id(value)][direction]
                    together[run][hidden[template_id][direction]] = value.bytes
            rows = {(tuple(row.items()), round(room[run])) for run, row in together.items()}
            for row, most in sorted(rows):
                scale = max(size for _, size in row)
                scaled = {column: size / scale for column, size in row}
                self.rows.append((scaled, -np.inf, most / scale))
        self.like = like

    def _needs(
        self, recomputed: int, value: Value, recomputable: bool, most: int, number: int
    ) -> None:
        """An operator can be recomputed as often as what it reads is there."""
        saved = self.of_value[id(value)]
        scale = 1 if self._is_own(value, number) else most
        row: dict[int, float] = {recomputed: 1, saved: -scale}
        if recomputable:
            row[self.of_operator[value.maker]] = -1
        self.rows.append((row, -np.inf, 0))

    # -- answers ---------------------------------------------------------------------------------

    def least(self) -> int:
        """The fewest bytes that can be reached."""
        return self._bytes(self._minimised([each.size for each in self.columns]))

    def solve(self, budget: int) -> Any:
        """Numbers for the columns: the least time within `budget` bytes, then the fewest bytes."""
        seconds = [float(each.seconds) for each in self.columns]
        sizes = [each.size for each in self.columns]
        found, over, limit = None, 0, budget - self.constant
        while found is None or over > 0:  # the solver keeps a constraint up to its tolerance
            limit -= over
            found = self._minimised(seconds, (sizes, limit))
            over = self._bytes(found) - budget
        most = float(np.dot(seconds, found)) * (1 + 1e-9)
        held = [abs(size) for size in sizes]  # bytes on the device, and twice those on the CPU
        tidy = self._minimised(held, (seconds, most), (sizes, limit))
        fits = self._bytes(tidy) <= budget and float(np.dot(seconds, tidy)) <= most
        return tidy if fits else found

    def _bytes(self, found: Iterable[int]) -> int:
        return self.constant + sum(
            each.size * int(count) for each, count in zip(self.columns, found, strict=True)
        )

    def _minimised(self, weights: list[Any], *limits: tuple[list[Any], float]) -> Any:
        """Whole numbers for the columns at the least sum, with other sums at most some limits."""
        if not self.columns:
            return np.zeros(0, dtype=np.int64)
        # Only a number of bytes needs a solver, and importing it takes a third of a second.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        rows = list(self.rows)
        for sums, most in limits:
            scale = max(max(map(abs, sums), default=0), 1e-300)
            rows.append(({i: w / scale for i, w in enumerate(sums) if w}, -np.inf, most / scale))
        data = [(i, j, weight) for i, (row, _, _) in enumerate(rows) for j, weight in row.items()]
        at, columns, entries = zip(*data, strict=True) if data else ((), (), ())
        matrix = csr_array((entries, (at, columns)), shape=(len(rows), len(self.columns)))
        scale = max(max(map(abs, weights)), 1e-300)
        result = milp(
            np.array(weights, dtype=float) / scale,
            integrality=np.array([not each.parts for each in self.columns], dtype=int),
            bounds=Bounds(0, [each.most for each in self.columns]),
            constraints=LinearConstraint(
                matrix, [low for _, low, _ in rows], [high for _, _, high in rows]
            ),
            options={"mip_rel_gap": 0.0, "node_limit": NODES},
        )
        if result.x is None:
            raise ConfigError(f"the solver found no choice of what to save: {result.message}")
        return np.rint(result.x).astype(np.int64)

    def saved(self, found: Any) -> Iterator[fx.Node]:
        """What checkpoints save, by `solve`."""
        return (value.node for value in self._held(found) if value.home is not None)

    def _held(self, found: Any) -> Iterator[Value]:
        """What lives from forward to backward, on the CPU or not, by `solve`.

        Of n checkpoints of one form the first ones recompute most: what the last ones save dies
        first in backward, before the first recompute anything.
        """
        for value in self.values.values():
            if value.forced:
                yield value
        for numbers in {id(m): m for m in self.members.values()}.values():
            template = self._touched(numbers[0])
            for j, number in enumerate(numbers, start=1):
                for like, value in zip(template, self._touched(number), strict=True):
                    count = int(found[self.of_value[id(like)]])
                    recomputed = 0
                    if like.maker in self.candidates and like.home == numbers[0]:
                        recomputed = int(found[self.of_operator[like.maker]])
                    own = self._is_own(like, numbers[0])
                    if count and (
                        not own or (0 if like.tagged else recomputed) < j <= recomputed + count
                    ):
                        yield value

    def offloaded(self, found: Any) -> Iterator[fx.Node]:
        """What is offloaded, by `solve`: of n values that are saved alike, those made first."""
        left = {value: int(found[column]) for value, column in self.of_copy.items()}
        held = set(map(id, self._held(found)))
        for value in self.values.values() if left else ():
            like = id(self.like[id(value)])
            if left.get(like, 0) and id(value) in held:
                left[like] -= 1
                yield value.node

    def largest_forced(self) -> str:
        """The largest of what is saved in any case."""
        forced = [value for value in self.values.values() if value.forced]
        forced.sort(key=lambda value: value.size, reverse=True)
        listed = [
            f"{size_text(value.size)} {str(value.maker.target).removesuffix('.default')} of "
            f"{tags.get(value.maker).module or 'the root'}"
            for value in forced[:4]
        ]
        more = f", and {len(forced) - 4} more" if len(forced) > 4 else ""
        return (", ".join(listed) or "the states of random generators") + more


def _viewed(node: fx.Node) -> list[fx.Node]:
    """The operators that `node` is a view of."""
    own = tags.storage_ids(node)
    return [
        n for n in node.all_input_nodes if n.op == "call_function" and tags.storage_ids(n) & own
    ]


# -- what a checkpoint's pass asks of a node too ---------------------------------------------------


def from_parameter(node: fx.Node) -> bool:
    """True for a parameter and what views and casts alone make of it: that is never saved."""
    if node.op == "placeholder":
        return tags.get(node).role == "param"
    alone = len(node.all_input_nodes) == 1
    views = node.target is aten._to_copy.default or tags.aliases_input(node)
    return alone and views and from_parameter(node.all_input_nodes[0])


def generator_of(node: fx.Node) -> torch.device | None:
    """The device whose random numbers `node` draws. Attention without dropout draws none."""
    if not tags.is_random(node) or ops.argument(node, "dropout_p") == 0.0:
        return None
    device: torch.device = next(tags.tensors(node.meta["val"])).device
    return device


def random_before(program: Program) -> dict[fx.Node, fx.Node | None]:
    """Per random operator of forward, the one before it on the same device."""
    found: dict[fx.Node, fx.Node | None] = {}
    last: dict[torch.device, fx.Node] = {}
    for node in program.phase("forward"):
        device = generator_of(node) if node.target not in STATES else None
        if device is not None:
            found[node] = last.get(device)
            last[device] = node
    return found


def can_return(moved: leaving.Movable) -> bool:
    """True if backward can read, of what comes back, all that forward has made of a storage."""
    read = [n for n in moved.inside if n.users and isinstance(n.meta["val"], torch.Tensor)]
    return all(leaving.views_from(moved.base, node) is not None for node in read)
