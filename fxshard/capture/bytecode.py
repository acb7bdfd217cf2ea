"""The last way to capture a call: let Dynamo read Python's bytecode, and trace the graph it finds.

It knows Python that runs through the tracer only as values, such as NumPy on tensors. Its graph is
called in place of the model; the joint trace of it is the same as of any other module.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fxshard._torch import checkpointing, dynamo, sizes, trees
from fxshard._torch import graphs as torch_graphs
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.capture import rng
from fxshard.capture.provenance import CALL, STACK
from fxshard.errors import CaptureError
from fxshard.ir.calls import Call

# FQN, number of a flat leaf, number of an output of the graph, the value itself.
Source = tuple[Literal["state", "input", "computed", "constant"], Any]


@dataclasses.dataclass(frozen=True)
class BytecodeGraph:
    """Dynamo's graph of one call, and how it takes the place of the model.

    Attributes:
        module: the graph.
        sources: per placeholder, where its value comes from.
        outputs: per flat leaf of what the model returns, where it comes from.
        out_spec: tree of what the model returns.
        replaced: name of each buffer that forward replaces -> number of the graph's output.
        calls: of modules, in order; the nodes of `module` name them in their stacks.
    """

    module: fx.GraphModule
    sources: tuple[Source, ...]
    outputs: tuple[Source, ...]
    out_spec: trees.TreeSpec
    replaced: dict[str, int]
    calls: tuple[Call, ...]

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``model(*args, **kwargs)`` returns, by way of the graph."""
        leaves, _ = trees.tree_flatten((args, kwargs))
        state = _state(model)
        held: dict[str, Any] = {"state": state, "input": leaves}
        given = [held[kind][which] if kind in held else which for kind, which in self.sources]
        held["computed"] = computed = _CheckpointInterpreter(self.module).run(*given)
        for name, number in self.replaced.items():
            path, _, key = name.rpartition(".")
            model.get_submodule(path)._buffers[key] = computed[number]
        out = [held[kind][which] if kind in held else which for kind, which in self.outputs]
        return trees.tree_unflatten(out, self.out_spec)

    def does_as(self, other: BytecodeGraph) -> bool:
        """True if `other`, read of the same call once more, computes the same of the same."""
        return self._said() == other._said()

    def _said(self) -> tuple[Any, ...]:
        graphs = [m.code for m in self.module.modules() if isinstance(m, fx.GraphModule)]
        sources, outputs = ([*map(_comparable, each)] for each in (self.sources, self.outputs))
        return graphs, sources, outputs, self.replaced


def _comparable(source: Source) -> Source:
    """The same of two readings: of what is made in each, such as a tensor, its class alone."""
    kind, what = source
    is_made = kind == "constant" and not isinstance(what, (bool, int, float, str, type(None)))
    return (kind, type(what)) if is_made else source


class _CheckpointInterpreter(fx.Interpreter):
    """Runs Dynamo's graph; the user's checkpoints in it for `checkpointing.checkpoints_inline` to
    see.
    """

    def run_node(self, n: fx.Node) -> Any:
        if n.target is checkpointing.checkpoint_operator():
            (body, *given), _ = self.fetch_args_kwargs_from_env(n)
            context = checkpointing.checkpoint_context(body)
            run = _CheckpointInterpreter(body).run
            return checkpoint(run, *given, use_reentrant=False, context_fn=context)
        marked = torch_graphs.current_meta().get("custom")  # what the node says replaces it
        if marked:
            n.meta["custom"] = {**n.meta.get("custom", {}), **marked}
        return super().run_node(n)


def _state(model: nn.Module) -> dict[str, Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def read(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode
) -> BytecodeGraph:
    """Dynamo's graph of ``model(*args, **kwargs)``, whose tensors are fakes of `mode`.

    Raises:
        CaptureError: the call makes several graphs, returns or keeps what is in none of them, or
            draws random numbers outside of PyTorch.
    """
    before = _state(model)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    leaves, _ = trees.tree_flatten((args, kwargs))
    where: dict[int, Source] = {id(leaf): ("input", i) for i, leaf in enumerate(leaves)}
    where |= {id(tensor): ("state", name) for name, tensor in reversed(before.items())}
    ran: list[tuple[fx.GraphModule, tuple[Any, ...], Sequence[Any]]] = []

    def backend(module: fx.GraphModule, _: Sequence[Any]) -> Any:
        def run(*given: Any) -> Any:
            assert mode.shape_env is not None
            with mode, mode.shape_env.ignore_fresh_unbacked_symbols():  # not used
                computed = module(*given)
            ran.append((module, given, computed))
            return computed

        return run

    outside = rng.Outside()
    out = dynamo.dynamo(model, args, kwargs, backend)
    drawn = outside.drawn() or ("numpy.random" if _draws_by_numpy(ran) else None)
    if drawn:
        outside.restore()
        raise rng.refusal(model, "the model", drawn)
    if len(ran) != 1:
        raise CaptureError(f"Dynamo made {len(ran)} graphs of the call, where one is needed.")
    ((module, given, computed),) = ran
    calls = _note_calls(module)
    numbers = {id(value): number for number, value in enumerate(computed)}
    found, out_spec = trees.tree_flatten(out)
    outputs: list[Source] = []
    for leaf in found:
        is_value = isinstance(leaf, (Tensor, *sizes.SYMBOLIC))
        if is_value and id(leaf) in numbers:
            outputs.append(("computed", numbers[id(leaf)]))
        elif is_value and id(leaf) in where:  # handed through: no output of the graph
            outputs.append(where[id(leaf)])
        elif isinstance(leaf, Tensor):
            raise CaptureError("the model returns a tensor that is not in Dynamo's graph.")
        else:
            outputs.append(("constant", leaf))
    replaced = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if buffer is not buffers.get(name):
            if id(buffer) not in numbers:
                raise CaptureError(f"buffer {name!r} is replaced by what is not in Dynamo's graph.")
            replaced[name] = numbers[id(buffer)]
    for name in replaced:
        path, _, key = name.rpartition(".")
        model.get_submodule(path)._buffers[key] = buffers[name]
    sources = tuple(where.get(id(value), ("constant", value)) for value in given)
    return BytecodeGraph(module, sources, tuple(outputs), out_spec, replaced, calls)


def _draws_by_numpy(ran: Sequence[tuple[fx.GraphModule, Any, Any]]) -> bool:
    """True if Dynamo has put torch's numbers in the place of numpy's (torch/_numpy/random.py)."""
    return any(
        getattr(getattr(node.target, "f", None), "__module__", "") == "torch._numpy.random"
        for module, *_ in ran
        for node in module.graph.nodes
    )


def _note_calls(module: fx.GraphModule) -> tuple[Call, ...]:
    """Write into each node's stack the FQNs of modules, and the call that it is made in.

    Dynamo names modules by the way to them from its frame, and numbers their calls.
    """
    calls: list[Call] = []
    known: dict[str, int] = {}
    counts: collections.Counter[str] = collections.Counter()
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes if node.op.startswith("call")):
        parent = None
        stack = node.meta.get(STACK) or {}
        for key, (path, cls) in stack.items():
            name = path.removeprefix("L['model']").removeprefix(".")
            stack[key] = name, cls
            if key not in known:
                known[key] = len(calls)
                calls.append(Call(name, counts[name], parent))
                counts[name] += 1
            parent = known[key]
        if stack:
            node.meta[STACK] = {**stack, CALL: (parent, Call)}
    return tuple(calls)
