"""Model -> joint graph: one ATen graph of forward and backward, every node tagged.

The capture is AOTAutograd's joint export of the `nn.Module` itself, under fake tensors, with no
export or Dynamo before it: hooks, checkpointing and custom autograd functions run as in eager.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fxshard import compat, hf, meta
from fxshard.compat import FakeTensorMode
from fxshard.errors import CaptureError
from fxshard.program import Program, Result, Signature
from fxshard.units import Unit

log = logging.getLogger("fxshard")
aten = torch.ops.aten

# Operators whose result does not depend on the values of what they read, or says so.
CUTS_GRADIENT = (
    *(aten.detach.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
    *(aten.new_empty.default, aten.empty_like.default, aten.full_like.default),
    *(aten.zeros_like.default, aten.ones_like.default, aten.rand_like.default),
    aten.randn_like.default,
)

# What may stand in a call or a result beside tensors: a constant of the program.
PLAIN = (
    *(bool, int, float, complex, str, bytes, types.NoneType, enum.Enum, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType),
)


def as_module(model: Any) -> nn.Module:
    """The `nn.Module` behind what the user may hand us.

    Raises:
        CaptureError: `model` is neither an nn.Module, a GraphModule nor an ExportedProgram.
    """
    if isinstance(model, torch.export.ExportedProgram):
        return model.module(check_guards=False)
    if isinstance(model, nn.Module):
        return model
    raise CaptureError(
        f"expected an nn.Module, a torch.fx.GraphModule or a torch.export.ExportedProgram, "
        f"got {type(model).__name__}."
    )


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    units: tuple[Unit, ...],
    world_size: int,
    training: bool,
) -> Program:
    """Trace one call of `model` into a Program that no pass has touched yet.

    Parameters may be real, meta, fake or sharded (DTensor); the trace sees whole fake ones.
    Outputs that backward starts from ("tangents"): the scalar outputs that need a gradient (a
    loss) if there are any, else every output that needs one.

    Args:
        model: the module; left exactly as it was, also when the capture fails.
        args, kwargs: an example call; only shapes, dtypes and non-tensor values matter.
        units: the units of `model`, for the Program.
        world_size: number of shards, for the Program.
        training: trace backward too.

    Raises:
        CaptureError: Python control flow depends on data, a trainable parameter lost its
            gradient, or torch refused the graph; names the line of the user's code.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    leaves, in_spec = compat.tree_flatten_with_path((args, kwargs))
    flat = [leaf for _, leaf in leaves]
    names = tuple(_input_name(path) for path, _ in leaves)
    _refuse_opaque(names, flat, "argument")
    positions = tuple(i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor))
    fakes = tuple(_fake_like(flat[i], fake_mode) for i in positions)
    call = _Call(model, flat, in_spec, positions, training)
    with _fake_state(model, fake_mode), _module_stack(model):
        graph_module, sources, targets = _export(call, fakes)
    signature = Signature(
        in_spec=in_spec,
        out_spec=call.out_spec,
        inputs=tuple(None if i in positions else leaf for i, leaf in enumerate(flat)),
        tensor_inputs=positions,
        outputs=call.out_constants,
        input_names=names,
        output_names=call.out_names,
        tangents=call.tangents,
        training=training,
        differentiable=call.differentiable,
    )
    program = Program(
        graph=graph_module.graph,
        results=[],
        signature=signature,
        constants={},
        units=units,
        world_size=world_size,
        fake_mode=fake_mode,
    )
    _tag_placeholders(program, sources)
    hf.refuse_packed(program.graph)
    _lift_constants(program, graph_module)
    _tag_compute(program, training)
    _set_results(program, targets, call)
    _merge_tied(program)
    _check_gradients(program, model)
    return program


class _Call(nn.Module):
    """Calls the user's model on flat tensors; returns flat tensors, then new values of buffers.

    A buffer that forward replaces by another tensor (``self.seen = self.seen + 1``) is an output
    too, so that it can be written back as one that is changed in place is.

    Each output passes an ``_unsafe_view`` of its own shape, so that AOTAutograd treats an output
    that is a view as an output and not as a base to rebuild; canonicalize removes it again.
    """

    def __init__(
        self,
        model: nn.Module,
        flat: list[Any],
        in_spec: Any,
        positions: tuple[int, ...],
        grad: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.flat, self.in_spec, self.positions, self.grad = list(flat), in_spec, positions, grad
        self.autocast = _autocast(model)
        self.out_spec: Any = None
        self.out_names: tuple[str, ...] = ()
        self.out_constants: tuple[tuple[Any] | None, ...] = ()
        self.differentiable: tuple[int, ...] = ()
        self.tangents: tuple[int, ...] = ()
        self.replaced: tuple[str, ...] = ()

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        flat = list(self.flat)
        for i, tensor in zip(self.positions, tensors, strict=True):
            flat[i] = tensor
        args, kwargs = compat.tree_unflatten(flat, self.in_spec)
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with self.autocast:
            if isinstance(self.model, fx.GraphModule):
                out = _interpret(self.model, args, kwargs)
            else:
                out = self.model(*args, **kwargs)
        paths, self.out_spec = compat.tree_flatten_with_path(out)
        values = [value for _, value in paths]
        self.out_names = tuple(_path_name(path) or "output" for path, _ in paths)
        _refuse_opaque(self.out_names, values, "output")
        is_tensor = [isinstance(value, torch.Tensor) for value in values]
        wants = [i for i, v in enumerate(values) if is_tensor[i] and v.requires_grad and self.grad]
        scalars = [i for i in wants if values[i].dim() == 0]
        self.differentiable = tuple(wants)
        self.tangents = tuple(scalars or wants)
        self.out_constants = tuple(
            None if is_tensor[i] else (value,) for i, value in enumerate(values)
        )
        replaced = _replaced(buffers, dict(self.model.named_buffers(remove_duplicate=False)))
        self.replaced = tuple(replaced)
        outputs = [
            v if i in self.tangents else v.detach() for i, v in enumerate(values) if is_tensor[i]
        ]
        outputs += [value.detach() for value in replaced.values()]
        return [aten._unsafe_view(output, output.shape) for output in outputs]


def _interpret(model: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a GraphModule node by node, so that new nodes inherit each node's module stack."""
    interpreter = fx.Interpreter(model)
    if compat.takes_flat_inputs(model.graph):
        flat, _ = compat.tree_flatten((args, kwargs))
        out = interpreter.run(*flat, enable_io_processing=False)
        return model.graph.process_outputs(out)
    names = [node.target for node in model.graph.find_nodes(op="placeholder")]
    rest = [kwargs[name] for name in names[len(args) :] if name in kwargs]
    return interpreter.run(*args, *rest)


def _autocast(model: nn.Module) -> torch.autocast:
    """The autocast that the call runs under. Its cache of casts is off: it would outlive fakes."""
    device = next((p.device.type for p in model.parameters()), "cpu").replace("meta", "cpu")
    return torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,
    )


def _replaced(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Buffers that are another tensor after forward than before it.

    Raises:
        CaptureError: one is new, gone, or of another shape, dtype or device.
    """
    for name in sorted(before.keys() ^ after.keys()):
        raise CaptureError(
            f"buffer {name!r} {'appears' if name in after else 'disappears'} during forward, which "
            f"a traced program cannot repeat. Register it with its shape in __init__."
        )
    replaced = {name: value for name, value in after.items() if value is not before[name]}
    for name, new in replaced.items():
        old = before[name]
        if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            raise CaptureError(
                f"buffer {name!r} is replaced during forward by another kind of tensor: "
                f"{list(old.shape)} {old.dtype} becomes {list(new.shape)} {new.dtype}, which a "
                f"traced program cannot repeat. Give it its final shape in __init__."
            )
    return replaced


def _refuse_opaque(names: tuple[str, ...], values: list[Any], what: str) -> None:
    """Raise CaptureError for an object that may hold tensors out of our sight."""
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, (torch.Tensor, *PLAIN)):
            raise CaptureError(
                f"{what} {name} is a {type(value).__name__}, which fxshard cannot look into for "
                f"tensors. Use tensors and plain values, and dicts, lists, tuples and dataclasses "
                f"of them.{hf.remedy(value)}"
            )


def _export(
    call: _Call, fakes: tuple[torch.Tensor, ...]
) -> tuple[fx.GraphModule, list[Any], list[Any]]:
    try:
        with (
            torch.set_grad_enabled(call.grad),
            torch.autocast(call.autocast.device, enabled=False),
            compat.compiling(),
            hf.eager_attention_branch(),
            torch.fx.traceback.preserve_node_meta(),
        ):
            return compat.export_joint(call, fakes)
    except compat.DATA_DEPENDENT_ERRORS as error:
        raise CaptureError(
            f"{type(call.model).__name__} cannot be traced: Python control flow or a shape depends "
            f"on the values of a tensor, at\n{_user_line(error)}\nMake it a tensor operation "
            f"(torch.where, masking), or compute it outside the model and pass it in."
        ) from error
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(call.model).__name__} cannot be traced ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}), at\n{_user_line(error)}"
        ) from error


def _user_line(error: BaseException) -> str:
    """The innermost frame of the traceback that is not inside torch or fxshard."""
    own = {str(Path(__file__).resolve().parent), str(Path(torch.__file__).resolve().parent)}
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None:
        chain.append(current)
        current = current.__cause__ or current.__context__
    for failure in reversed(chain):
        for frame in reversed(traceback.extract_tb(failure.__traceback__)):
            path = str(Path(frame.filename).resolve())
            if not any(path.startswith(folder) for folder in own) and "<" not in frame.filename:
                where = f'File "{frame.filename}", line {frame.lineno}, in {frame.name}'
                return f"  {where}\n    {frame.line}"
    return "  (no line of user code in the traceback)"


@contextlib.contextmanager
def _module_stack(model: nn.Module) -> Iterator[None]:
    """Write ``nn_module_stack`` from global forward hooks while the block runs.

    Patching ``Module.__call__`` would be bypassed by modules that call ``forward``'s siblings
    directly; hooks fire wherever modules are called.
    """
    names = {id(module): name for name, module in model.named_modules()}
    restores: list[Any] = []
    stack: list[dict[str, Any]] = [{}]

    def enter(module: nn.Module, args: Any) -> None:
        name = names.get(id(module))
        if name is None:
            restores.append(None)
            return
        stack.append({**stack[-1], name: (name, type(module))})
        restores.append(compat.with_current_meta("nn_module_stack", stack[-1]))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        restore = restores.pop()
        if restore is not None:
            stack.pop()
            restore()

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _fake_state(model: nn.Module, fake_mode: FakeTensorMode) -> Iterator[None]:
    """Replace every parameter and buffer by a whole fake one; put all modules back afterwards."""
    before = [(module, _snapshot(module)) for module in model.modules()]
    made: dict[int, torch.Tensor] = {}
    try:
        for module in model.modules():
            both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for slots in both:
                for name, tensor in slots.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        fake: torch.Tensor = _fake_like(tensor, fake_mode)
                        if isinstance(tensor, nn.Parameter):
                            fake = nn.Parameter(fake, tensor.requires_grad)
                        made[id(tensor)] = fake
                    slots[name] = made[id(tensor)]
        yield
        for module, snapshot in before:
            for name in _assigned(module, snapshot):
                log.warning(
                    "fxshard: forward of %s assigns self.%s; the traced program repeats what it "
                    "computes, not the assignment.",
                    type(module).__name__,
                    name,
                )
    finally:
        for module, snapshot in before:
            _restore(module, snapshot)


def _snapshot(module: nn.Module) -> dict[str, Any]:
    return {k: (v, dict(v) if isinstance(v, dict) else None) for k, v in module.__dict__.items()}


def _assigned(module: nn.Module, snapshot: dict[str, Any]) -> list[str]:
    """Public attributes of `module` that are not what they were."""
    absent = (object(), None)
    return [
        name
        for name, value in module.__dict__.items()
        if not name.startswith("_") and snapshot.get(name, absent)[0] is not value
    ]


def _restore(module: nn.Module, snapshot: dict[str, Any]) -> None:
    """Put `__dict__` back in place: dicts keep their identity, others may share them."""
    for key in set(module.__dict__) - set(snapshot):
        del module.__dict__[key]
    for key, (value, items) in snapshot.items():
        if items is not None:
            value.clear()
            value.update(items)
        module.__dict__[key] = value


def _fake_like(tensor: torch.Tensor, fake_mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor with a storage of its own. Meta tensors become CPU ones; DTensors are whole."""
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    with fake_mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if not isinstance(tensor, nn.Parameter):
        fake.requires_grad_(tensor.requires_grad)
    return fake


def _path_name(path: tuple[Any, ...]) -> str:
    return "".join(str(key) for key in path).lstrip(".")


def _input_name(path: tuple[Any, ...]) -> str:
    """``args[0]``, ``kwargs['labels']``: the place of a flat input in the user's call."""
    return ("args", "kwargs")[path[0].idx] + _path_name(path[1:])


def _fqn(target: str) -> str:
    return target.removeprefix("model.")


def _tag_placeholders(program: Program, sources: list[Any]) -> None:
    """Tag placeholders by their descriptor, never by their position.

    The trace numbers tensors; inputs and outputs are known by their flat position in the call.
    """
    positions = program.signature.tensor_inputs
    where = program.signature.tensor_outputs
    first = {alias: p.fqn for p in program.params.values() for alias in p.aliases}
    for node, desc in zip(program.graph.find_nodes(op="placeholder"), sources, strict=True):
        kind, source = compat.input_source(desc)
        if kind == "param":
            meta.put(node, meta.Meta("forward", "param", fqn=first[_fqn(source)]))
        elif kind == "buffer":
            meta.put(node, meta.Meta("forward", "buffer", fqn=_fqn(source)))
        elif kind == "input":
            meta.put(node, meta.Meta("forward", "input", fqn=f"{positions[source]}"))
        elif kind == "tangent":
            meta.put(node, meta.Meta("backward", "tangent", fqn=str(where[source[1]])))
        else:
            raise CaptureError(
                f"the traced graph has an input that fxshard does not know: {source}"
            )


def _lift_constants(program: Program, graph_module: fx.GraphModule) -> None:
    """Tensors that the model holds outside of parameters and buffers become placeholders."""
    placeholders = list(program.graph.find_nodes(op="placeholder"))
    for node in list(program.graph.find_nodes(op="get_attr")):
        value = getattr(graph_module, str(node.target))
        if str(node.target) not in program.constants:
            program.constants[str(node.target)] = value
            with program.graph.inserting_after(placeholders[-1]):
                lifted = program.graph.placeholder(str(node.target))
            placeholders.append(lifted)
            tag = meta.Meta("forward", "buffer", fqn=str(node.target))
            meta.put(lifted, tag, _fake_like(value, program.fake_mode))
        target = next(n for n in placeholders if n.target == str(node.target))
        node.replace_all_uses_with(target)
        program.graph.erase_node(node)


def _tag_compute(program: Program, training: bool) -> None:
    """Give every operator its phase and its module, once and for all later readers.

    Backward nodes carry the forward module of the autograd node that ran them. Sums of gradients
    (where a value had several uses) carry none: they take that of the node before them.
    """
    modules: dict[str, str] = {"forward": "", "backward": ""}
    phase: meta.Phase = "forward"
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward"):
            phase = "backward"
        key = "nn_module_stack" if phase == "forward" else "fwd_nn_module_stack"
        stack = node.meta.get(key) or node.meta.get("nn_module_stack")
        if stack:
            modules[phase] = list(stack.values())[-1][0]
        meta.put(node, meta.Meta(phase, "compute", module=modules[phase]))
    meta.put(program.output, meta.Meta("backward" if training else "forward", "output"))


def _set_results(program: Program, targets: list[Any], call: _Call) -> None:
    """Name the outputs; write mutated buffers back at the end of forward."""
    first = {alias: p.fqn for p in program.params.values() for alias in p.aliases}
    where = program.signature.tensor_outputs
    values = program.values
    holders = {
        (meta.get(n).role, meta.get(n).fqn): n for n in program.graph.find_nodes(op="placeholder")
    }
    kept: list[fx.Node] = []
    mutated: list[tuple[fx.Node, fx.Node]] = []
    for value, desc in zip(values, targets, strict=True):
        kind, source = compat.output_source(desc)
        if kind == "output" and source >= len(where):
            holder = holders[("buffer", call.replaced[source - len(where)])]
            mutated.append((holder, value))
        elif kind == "output":
            program.results.append(Result("output", str(where[source])))
            kept.append(value)
        elif kind == "grad" and value is not None:
            what, name = source
            _refuse_sparse(name, value)
            if what == "param":
                program.results.append(Result("grad", first[_fqn(name)]))
            else:
                position = call.positions[name]
                program.results.append(Result("grad", f"input[{position}]"))
            kept.append(value)
        elif kind == "mutation":
            what, name = source
            if what == "param":
                raise CaptureError(
                    f"parameter {_fqn(name)!r} is changed in place during forward. A rank holds "
                    f"only a shard of it: change it between steps, or make it a buffer."
                )
            fqn = _fqn(name) if what == "buffer" else str(call.positions[name])
            mutated.append((holders[("buffer" if what == "buffer" else "input", fqn)], value))
        elif kind == "other":
            raise CaptureError(
                f"the traced graph has an output that fxshard does not know: {source}"
            )
    program.values = kept
    _write_back(program, mutated)


def _refuse_sparse(name: Any, grad: fx.Node) -> None:
    if grad.meta["val"].layout is not torch.strided:
        raise CaptureError(
            f"the gradient of {_fqn(str(name))!r} is sparse, which cannot be reduced in chunks. "
            f"Make it dense: nn.Embedding(..., sparse=False)."
        )


def _merge_tied(program: Program) -> None:
    """One placeholder and one gradient per tied parameter; the trace has one per name."""
    first: dict[str, fx.Node] = {}
    for node in list(program.graph.find_nodes(op="placeholder")):
        fqn = meta.get(node).fqn or ""
        if meta.get(node).role == "param" and first.setdefault(fqn, node) is not node:
            node.replace_all_uses_with(first[fqn])
            program.graph.erase_node(node)
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    merged: dict[Result, fx.Node] = {}
    for value, result in zip(program.values, program.results, strict=True):
        if result not in merged:
            merged[result] = value
            continue
        pair = sorted((merged[result], value), key=order.__getitem__)
        with program.graph.inserting_after(pair[1]):
            total = program.graph.call_function(aten.add.Tensor, tuple(pair))
        val = value.meta["val"]
        fake = program.fake(tuple(val.shape), val.dtype, val.device)
        merged[result] = meta.put(total, meta.get(pair[1]), fake)
        order[total] = order[pair[1]]
    program.results[:] = list(merged)
    program.values = list(merged.values())


def _write_back(program: Program, mutated: list[tuple[fx.Node, fx.Node]]) -> None:
    """Copy new values into buffers and inputs, behind everything that reads the old ones."""
    forward = program.phase("forward")
    written = set().union(*(meta.storage_ids(holder) for holder, _ in mutated))
    for i, (holder, value) in enumerate(mutated):
        if meta.storage_ids(value) & written:  # two buffers change places
            mutated[i] = (holder, _copied(program, value, forward[-1]))
    forward = program.phase("forward")
    for holder, value in mutated:
        if any(meta.get(user).phase == "backward" for user in holder.users):
            _keep_old_value(program, holder, forward[0])
        with program.graph.inserting_after(forward[-1]):
            node = program.graph.call_function(aten.copy_.default, (holder, value))
        module = (meta.get(holder).fqn or "").rpartition(".")[0]
        meta.put(node, meta.Meta("forward", "compute", module=module), holder.meta["val"])
        forward.append(node)


def _keep_old_value(program: Program, holder: fx.Node, before: fx.Node) -> None:
    """Backward reads the buffer as it was when forward ran: save a copy of it."""
    copy = _copied(program, holder, before.prev)
    holder.replace_all_uses_with(
        copy, delete_user_cb=lambda user: meta.get(user).phase == "backward"
    )


def _copied(program: Program, value: fx.Node, behind: fx.Node) -> fx.Node:
    with program.graph.inserting_after(behind):
        copy = program.graph.call_function(aten.clone.default, (value,))
    val = value.meta["val"]
    fake = program.fake(tuple(val.shape), val.dtype, val.device)
    return meta.put(copy, meta.Meta("forward", "compute", module=meta.get(behind).module), fake)


def _check_gradients(program: Program, model: nn.Module) -> None:
    """Every trainable parameter that forward uses differentiably has its gradient.

    Raises:
        CaptureError: a parameter is read by an operator of the backward graph, or feeds an output
            that backward starts from, and yet has no gradient output.
    """
    if not program.signature.training:
        return
    have = {r.name for r in program.results if r.kind == "grad"}
    reach = _reaches_tangent_output(program)
    for node in program.graph.find_nodes(op="placeholder"):
        tag = meta.get(node)
        if (
            tag.role != "param"
            or tag.fqn in have
            or not program.params[tag.fqn or ""].requires_grad
        ):
            continue
        if any(user in reach for user in node.users):
            raise CaptureError(
                f"parameter {tag.fqn!r} of {type(model).__name__} reaches the loss but the trace "
                f"has no gradient for it. If that is meant (it is used under torch.no_grad()), say "
                f"so with requires_grad_(False) on it, or with .detach() on what it computes."
            )


def _reaches_tangent_output(program: Program) -> set[fx.Node]:
    """Forward nodes from which an output with a tangent can be reached along float values.

    The walk stops at operators that cut gradients on purpose.
    """
    ends = {str(i) for i in program.signature.tangents}
    todo = [
        value
        for value, result in zip(program.values, program.results, strict=True)
        if result.kind == "output" and result.name in ends
    ]
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen or node.target in CUTS_GRADIENT:
            continue
        val = next(meta.tensors(node.meta.get("val")), None)
        if val is not None and not val.is_floating_point() and not val.is_complex():
            continue
        seen.add(node)
        todo.extend(node.all_input_nodes)
    return seen
