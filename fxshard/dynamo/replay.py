"""How a graph of Dynamo runs in place of the model: at its capture, or operator by operator.

At capture there is a stand-in for each module of the user's model, of the same FQN and class. The
nodes of each call of a module run inside a call of its stand-in, so the trace sees the same calls
as from the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fxshard._torch import autograd, checkpointing, dynamo, graphs
from fxshard.capture import provenance
from fxshard.errors import CaptureError
from fxshard.ir.names import owner_of
from fxshard.runtime import reading


@dataclasses.dataclass(frozen=True)
class Bound:
    """What some inputs of a graph are, by position: ``("param" | "ignored" | "buffer", FQN)``.

    All other inputs are the program's.
    """

    names: tuple[tuple[int, str, str], ...]

    def fqns(self, *kinds: str) -> list[str]:
        """The names of some kinds, each once."""
        return list(dict.fromkeys(fqn for _, kind, fqn in self.names if kind in kinds))


class _StandIn(nn.Module):
    """A module of the user's tree at capture: its name, its class and what a graph reads of it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.__call__(self, *args, **kwargs)

    def forward(self, *args: Any) -> Any:
        if "run_graph" in self.__dict__:
            return self.__dict__["run_graph"](args)
        (inside,) = args
        return inside()


def stand_ins(model: nn.Module, bound: Bound) -> dict[str, nn.Module]:
    """By FQN, stand-ins for all modules; they hold the model's own parameters and buffers.

    Of these, they have only those in `bound`.
    """
    wanted = set(bound.fqns("param", "ignored", "buffer"))
    made: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in made:
            base: Any = getattr(type(module), "_fxshard_base", type(module))
            there = made[id(module)] = _stand_in_class(base)()
            there.training = module.training
        prefix = f"{name}." if name else ""
        for key, param in module._parameters.items():
            if prefix + key in wanted:
                made[id(module)]._parameters[key] = param
        for key, buffer in module._buffers.items():
            if prefix + key in wanted:
                made[id(module)]._buffers[key] = buffer
    for module in model.modules():
        for key, child in module._modules.items():
            made[id(module)]._modules[key] = None if child is None else made[id(child)]
    return {name: made[id(module)] for name, module in model.named_modules(remove_duplicate=False)}


@functools.cache
def _stand_in_class(base: Any) -> Callable[[], nn.Module]:
    """`_StandIn` under the name of a class, and an instance of it."""

    def init(self: nn.Module) -> None:
        nn.Module.__init__(self)

    namespace = {"__init__": init, "__module__": base.__module__}
    bare = {"__getattr__": nn.Module.__getattr__, "__setattr__": nn.Module.__setattr__}
    metaclass: Any = type(base)
    made: Callable[[], nn.Module] = metaclass(base.__name__, (_StandIn, base), namespace | bare)
    return made


def relocated(modules: dict[str, str], first: Bound, now: Bound) -> dict[str, str]:
    """Module id -> FQN; of another layer if that is the one whose parameters the graph reads."""
    moved: dict[str, str] = {}
    for (_, _, old), (_, _, new) in zip(first.names, now.names, strict=False):
        while old != new and old:
            old, new = old.rpartition(".")[0], new.rpartition(".")[0]
            moved.setdefault(old, new)
    if all(old == new for old, new in moved.items()):
        return modules
    known = set(modules.values())
    found = {}
    for key, fqn in modules.items():
        around = owner_of([fqn], moved)
        there = moved[around] + fqn[len(around) :] if around in moved else fqn
        found[key] = there if there in known else fqn
    return found


class GraphRun:
    """Runs a graph of Dynamo on what the trace gives, inside the calls of modules it came from."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        names: dict[str, str],
        stand_ins: dict[str, nn.Module],
        bound: Bound,
        copied: frozenset[int],
    ) -> None:
        self.graph_module: fx.GraphModule = graph_module
        self.names: dict[str, str] = names
        self.stand_ins: dict[str, nn.Module] = stand_ins
        self.bound: Bound = bound
        self.copied: frozenset[int] = copied
        self.written: frozenset[int] = frozenset()  # inputs to copy, found at the capture
        self.base: str = _base(graph_module, names)

    def __call__(self, rest: tuple[Any, ...]) -> Any:
        """Run the graph; returns its result, and new values of the inputs at `copied`."""
        work = [v.clone() if i in self.copied else v for i, v in enumerate(rest)]
        before = [_version(value) for value in work]
        wanted = [isinstance(v, Tensor) and v.requires_grad for v in rest]
        values = deque(work)
        where = {i: (kind, fqn) for i, kind, fqn in self.bound.names}
        inputs = []
        for i in range(len(self.bound.names) + len(work)):
            kind, fqn = where.get(i, ("", ""))
            if kind:
                path, _, key = fqn.rpartition(".")
                inputs.append(getattr(self.stand_ins[path], key))
            else:
                inputs.append(values.popleft())
        result = ReplayInterpreter(self, self.graph_module, (), inputs).result()
        written = {
            i
            for i, value in enumerate(work)
            if isinstance(value, Tensor)
            and _version(value) != before[i]
            and (wanted[i] or value.requires_grad)
            and i not in self.copied
        }
        if written:
            self.written = frozenset(written)
            names = ", ".join(map(str, sorted(written)))
            raise CaptureError(f"the graph writes into inputs that autograd follows: {names}")
        return result, [work[i] for i in sorted(self.copied)]

    def path(self, node: fx.Node) -> tuple[tuple[str, int], ...]:
        """The calls of modules that a node ran in: FQN and number, the outermost first."""
        found = [(self.names.get(key, ""), number) for key, number in dynamo.dynamo_modules(node)]
        inside = [(name, number) for name, number in found if name]
        return tuple([(self.base, 0), *inside] if self.base else inside)


def _version(value: Any) -> int:
    return autograd.version(value) if isinstance(value, Tensor) else 0


def _base(graph_module: fx.GraphModule, names: dict[str, str]) -> str:
    """FQN of the module whose forward the graph is a part of; "" is the root."""
    for node in graph_module.graph.nodes:
        for key, path in dynamo.dynamo_paths(node):
            name = names.get(key, "")
            if name and path and name.endswith(path):
                return name[: -len(path)].rstrip(".")
    return ""


class ReplayInterpreter(fx.Interpreter):
    """Runs a graph; the nodes of each call of a module inside a call of its stand-in.

    So the capture sees the calls that eager makes, and notes them
    (`fxshard.capture.provenance.calls_noted`). Without a `GraphRun`, nodes run without such calls.
    """

    def __init__(
        self,
        run: GraphRun | None,
        graph_module: nn.Module,
        prefix: tuple[tuple[str, int], ...],
        inputs: Sequence[Any],
    ) -> None:
        super().__init__(graph_module)
        self._run, self._prefix = run, prefix
        self.args_iter = iter(inputs)

    def result(self) -> Any:
        """Run all nodes; returns what the graph returns."""
        nodes = deque(self.graph.nodes)
        while nodes:
            self._calls(nodes, self._prefix)
            if nodes:  # of another call than the checkpoint around them: Dynamo does not say
                self._prefix = ()
        (output,) = self.graph.find_nodes(op="output")
        return self.env[output]

    def _calls(self, nodes: deque[fx.Node], prefix: tuple[tuple[str, int], ...]) -> None:
        """Run the first nodes as long as they belong to the calls `prefix`, or to calls inside."""
        while nodes:
            node = nodes[0]
            path = prefix if node.op in ("placeholder", "get_attr") else self._path(node)
            if node.op == "output":
                path = self._prefix
            if path[: len(prefix)] != prefix:
                return
            if path == prefix:
                self.env[nodes.popleft()] = self.run_node(node)
                continue
            inside = path[: len(prefix) + 1]
            assert self._run is not None
            self._run.stand_ins[inside[-1][0]](lambda inside=inside: self._calls(nodes, inside))

    def _path(self, node: fx.Node) -> tuple[tuple[str, int], ...]:
        return () if self._run is None else self._run.path(node)

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        restore = graphs.with_current_meta(provenance.GIVEN_LINE, dynamo.stack_line(n))
        try:
            if n.target is reading.parameter or n.target is reading.packet:
                return args[0]  # the unsharded parameter, which is passed in place of its handle
            if unwraps(n) and isinstance(args[0], float):
                return args[0]
            if n.target is checkpointing.checkpoint_operator():
                return self._checkpoint(args, kwargs, self._path(n))
            return getattr(self, n.op)(n.target, args, kwargs)
        finally:
            restore()

    def _checkpoint(self, args: Any, kwargs: Any, path: tuple[tuple[str, int], ...]) -> Any:
        """The user's checkpoint, for `checkpointing.checkpoints_inline` to see."""
        body, *operands = args
        context = checkpointing.checkpoint_context(body)

        def function(*inputs: Any) -> Any:
            return ReplayInterpreter(self._run, body, path, inputs).result()

        return checkpoint(function, *operands, use_reentrant=False, context_fn=context)


def unwraps(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"
