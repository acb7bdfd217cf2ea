"""What to recompute in backward so that saved activations fit a budget: an integer program.

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
with the fewest bytes is taken. Views cost nothing, parameters and the batch are there anyway. A
recomputed random operator saves the state of its generator, unless the random operator before it is
recomputed too (see `fxshard.passes.checkpoint`). As in Checkmate (Jain et al., MLSys 2020), but
each operator is recomputed at most once, where its checkpoint's backward begins.

Note: identical layers
======================
Checkpoints of equal form share their variables, which then count how many of them save a storage.
Nothing is lost: all constraints but the budget compare two of the variables ``a`` and ``s + a``,
so any such answer in whole numbers up to n is the sum of n answers in 0 and 1, the j-th of which
has 1 where the number is at least j, and cost and bytes are sums. A state of a generator, needed by
an operator whose predecessor is not recomputed, is ``max(0, a - a')`` on both sides. The problem is
as large as the number of different layers, at any depth.
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
from fxshard.errors import ConfigError, TooLittleError
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


def choose(program: Program, budget: int, seconds: Seconds) -> frozenset[fx.Node]:
    """What checkpoints save, at most `budget` bytes of activations, at the least time.

    Args:
        program: with its checkpoints assigned; those of `Meta.checkpoint` numbers whose nodes have
            ``save`` keep what their policy says.
        budget: bytes on one rank between forward and backward of one micro-batch, of what the model
            returns too.
        seconds: of one operator, > 0 if it computes.

    Returns:
        Forward operators, and getitems of their results, whose value is saved.

    Raises:
        TooLittleError: even the fewest bytes are more; says how many they are, and of what.
        ConfigError: the solver found no choice.
    """
    problem = _Problem(program, seconds)
    least = problem.least()
    if least > budget:
        raise TooLittleError(
            f"checkpoint={size_text(budget)}: at least {size_text(least)} ({least:,} bytes) of "
            f"activations live from forward to backward, whatever is recomputed: "
            f"{problem.largest_forced()}. What is outside of checkpointed modules, and what they "
            f"read, is saved in any case: make the units larger, or the batch smaller.",
            least,
        )
    return frozenset(problem.saved(problem.solve(budget)))


class _Problem:
    """The integer program of one joint graph."""

    def __init__(self, program: Program, seconds: Seconds) -> None:
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
        self.copied = self._written_buffers()
        self.constant = sum(
            value.size
            for storage, value in self.values.items()
            if value.forced or storage in self.returned
        )
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
        self.columns: list[tuple[float, int, int]] = []  # seconds, bytes, upper bound
        self.rows: list[tuple[dict[int, int], float, float]] = []
        self.of_operator: dict[fx.Node, int] = {}
        self.of_value: dict[int, int] = {}
        self.members: dict[int, list[int]] = {}  # of the form of each checkpoint, first to last
        forms: dict[Any, list[int]] = {}
        for number in sorted(self.operators):
            forms.setdefault(self._form(number), []).append(number)
        for numbers in forms.values():
            self._add_form(numbers)
            self.members |= dict.fromkeys(numbers, numbers)

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
            (name[id(v)], v.bytes, v.wanted and v.home == number, v.tagged, at.get(v.maker))
            for v in touched
        )
        return storages, tuple(
            (
                self.seconds(node),
                tuple((name[id(value)], own) for value, own in self._reads(node)),
                tuple(name[id(copy)] for copy in self._copies(node)),
                self._state(node),
                at.get(self._predecessor(node)),
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

    def _column(self, seconds: float, size: int, most: int) -> int:
        self.columns.append((seconds, size, most))
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
                row = {recomputed: 1, state: -1}
                if before in self.of_operator:
                    row[self.of_operator[before]] = -1
                self.rows.append((row, -np.inf, 0))

    def _needs(
        self, recomputed: int, value: Value, recomputable: bool, most: int, number: int
    ) -> None:
        """An operator can be recomputed as often as what it reads is there."""
        saved = self.of_value[id(value)]
        scale = 1 if self._is_own(value, number) else most
        row = {recomputed: 1, saved: -scale}
        if recomputable:
            row[self.of_operator[value.maker]] = -1
        self.rows.append((row, -np.inf, 0))

    # -- answers ---------------------------------------------------------------------------------

    def least(self) -> int:
        """The fewest bytes that can be reached."""
        return self._bytes(self._minimised([size for _, size, _ in self.columns]))

    def solve(self, budget: int) -> Any:
        """Numbers for the columns: the least time within `budget` bytes, then the fewest bytes."""
        seconds = [float(cost) for cost, _, _ in self.columns]
        sizes = [size for _, size, _ in self.columns]
        found, over, limit = None, 0, budget - self.constant
        while found is None or over > 0:  # the solver keeps a constraint up to its tolerance
            limit -= over
            found = self._minimised(seconds, (sizes, limit))
            over = self._bytes(found) - budget
        most = float(np.dot(seconds, found)) * (1 + 1e-9)
        tidy = self._minimised(sizes, (seconds, most))
        fits = self._bytes(tidy) <= budget and float(np.dot(seconds, tidy)) <= most
        return tidy if fits else found

    def _bytes(self, found: Iterable[int]) -> int:
        return self.constant + sum(
            size * int(count) for (_, size, _), count in zip(self.columns, found, strict=True)
        )

    def _minimised(self, weights: list[Any], limit: tuple[list[Any], float] | None = None) -> Any:
        """Whole numbers for the columns at the least sum, with another sum at most a limit."""
        if not self.columns:
            return np.zeros(0, dtype=np.int64)
        # Only a number of bytes needs a solver, and importing it takes a third of a second.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        rows = list(self.rows)
        if limit is not None:
            sums, most = limit
            scale = max(max(sums, default=0), 1e-300)
            rows.append(({i: w / scale for i, w in enumerate(sums) if w}, -np.inf, most / scale))
        data = [(i, j, weight) for i, (row, _, _) in enumerate(rows) for j, weight in row.items()]
        at, columns, entries = zip(*data, strict=True) if data else ((), (), ())
        matrix = csr_array((entries, (at, columns)), shape=(len(rows), len(self.columns)))
        scale = max(max(weights), 1e-300)
        result = milp(
            np.array(weights, dtype=float) / scale,
            integrality=np.ones(len(self.columns)),
            bounds=Bounds(0, [most for _, _, most in self.columns]),
            constraints=LinearConstraint(
                matrix, [low for _, low, _ in rows], [high for _, _, high in rows]
            ),
            options={"mip_rel_gap": 0.0, "node_limit": NODES},
        )
        if result.x is None:
            raise ConfigError(f"the solver found no choice of what to save: {result.message}")
        return np.rint(result.x).astype(np.int64)

    def saved(self, found: Any) -> Iterator[fx.Node]:
        """What is saved, by `solve`. Of n checkpoints of one form the first ones recompute most.

        What the last ones save dies first in backward, before the first recompute anything.
        """
        for value in self.values.values():
            if value.forced and value.home is not None:
                yield value.node
        for numbers in {id(m): m for m in self.members.values()}.values():
            template = self._touched(numbers[0])
            for j, number in enumerate(numbers, start=1):
                for like, value in zip(template, self._touched(number), strict=True):
                    if value.home is None:
                        continue
                    count = int(found[self.of_value[id(like)]])
                    recomputed = 0
                    if like.maker in self.candidates and like.home == numbers[0]:
                        recomputed = int(found[self.of_operator[like.maker]])
                    own = self._is_own(like, numbers[0])
                    if count and (
                        not own or (0 if like.tagged else recomputed) < j <= recomputed + count
                    ):
                        yield value.node

    def largest_forced(self, count: int = 4) -> str:
        """The largest of what is saved in any case."""
        forced = [value for value in self.values.values() if value.forced]
        forced.sort(key=lambda value: value.size, reverse=True)
        listed = [
            f"{size_text(value.size)} {str(value.maker.target).removesuffix('.default')} of "
            f"{tags.get(value.maker).module or 'the root'}"
            for value in forced[:count]
        ]
        more = f", and {len(forced) - count} more" if len(forced) > count else ""
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
