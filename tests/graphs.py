"""Programs written by hand in the grammar of `dump.text`, and a world that runs programs strictly.

A torch upgrade changes what capture makes, and so no golden may come from a capture. Here every
operator of forward and backward is in the text, and the module beside it is its eager reference.
"""

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from fxshard import meta, ops
from fxshard.compat import FakeTensorMode
from fxshard.executor import Executor
from fxshard.program import Program, Result, Signature
from fxshard.units import Param, Unit, owner_of
from fxshard.world.in_process import InProcessWorld

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "i64": torch.int64, "b8": torch.bool}
_PLACEHOLDER = re.compile(r"%(\w+) : (\w+)\[([\d,]*)\] = (\w+) (\S+)")
_CALL = re.compile(r"%(\w+)(?: : \S+)? = ([\w.]+)\((.*?)\)(?:  \| (.+))?")
_VALUE = re.compile(r"%(\w+) \((\S+)\)")


def parse(
    text: str,
    units: dict[str, str],
    *,
    world_size: int = 2,
    tied: Sequence[tuple[str, ...]] = (),
    frozen: Sequence[str] = (),
) -> Program:
    """The program that no pass has touched yet.

    Placeholders say their type, operators do not: fake tensors know it. What is returned under a
    number is an output of the model, under an FQN or ``input[i]`` a gradient.

    Args:
        text: lines of `dump.text`: ``%name : f32[2,3] = role fqn``, ``%name = aten.op(...)  |
            module``, ``forward:``, ``backward:``, ``return %a (0), %b (fqn)``.
        units: FQN -> class name of each unit; the first is the root, "".
        tied: names that share one parameter; the first is the one in `text`.
        frozen: FQNs of parameters without gradient.
    """
    mode, graph = FakeTensorMode(), fx.Graph()
    env: dict[str, fx.Node] = {}
    results: list[Result] = []
    phase: meta.Phase = "forward"
    for line in filter(None, map(str.strip, text.splitlines())):
        if line in ("forward:", "backward:"):
            phase = "forward" if line == "forward:" else "backward"
        elif line.startswith("return "):
            returned = _VALUE.findall(line)
            graph.output(tuple(env[name] for name, _ in returned))
            results = [Result("output" if w.isdigit() else "grad", w) for _, w in returned]
        elif found := _PLACEHOLDER.fullmatch(line):
            name, dtype, shape, role, fqn = found.groups()
            env[name] = graph.placeholder(name)
            with mode:
                val = torch.empty([int(n) for n in shape.split(",") if n], dtype=_DTYPES[dtype])
            at: meta.Phase = "backward" if role == "tangent" else "forward"
            meta.put(env[name], meta.Meta(at, role, fqn=fqn), val)  # type: ignore[arg-type]
        else:
            name, target, arguments, tag = _CALL.fullmatch(line).groups()  # type: ignore[union-attr]
            env[name] = _call(graph, mode, env, name, target, arguments)
            meta.put(env[name], _tag(phase, (tag or "").split()))
    training = phase == "backward"
    meta.put(graph.output_node(), meta.Meta(phase, "output"))
    return Program(
        graph=graph,
        results=results,
        signature=_signature(graph, results, training),
        constants={},
        units=_units(graph, units, tied, frozen),
        world_size=world_size,
        fake_mode=mode,
    )


def _tag(phase: meta.Phase, words: Sequence[str]) -> meta.Meta:
    """Of an operator: its module's FQN, ``checkpoint=0``, ``save``, each if it is there."""
    numbers = [int(word.partition("=")[2]) for word in words if word.startswith("checkpoint=")]
    fqns = [word for word in words if word != "save" and "=" not in word]
    return meta.Meta(
        phase,
        "compute",
        module=next(iter(fqns), ""),
        checkpoint=next(iter(numbers), None),
        save="save" in words,
    )


def _call(
    graph: fx.Graph,
    mode: FakeTensorMode,
    env: dict[str, fx.Node],
    name: str,
    target: str,
    arguments: str,
) -> fx.Node:
    operator: Any = torch.ops
    for part in target.split("."):
        operator = getattr(operator, part)
    if target.count(".") == 1:
        operator = operator.default
    names: dict[str, Any] = {"torch": torch, "call": lambda *args, **kwargs: (args, kwargs)}
    args, kwargs = eval(f"call({arguments.replace('%', '')})", names, env)
    node = graph.create_node("call_function", operator, args, kwargs, name=name)
    with mode:
        val = operator(*_values(args), **_values(kwargs))
    node.meta["val"] = val
    return node


def _values(arguments: Any) -> Any:
    return fx.node.map_arg(arguments, lambda node: node.meta["val"])


def _signature(graph: fx.Graph, results: list[Result], training: bool) -> Signature:
    roles = [(meta.get(n).role, meta.get(n).fqn) for n in graph.find_nodes(op="placeholder")]
    inputs = tuple(int(fqn or 0) for role, fqn in roles if role == "input")
    outputs = tuple(r.name for r in results if r.kind == "output")
    empty = tree_flatten(((), {}))[1]
    return Signature(
        in_spec=empty,
        out_spec=empty,
        inputs=(None,) * len(inputs),
        tensor_inputs=inputs,
        outputs=(None,) * len(outputs),
        input_names=tuple(map(str, inputs)),
        output_names=outputs,
        tangents=tuple(int(fqn or 0) for role, fqn in roles if role == "tangent"),
        training=training,
    )


def _units(
    graph: fx.Graph,
    kinds: dict[str, str],
    tied: Sequence[tuple[str, ...]],
    frozen: Sequence[str],
) -> tuple[Unit, ...]:
    index = {fqn: i for i, fqn in enumerate(kinds)}
    members: dict[str, list[Param]] = {fqn: [] for fqn in kinds}
    params = [n for n in graph.find_nodes(op="placeholder") if meta.get(n).role == "param"]
    for position, node in enumerate(params):
        fqn, val = meta.get(node).fqn or "", node.meta["val"]
        aliases = next((names for names in tied if names[0] == fqn), (fqn,))
        owner = owner_of(aliases, kinds)
        members[owner].append(
            Param(
                fqn, aliases, tuple(val.shape), val.dtype, fqn not in frozen, index[owner], position
            )
        )
    return tuple(Unit(index[fqn], fqn, kind, tuple(members[fqn])) for fqn, kind in kinds.items())


# -- programs -------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer with a bias, a parameter whose gradient is an activation's, a mask, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.shift = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
        mask = (tokens > 1).unsqueeze(1)
        y = torch.tanh(F.linear(x + self.shift, self.weight, self.bias))
        return (y * torch.rand_like(scale)).masked_fill(mask, 0.5)


class Layered(nn.Module):
    """Layers between an embedding of 5 rows, uneven over 2 ranks, and a head tied to it."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, tokens, self.scale)
        return self.head(x)


_LAYER_PARAMS = """
%weight_I : f32[4,4] = param layers.I.weight
%bias_I : f32[4] = param layers.I.bias
%shift_I : f32[4,4] = param layers.I.shift
"""
_LAYER_FORWARD = """
%large_I = aten.gt.Scalar(%tokens, 1)  | layers.I
%mask_I = aten.unsqueeze(%large_I, 1)  | layers.I
%h_I = aten.add.Tensor(%x_I, %shift_I)  | layers.I
%t_I = aten.t(%weight_I)  | layers.I
%linear_I = aten.addmm(%bias_I, %h_I, %t_I)  | layers.I
%tanh_I = aten.tanh(%linear_I)  | layers.I
%kept_I = aten.detach(%tanh_I)  | layers.I
%noise_I = aten.rand_like(%scale)  | layers.I
%mul_I = aten.mul.Tensor(%tanh_I, %noise_I)  | layers.I
%x_J = aten.masked_fill.Scalar(%mul_I, %mask_I, 0.5)  | layers.I
"""
_LAYER_BACKWARD = """
%dmul_I = aten.masked_fill.Scalar(%dx_J, %mask_I, 0)  | layers.I
%dtanh_I = aten.mul.Tensor(%dmul_I, %noise_I)  | layers.I
%read_I = aten.detach(%kept_I)  | layers.I
%dlinear_I = aten.tanh_backward(%dtanh_I, %read_I)  | layers.I
%u_I = aten.t(%t_I)  | layers.I
%dx_I = aten.mm(%dlinear_I, %u_I)  | layers.I
%dt_I = aten.t(%dlinear_I)  | layers.I
%dweight_I = aten.mm(%dt_I, %h_I)  | layers.I
%dbias_I = aten.sum.dim_IntList(%dlinear_I, [0])  | layers.I
"""
_LAYERED = """
%tokens : i64[4] = input 0
%scale : f32[4,1] = buffer scale
%embed : f32[5,4] = param embed.weight
PARAMS
%dy : f32[4,5] = tangent 0
forward:
%x_0 = aten.embedding(%embed, %tokens)  | embed
FORWARD
%t_head = aten.t(%embed)  | head
%y = aten.mm(%x_N, %t_head)  | head
backward:
%dt_head = aten.t(%dy)  | head
%dhead = aten.mm(%dt_head, %x_N)  | head
%u_head = aten.t(%t_head)  | head
%dx_N = aten.mm(%dy, %u_head)  | head
BACKWARD
%dembed = aten.embedding_dense_backward(%dx_0, %tokens, 5, -1, False)  | embed
%dtied = aten.add.Tensor(%dhead, %dembed)  | embed
return %y (0), %dtied (embed.weight)GRADS
"""


def layered(depth: int = 2) -> Program:
    """`Layered`, by hand."""

    def each(template: str, layers: Sequence[int]) -> str:
        return "".join(
            re.sub(r"(?<=_)J\b", str(i + 1), re.sub(r"(?<=[_.])I\b", str(i), template))
            for i in layers
        )

    up = range(depth)
    text = _LAYERED.replace("_N", f"_{depth}")
    text = text.replace("PARAMS", each(_LAYER_PARAMS, up))
    text = text.replace("FORWARD", each(_LAYER_FORWARD, up))
    text = text.replace("BACKWARD", each(_LAYER_BACKWARD, up[::-1]))
    grads = (f", %d{name}_{i} (layers.{i}.{name})" for i in up for name in ("weight", "bias"))
    shifts = (f", %dx_{i} (layers.{i}.shift)" for i in up)
    text = text.replace("GRADS", "".join([*grads, *shifts]))
    units = {"": "Layered"} | {f"layers.{i}": "Layer" for i in up}
    return parse(text, units, tied=[("embed.weight", "head.weight")])


class Chain(nn.Module):
    """Matrix products in a row, the smallest model with units: ``layers.<i>`` and the root."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(depth))
        self.head = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ self.head


def chain(depth: int = 2) -> Program:
    """`Chain`, by hand."""
    up = range(depth)
    params = (f"%w_{i} : f32[4,4] = param layers.{i}.weight" for i in up)
    forward = (
        f"""%t_{i} = aten.t(%w_{i})  | layers.{i}
        %mm_{i} = aten.mm(%x_{i}, %t_{i})  | layers.{i}
        %x_{i + 1} = aten.tanh(%mm_{i})"""
        for i in up
    )
    backward = (
        f"""%dmm_{i} = aten.tanh_backward(%dx_{i + 1}, %x_{i + 1})
        %dt_{i} = aten.t(%dmm_{i})  | layers.{i}
        %dw_{i} = aten.mm(%dt_{i}, %x_{i})  | layers.{i}
        """
        + (f"%dx_{i} = aten.mm(%dmm_{i}, %w_{i})  | layers.{i}" if i else "")
        for i in up[::-1]
    )
    grads = "".join(f", %dw_{i} (layers.{i}.weight)" for i in up)
    lines = (
        "%x_0 : f32[2,4] = input 0",
        *params,
        "%head : f32[4,3] = param head",
        "%dy : f32[2,3] = tangent 0",
        "forward:",
        *forward,
        f"%y = aten.mm(%x_{depth}, %head)",
        "backward:",
        f"%xt = aten.t(%x_{depth})",
        "%dhead = aten.mm(%xt, %dy)",
        "%ht = aten.t(%head)",
        f"%dx_{depth} = aten.mm(%dy, %ht)",
        *backward,
        f"return %y (0){grads}, %dhead (head)",
    )
    return parse("\n".join(lines), {"": "Chain"} | {f"layers.{i}": "Linear" for i in up})


# -- running them ---------------------------------------------------------------------------------


class StrictWorld(InProcessWorld):
    """Moves data as late and destroys it as early as the program allows.

    What a launch writes is NaN until its wait, its inputs are read at the wait, and what is freed
    is NaN: a read at a wrong place shows in the result. Random operators draw alike on all ranks.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._launched: dict[int | None, tuple[fx.Node, list[dict[fx.Node, Any]], list[Any]]] = {}

    def _run_row(self, row: fx.Node, envs: list[dict[fx.Node, Any]]) -> None:
        if row.target in ops.ASYNCHRONOUS:
            inputs = [{node: env[node] for node in meta.operands(row)} for env in envs]
            for env in envs:
                env[row] = [torch.full(v.shape, torch.nan, dtype=v.dtype) for v in row.meta["val"]]
            self._launched[meta.get(row).pair] = (row, inputs, [env[row] for env in envs])
        elif row.target is ops.wait:
            launch, inputs, buffers = self._launched.pop(meta.get(row).pair)
            super()._run_row(launch, inputs)
            for env, mine in zip(inputs, buffers, strict=True):
                for buffer, result in zip(mine, env[launch], strict=True):
                    buffer.copy_(result)
        elif row.target is ops.free:
            for env in envs:
                for node in meta.operands(row):
                    storage = env[node].untyped_storage()
                    env[node].new_empty(0).set_(storage).fill_(torch.nan)
        elif meta.is_random(row):
            state = torch.get_rng_state()
            for env in envs:
                torch.set_rng_state(state)
                super()._run_row(row, [env])
        else:
            super()._run_row(row, envs)


Values = dict[tuple[str, str], Tensor]  # (role, FQN or position) -> what goes in
Found = dict[tuple[str, str], Tensor]  # (kind, name) -> output, gradient, or buffer afterwards


def values_of(model: nn.Module, *args: Any, **kwargs: Any) -> Values:
    """What goes into a program of `model`: its state, a batch, and gradients for its outputs."""
    found: Values = {("param", name): p.detach() for name, p in model.named_parameters()}
    found |= {("buffer", name): b for name, b in model.named_buffers()}
    flat = enumerate(tree_flatten((args, kwargs))[0])
    found |= {("input", str(i)): leaf for i, leaf in flat if isinstance(leaf, Tensor)}
    torch.manual_seed(1)
    outputs = enumerate(tree_flatten(copy.deepcopy(model)(*args, **kwargs))[0])
    return found | {("tangent", str(i)): torch.randn_like(out) for i, out in outputs}


def random_values(program: Program) -> Values:
    """Anything that fits the placeholders of a program that no pass has touched."""
    found: Values = {}
    torch.manual_seed(1)
    for node in program.graph.find_nodes(op="placeholder"):
        tag, val = meta.get(node), node.meta["val"]
        fits = torch.randn(val.shape) if val.is_floating_point() else torch.ones(val.shape)
        found[tag.role, tag.fqn or ""] = fits.to(val.dtype)
    return found


def eager(model: nn.Module, values: Values, *args: Any, **kwargs: Any) -> Found:
    """One step in plain PyTorch."""
    model = copy.deepcopy(model)
    torch.manual_seed(2)
    outputs = tree_flatten(model(*args, **kwargs))[0]
    tangents = [values["tangent", str(i)] for i in range(len(outputs))]
    torch.autograd.backward(outputs, tangents)
    found: Found = {("output", str(i)): out.detach() for i, out in enumerate(outputs)}
    found |= {("grad", n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | {("buffer", n): b for n, b in model.named_buffers()}


def run(program: Program, values: Values) -> Found:
    """The same step by a program at any point of the pipeline, on a `StrictWorld`.

    By its graph, or by its schedule if it has one. Asserts that the ranks agree.
    """
    torch.manual_seed(2)
    world = StrictWorld(program.world_size)
    buffers = [
        {name: value.clone() for (role, name), value in values.items() if role == "buffer"}
        for _ in range(world.size)
    ]

    def arguments(nodes: Sequence[fx.Node], rank: int, saved: Sequence[Tensor] = ()) -> list[Any]:
        kept = iter(saved)
        return [
            _argument(program, meta.get(node), rank, values, buffers[rank])
            if meta.get(node).role in ("param", "shard", "buffer", "input", "tangent")
            else next(kept)
            for node in nodes
        ]

    ranks = range(world.size)
    if program.schedule is None:
        graph = fx.Graph()  # a copy: the world expects the users of a node in order of execution
        graph.output(graph.graph_copy(program.graph, {})).meta = program.output.meta
        names = graph.find_nodes(op="placeholder")
        returned = world.run(graph, {}, set(), [arguments(names, rank) for rank in ranks])
    else:
        executor = Executor(program, world)
        outputs, saved = executor.forward([arguments(executor.forward_inputs, r) for r in ranks])
        returned = [outputs for _ in ranks]
        if program.schedule.backward is not None:
            names = executor.backward_inputs
            grads = executor.backward([arguments(names, r, saved[r]) for r in ranks])
            returned = [[*outputs, *mine] for mine in grads]
    found: Found = {("buffer", name): value for name, value in buffers[0].items()}
    for i, (value, result) in enumerate(zip(program.values, program.results, strict=True)):
        each = [mine[i] for mine in returned]
        if meta.get(value).role == "reduce":
            each = [torch.cat(each)[: program.params[result.name].shape[0]]]
        for other in each[1:]:
            torch.testing.assert_close(other, each[0], rtol=0, atol=0, equal_nan=True)
        found[result.kind, result.name] = each[0]
    return found


def _argument(
    program: Program, tag: meta.Meta, rank: int, values: Values, buffers: dict[str, Tensor]
) -> Tensor:
    name = tag.fqn or ""
    if tag.role == "buffer":
        return buffers[name] if name in buffers else program.constants[name]
    if tag.role != "shard":
        return values[tag.role, name].clone()
    whole, param = values["param", name], program.params[name]
    shard = whole.new_zeros(param.chunk(program.world_size))
    rows = param.rows(rank, program.world_size)
    shard[: len(rows)] = whole[rows.start : rows.stop]
    return shard


def assert_same(ours: Found, theirs: Found, *, exact: bool) -> None:
    """The same outputs, gradients and buffers, each bit for bit or up to rounding."""
    assert ours.keys() == theirs.keys()
    for key in theirs:
        limits: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(
            ours[key], theirs[key], msg=lambda text, key=key: f"{key}: {text}", **limits
        )
