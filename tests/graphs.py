"""Programs written by hand in the grammar of `dump.text`, and a world that runs programs strictly.

A torch upgrade changes what capture makes, and so no golden may come from a capture. Here every
operator of forward and backward is in the text, and the module beside it is its eager reference.

One file because a program, its reference and the world that runs both change together.
"""

import copy
import dataclasses
import re
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from fxshard._torch import traced_collectives
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.capture import fakes
from fxshard.codegen.emit import Executor
from fxshard.config.precision import Precision
from fxshard.ir import ops, tags, transfers
from fxshard.ir.names import owner_of
from fxshard.ir.program import Fact, Program, Result, Signature
from fxshard.ir.units import Param, Unit, with_precision
from fxshard.runtime.world.in_process import REDUCE, InProcessWorld

_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "b8": torch.bool,
}
FULL = Precision()
BF16 = Precision(torch.bfloat16, torch.float32)
APART: dict[str, Any] = {"pack_bytes": 0}  # options: a collective has a buffer per parameter
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
    phase: tags.Phase = "forward"
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
            at: tags.Phase = "backward" if role == "tangent" else "forward"
            tags.put(env[name], tags.Meta(at, role, fqn=fqn), val)  # type: ignore[arg-type]
        else:
            name, target, arguments, tag = _CALL.fullmatch(line).groups()  # type: ignore[union-attr]
            env[name] = _call(graph, mode, env, name, target, arguments)
            tags.put(env[name], _tag(phase, (tag or "").split()))
    training = phase == "backward"
    tags.put(graph.output_node(), tags.Meta(phase, "output"))
    return Program(
        graph=graph,
        results=results,
        signature=_signature(graph, results, training),
        constants={},
        units=_units(graph, units, tied, frozen),
        world_size=world_size,
        fake_mode=mode,
    )


def _tag(phase: tags.Phase, words: Sequence[str]) -> tags.Meta:
    """Of an operator: its module's FQN, ``checkpoint=0``, ``call=0``, ``save``, if it is there."""
    numbers = {k: int(v) for k, eq, v in (word.partition("=") for word in words) if eq}
    fqns = [word for word in words if word != "save" and "=" not in word]
    return tags.Meta(
        phase,
        "compute",
        module=next(iter(fqns), ""),
        checkpoint=numbers.get("checkpoint"),
        save="save" in words,
        call=numbers.get("call"),
    )


def _call(
    graph: fx.Graph,
    mode: FakeTensorMode,
    env: dict[str, fx.Node],
    name: str,
    target: str,
    arguments: str,
) -> fx.Node:
    operator: Any = getitem if target == "getitem" else torch.ops
    for part in target.split(".") if target != "getitem" else ():
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
    roles = [(tags.get(n).role, tags.get(n).fqn) for n in graph.find_nodes(op="placeholder")]
    inputs = tuple(int(fqn or 0) for role, fqn in roles if role == "input")
    outputs = tuple(r.name for r in results if r.kind == "output")
    return Signature(
        in_spec=tree_flatten(((0,) * len(inputs), {}))[1],
        out_spec=tree_flatten((0,) * len(outputs))[1],
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
    params = [n for n in graph.find_nodes(op="placeholder") if tags.get(n).role == "param"]
    for position, node in enumerate(params):
        fqn, val = tags.get(node).fqn or "", node.meta["val"]
        aliases = next((names for names in tied if names[0] == fqn), (fqn,))
        owner = owner_of(aliases, kinds)
        members[owner].append(
            Param(
                fqn, aliases, tuple(val.shape), val.dtype, fqn not in frozen, index[owner], position
            )
        )
    return tuple(Unit(index[fqn], fqn, kind, tuple(members[fqn])) for fqn, kind in kinds.items())


def configured(
    program: Program,
    *,
    precision: Precision = FULL,
    reshard: bool | int | dict[str, bool | int] = True,
    ignored: Sequence[str] = (),
    columns: bool = False,
    **attributes: Any,
) -> Program:
    """`program`, which no pass has touched yet, with other settings.

    Args:
        program: computes in ``precision.param_dtype`` if there is one; what it stores is fp32 then.
        precision, reshard: of all its units; `reshard` also by FQN, and True of the others.
        ignored: FQNs of parameters that are not sharded.
        columns: matrices are sharded along dimension 1.
        attributes: of the program: ``replicas``, ``offloaded``, ``sync``, ...
    """
    for node in program.graph.find_nodes(op="placeholder"):
        if tags.get(node).role == "param" and tags.get(node).fqn in ignored:
            tags.update(node, role="ignored")
    units: list[Unit] = []
    for unit in program.units:
        params = unit.params
        if precision.param_dtype is not None:
            params = tuple(
                dataclasses.replace(p, dtype=torch.float32) if p.dtype.is_floating_point else p
                for p in params
            )
        if columns:
            params = tuple(dataclasses.replace(p, shard_dim=int(len(p.shape) > 1)) for p in params)
        out = tuple(p for p in params if p.fqn in ignored)
        params = tuple(p for p in params if p.fqn not in ignored)
        own = reshard.get(unit.fqn, True) if isinstance(reshard, dict) else reshard
        unit = dataclasses.replace(unit, params=params, ignored=out, reshard=own)
        units.append(with_precision(unit, precision))
    return dataclasses.replace(program, units=tuple(units), **attributes)


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


def layered(depth: int = 2, **settings: Any) -> Program:
    """`Layered`, by hand; `settings` as of `configured`."""

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
    return configured(parse(text, units, tied=[("embed.weight", "head.weight")]), **settings)


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


def chain(depth: int = 2, *, precision: Precision = FULL, **settings: Any) -> Program:
    """`Chain`, by hand, in the dtype of `precision`; `settings` as of `configured`."""
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
    names = {dtype: name for name, dtype in _DTYPES.items()}
    text = "\n".join(lines).replace("f32[", names[precision.param_dtype or torch.float32] + "[")
    program = parse(text, {"": "Chain"} | {f"layers.{i}": "Linear" for i in up})
    return configured(program, precision=precision, **settings)


_OF_ITS_OWN = """
%x : f32[2,4] = input 0
%w_0 : f32[4,4] = param layers.0.weight
%w_1 : f32[4,4] = param layers.1.weight
%dy : f32[2,4] = tangent 0
forward:
%a = aten.mm(%x, %w_0)  | layers.0
%gather = _c10d_functional.all_gather_into_tensor(%a, 2, '0')  | layers.0
%b = aten.tanh(%a)  | layers.0
%full = _c10d_functional.wait_tensor(%gather)  | layers.0
%h = aten.tanh(%full)  | layers.0
%c = aten.mm(%h, %w_1)  | layers.1
%scatter = _c10d_functional.reduce_scatter_tensor(%c, 'sum', 2, '0')  | layers.1
%mine = _c10d_functional.wait_tensor(%scatter)  | layers.1
%y = aten.mul.Tensor(%mine, %b)  | layers.1
backward:
%db = aten.mul.Tensor(%dy, %mine)  | layers.1
%dmine = aten.mul.Tensor(%dy, %b)  | layers.1
%rows = _c10d_functional.all_gather_into_tensor(%dmine, 2, '0')  | layers.1
%dc = _c10d_functional.wait_tensor(%rows)  | layers.1
%u = aten.t(%h)  | layers.1
%dw_1 = aten.mm(%u, %dc)  | layers.1
%v = aten.t(%w_1)  | layers.1
%dh = aten.mm(%dc, %v)  | layers.1
%total = _c10d_functional.all_reduce(%dh, 'avg', '0')  | layers.1
%summed = _c10d_functional.wait_tensor(%total)  | layers.1
%dfull = aten.tanh_backward(%summed, %h)  | layers.0
%dtanh = aten.tanh_backward(%db, %b)  | layers.0
%swap = _c10d_functional.all_to_all_single(%dfull, [2, 2], [2, 2], '1')  | layers.0
%swapped = _c10d_functional.wait_tensor(%swap)  | layers.0
%first = _c10d_functional.broadcast(%dtanh, 0, '1')  | layers.0
%copied = _c10d_functional.wait_tensor(%first)  | layers.0
%other = _c10d_functional.reduce_scatter_tensor(%swapped, 'max', 2, '0')  | layers.0
%da_0 = _c10d_functional.wait_tensor(%other)  | layers.0
%da = aten.add.Tensor(%da_0, %copied)  | layers.0
%t = aten.t(%x)  | layers.0
%dw_0 = aten.mm(%t, %da)  | layers.0
return %y (0), %dw_0 (layers.0.weight), %dw_1 (layers.1.weight)
"""


def of_its_own(**settings: Any) -> Program:
    """Two layers with collectives of each kind that the model calls itself, on two groups."""
    return with_groups(_OF_ITS_OWN, {"0": "tp", "1": "ep"}, **settings)


def along_the_sequence(**settings: Any) -> Program:
    """A layer whose input is gathered along the sequence, and whose output is reduced along it."""
    return with_groups(_ALONG_THE_SEQUENCE, {"0": "tp"}, **settings)


def with_groups(text: str, names: dict[str, str], **settings: Any) -> Program:
    """A program with functional collectives of two ranks, of the groups with these names."""
    units = {"": "Model", "layers.0": "Layer"} | (
        {"layers.1": "Layer"} if "layers.1" in text else {}
    )
    program = parse(text, units)
    fakes.correct(program)
    for node in filter(traced_collectives.is_collective, program.graph.nodes):
        name = str(node.args[-1])
        traced_collectives.note(node, traced_collectives.CollectiveRanks(name, names[name], 2))
    return configured(program, **settings)


_ALONG_THE_SEQUENCE = """
%x : f32[2,2,4] = input 0
%w : f32[4,4] = param layers.0.weight
%dy : f32[2,2,4] = tangent 0
forward:
%gather = _c10d_functional.all_gather_into_tensor(%x, 2, '0')  | layers.0
%every = _c10d_functional.wait_tensor(%gather)  | layers.0
%split = aten.split.Tensor(%every, 2)  | layers.0
%first = getitem(%split, 0)  | layers.0
%second = getitem(%split, 1)  | layers.0
%full = aten.cat([%first, %second], 1)  | layers.0
%flat = aten.view(%full, [8, 4])  | layers.0
%mm = aten.mm(%flat, %w)  | layers.0
%view = aten.view(%mm, [2, 4, 4])  | layers.0
%parts = aten.split.Tensor(%view, 2, 1)  | layers.0
%a = getitem(%parts, 0)  | layers.0
%b = getitem(%parts, 1)  | layers.0
%cat = aten.cat([%a, %b])  | layers.0
%scatter = _c10d_functional.reduce_scatter_tensor(%cat, 'sum', 2, '0')  | layers.0
%y = _c10d_functional.wait_tensor(%scatter)  | layers.0
backward:
%t = aten.t(%flat)  | layers.0
%rows = aten.cat([%dy, %dy], 1)  | layers.0
%dflat = aten.view(%rows, [8, 4])  | layers.0
%dw = aten.mm(%t, %dflat)  | layers.0
return %y (0), %dw (layers.0.weight)
"""


# -- running them ---------------------------------------------------------------------------------


class StrictWorld(InProcessWorld):
    """Moves data as late and destroys it as early as the program allows.

    What a launch writes is NaN until its wait, its inputs are read at the wait, and what is freed
    is NaN and stays it: a read at a wrong place shows in the result. What a launch reduces in place
    is read at once, and is NaN until its wait. If another writes to what a launch sends, its result
    is NaN. Random operators draw alike on all ranks. The user's comm hook averages over all ranks.
    """

    def __init__(self, size: int, replicas: int = 1) -> None:
        super().__init__(size, replicas)
        self._launched: dict[int | None, list[_Launched]] = {}
        self._gone: dict[int, torch.UntypedStorage] = {}  # by address; kept, so none comes twice

    def _run_row(self, row: fx.Node, envs: list[dict[fx.Node, Any]]) -> None:
        if ops.of(row).asynchronous:
            self._launched.setdefault(tags.get(row).pair, []).append(_launch(row, envs))
        elif row.target is ops.wait:
            for launched in self._launched.pop(tags.get(row).pair):
                self._finish(*launched)
        elif row.target is ops.free:
            for env in envs:
                for node in tags.operands(row):
                    storage = env[node].untyped_storage()
                    _ruin(env[node].new_empty(0).set_(storage))
                    self._gone[storage.data_ptr()] = storage
        elif traced_collectives.is_collective(row):
            self._run_functional(row, envs)
        elif row.target is traced_collectives.WAIT:
            for env in envs:
                env[row] = env[tags.source(row)]
        elif tags.is_random(row):
            state = torch.get_rng_state()
            for env in envs:
                torch.set_rng_state(state)
                super()._run_row(row, [env])
        else:
            super()._run_row(row, envs)

    def _run_functional(self, row: fx.Node, envs: list[dict[fx.Node, Any]]) -> None:
        """A functional collective of two neighbours."""
        name = row.target.overloadpacket.__name__  # type: ignore[union-attr]
        for pair in (envs[i : i + 2] for i in range(0, len(envs), 2)):
            sent = [env[tags.source(row)] for env in pair]
            if name == "all_to_all_single":
                parts = [tensor.split(row.args[2]) for tensor in sent]  # type: ignore[arg-type]
                results = [torch.cat(rows) for rows in zip(*parts, strict=True)]
            elif name == "broadcast":
                results = [sent[0].clone() for _ in pair]
            elif name == "all_gather_into_tensor":
                results = [torch.cat(sent) for _ in pair]
            else:
                total = REDUCE[str(row.args[1])](sent)
                scatters = name == "reduce_scatter_tensor"
                results = [total.chunk(2)[i] if scatters else total.clone() for i in range(2)]
            for env, result in zip(pair, results, strict=True):
                env[row] = result.clone()

    def _finish(
        self,
        launch: fx.Node,
        inputs: list[dict[fx.Node, Any]],
        before: list[dict[fx.Node, Any]],
        buffers: list[list[Tensor]],
    ) -> None:
        written = not all(map(_equal, inputs, before))
        if launch.target is ops.comm_hook:
            (flat,) = tags.operands(launch)
            total = _mean([env[flat] for env in inputs])
            for rank, env in enumerate(inputs):
                env[launch] = [total.chunk(self.size)[rank % self.size]]
        else:
            super()._run_row(launch, inputs)
        for env, mine in zip(inputs, buffers, strict=True):
            for buffer, result in zip(mine, env[launch], strict=True):
                if buffer.untyped_storage().data_ptr() not in self._gone:
                    buffer.copy_(result)
                    if written:
                        _ruin(buffer)


# A launch in flight, and per rank what it reads, what that was at first, and what it writes.
_Launched = tuple[fx.Node, list[dict[fx.Node, Any]], list[dict[fx.Node, Any]], list[list[Tensor]]]


def _launch(row: fx.Node, envs: list[dict[fx.Node, Any]]) -> _Launched:
    inputs = [{node: env[node] for node in tags.operands(row)} for env in envs]
    for env in envs:
        if transfers.is_in_place(row):
            env[row] = [env[node] for node in tags.operands(row)]
        else:
            values = row.meta["val"]
            env[row] = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in values]
    if transfers.is_in_place(row):
        inputs = [{node: value.clone() for node, value in mine.items()} for mine in inputs]
    for env in envs:
        for buffer in env[row]:
            _ruin(buffer)
    pair = tags.get(row).pair
    before = [{n: v.clone() for n, v in mine.items() if not _is_of(n, pair)} for mine in inputs]
    return row, inputs, before, [env[row] for env in envs]


def _ruin(tensor: Tensor) -> None:
    if tensor.dtype is torch.bool:
        tensor.fill_(True)
        return
    tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


def _is_of(node: fx.Node, pair: int | None) -> bool:
    """True if a launch of the same pair makes `node`: it comes before the wait."""
    return tags.get(node).pair == pair and tags.get(node).role == "unshard"


def _equal(now: dict[fx.Node, Tensor], before: dict[fx.Node, Tensor]) -> bool:
    return all(torch.equal(now[n].nan_to_num(), v.nan_to_num()) for n, v in before.items())


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
        tag, val = tags.get(node), node.meta["val"]
        fits = torch.randn(val.shape) if val.is_floating_point() else torch.ones(val.shape)
        role = "param" if tag.role == "ignored" else tag.role
        found[role, tag.fqn or ""] = fits.to(val.dtype)
    return found | accumulated_values(program)


def accumulated_values(program: Program) -> Values:
    """Gradients that steps before have left, in the dtype of the reduction."""
    found: Values = {}
    for fqn in sorted(program.accumulated):
        param = program.params[fqn]
        dtype = program.units[param.unit].precision.reduce_dtype or param.compute_dtype
        found["accumulated", fqn] = torch.randn(param.shape).to(dtype)
    return found


def eager(model: nn.Module, values: Values, *args: Any, **kwargs: Any) -> Found:
    """One step in plain PyTorch."""
    model = copy.deepcopy(model)
    torch.manual_seed(2)
    outputs = tree_flatten(model(*args, **kwargs))[0]
    tangents = [values["tangent", str(i)].to(out.dtype) for i, out in enumerate(outputs)]
    torch.autograd.backward(outputs, tangents)
    found: Found = {("output", str(i)): out.detach() for i, out in enumerate(outputs)}
    found |= {("grad", n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | {("buffer", n): b for n, b in model.named_buffers()}


def run(program: Program, values: Values, *, apart: bool = False) -> Found:
    """The same step by a program at any point of the pipeline, on a `StrictWorld`.

    By its graph, or by its schedule if it has one. Asserts that the ranks agree where they must,
    and takes the mean where they need not: so what insert-reduce shall bring about is known before.

    Args:
        program, values: the step.
        apart: each rank has gradients of its own: twice those of the rank before.
    """
    torch.manual_seed(2)
    world = StrictWorld(program.world_size, program.replicas)
    ranks = range(world.ranks)
    written = [
        {key: _of_rank(key, values, rank * apart) for key in values if key[0] in _WRITTEN}
        for rank in ranks
    ]

    def arguments(nodes: Sequence[fx.Node], rank: int, saved: Sequence[Tensor] = ()) -> list[Any]:
        kept = iter(saved)
        return [
            _argument(program, node, rank, rank * apart, values, written[rank])
            if tags.get(node).role in _GIVEN
            else next(kept)
            for node in nodes
        ]

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
    found: Found = {key: value for key, value in written[0].items() if key[0] == "buffer"}
    for i, result in enumerate(program.results):
        each = [mine[i] for mine in returned]
        kind = result.kind
        if kind == "grad" and result.name in program.params:
            if Fact.REDUCED_ONCE in program.facts:
                each = _put_together(program, each, result.name)
            else:
                each = [_added(program, result.name, g, written[r]) for r, g in enumerate(each)]
                kind = "grad" if program.sync else "accumulated"
        if kind == "output" or (result.name in program.params and _is_reduced(program)):
            for other in each[1:]:
                torch.testing.assert_close(other, each[0], rtol=0, atol=0, equal_nan=True)
        found[kind, result.name] = _mean(each)
    if Fact.REDUCED_ONCE in program.facts and not program.sync:
        for fqn in program.accumulated:
            key = ("accumulated", fqn)
            found[key] = _mean([mine[key] for mine in written])
    return found


_GIVEN = ("param", "shard", "ignored", "buffer", "input", "tangent", "accumulated")
_WRITTEN = ("buffer", "accumulated")  # by the program, in place


def _is_reduced(program: Program) -> bool:
    return Fact.REDUCED_ONCE in program.facts and program.sync


def _mean(ranks: Sequence[Tensor]) -> Tensor:
    """Exact where the ranks are equal."""
    return ranks[0] + torch.stack([value - ranks[0] for value in ranks]).mean(0)


def _put_together(program: Program, shards: list[Tensor], fqn: str) -> list[Tensor]:
    """The full gradient, as each replica has it."""
    size, param = program.world_size, program.params[fqn]
    dim = param.shard_dim
    starts = range(0, len(shards), size)
    full = (torch.cat(shards[start : start + size], dim) for start in starts)
    return [each.narrow(dim, 0, min(each.shape[dim], param.shape[dim])) for each in full]


def _added(program: Program, fqn: str, grad: Tensor, mine: Values) -> Tensor:
    """A rank's gradient, and what it has accumulated before."""
    return mine["accumulated", fqn] + grad if fqn in program.accumulated else grad


def _of_rank(key: tuple[str, str], values: Values, doublings: int) -> Tensor:
    factor = 2**doublings if key[0] in ("tangent", "accumulated") else 1
    return values[key] * factor


def _argument(
    program: Program,
    node: fx.Node,
    rank: int,
    doublings: int,
    values: Values,
    written: Values,
) -> Tensor:
    tag, dtype = tags.get(node), node.meta["val"].dtype
    name = tag.fqn or ""
    if tag.role in _WRITTEN:
        key = (tag.role, name)
        if key in written:
            written[key] = written[key].to(dtype)
        return written[key] if key in written else program.constants[name]
    if tag.role == "ignored":
        return values["param", name].to(dtype, copy=True)
    if tag.role != "shard":
        return _of_rank((tag.role, name), values, doublings).to(dtype, copy=True)
    full = values["param", name].to(dtype)
    layout = program.layouts[name]
    shard, mine = (
        full.new_zeros(layout.shard_numel),
        layout.rows_of(full, rank % program.world_size),
    )
    shard[: mine.numel()] = mine.flatten()
    return shard.view(layout.shard_shape)


def assert_same(ours: Found, theirs: Found, *, exact: bool, dtypes: bool = True) -> None:
    """The same outputs, gradients and buffers, each bit for bit or up to rounding."""
    assert ours.keys() == theirs.keys()
    for key in theirs:
        limits: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(
            ours[key],
            theirs[key],
            msg=lambda text, key=key: f"{key}: {text}",
            check_dtype=dtypes,
            **limits,
        )
