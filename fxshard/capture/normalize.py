"""What the trace gave -> the form that passes read: tags, results, one node per parameter.

Every node gets its `fxshard.ir.tags.Meta` here, once; later readers never look at the trace's own
metadata.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from fxshard._torch import checkpointing, export, modules
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard._torch.traced_collectives import is_collective, note_ranks
from fxshard.capture import aliasing, precision, provenance, strides
from fxshard.capture.modules import CHECKPOINT_WRAPPED
from fxshard.errors import CaptureError
from fxshard.ir import tags
from fxshard.ir.program import Program, Result
from fxshard.ir.shardable import learned_buffer

log: logging.Logger = logging.getLogger("fxshard")
aten: Any = torch.ops.aten

Place = tuple[str, int | None, str]  # module, call and line of an operator

# Operators whose result does not depend on the values of what they read, or says so.
CUTS_GRADIENT = (
    *(aten.detach.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
    *(aten.new_empty.default, aten.empty_like.default, aten.full_like.default),
    *(aten.zeros_like.default, aten.ones_like.default, aten.rand_like.default),
    aten.randn_like.default,
)


def normalize(
    program: Program,
    graph_module: fx.GraphModule,
    sources: list[Any],
    targets: list[Any],
    replaced: dict[str, bool],
) -> None:
    """Tag and tidy the graph that was just traced, in place.

    Args:
        program: holds the graph, the signature and the units; nothing else is set.
        graph_module: owner of constants.
        sources: descriptor of each placeholder (see `fxshard._torch.export.input_source`).
        targets: descriptor of each output (see `fxshard._torch.export.output_source`).
        replaced: buffers whose new values follow the model's outputs, and if they need a gradient.

    Raises:
        CaptureError: an input, an output or a change in forward that fxshard cannot repeat, or a
            trainable parameter that lost its gradient.
    """
    _tag_placeholders(program, sources)
    _lift_constants(program, graph_module)
    _forward_first(program, targets)
    _tag_compute(program)
    _set_results(program, sources, targets, replaced)
    _refuse_sparse_values(program)
    _allocate_zeros(program)
    if modules.REDUCES_AS_STORED:
        precision.keep_wide_gradients(program)
    _check_gradients(program)


def fake_like(
    tensor: torch.Tensor,
    fake_mode: FakeTensorMode,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A fake tensor with a storage of its own. Meta tensors become CPU ones; DTensors are full."""
    dtype = dtype or tensor.dtype
    own = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    device = device or own
    with fake_mode:
        fake = torch.empty_strided(
            tensor.shape, strides.of_state(tensor), dtype=dtype, device=device
        )
    if not isinstance(tensor, nn.Parameter):
        fake.requires_grad_(tensor.requires_grad)
    return fake


def _fqn(target: str) -> str:
    """The user's FQN: the trace calls the model as ``model`` of a module of its own."""
    return target.removeprefix("model.")


def _first_names(program: Program) -> dict[str, str]:
    """Every name of every parameter -> its first one."""
    params = (*program.params.values(), *program.ignored.values())
    return {alias: p.fqn for p in params for alias in p.aliases}


def _known(name: str, first: dict[str, str]) -> str:
    """The first name of a parameter. A ``checkpoint_wrapper`` around the model itself leaves its
    own name, and those of wrappers inside of it, out of those of parameters, which the trace, from
    outside, cannot know.
    """
    return first[name if name in first else name.replace(f"{CHECKPOINT_WRAPPED}.", "")]


def _tag_placeholders(program: Program, sources: list[Any]) -> None:
    """Tag placeholders by their descriptor, never by their position.

    The trace numbers tensors; inputs and outputs are known by their flat position in the call.
    """
    positions = program.signature.tensor_inputs
    where = program.signature.computed_outputs
    first = _first_names(program)
    for node, desc in zip(program.graph.find_nodes(op="placeholder"), sources, strict=True):
        kind, source = export.input_source(desc)
        if kind in ("param", "inner param"):
            name, inner = (source, "") if kind == "param" else source
            fqn = _known(_fqn(name), first)
            role: tags.Role = "param" if fqn in program.params else "ignored"
            tags.put(node, tags.Meta("forward", role, fqn=fqn, inner=inner))
        elif kind == "buffer":
            tags.put(node, tags.Meta("forward", "buffer", fqn=_fqn(source)))
        elif kind == "input":
            tags.put(node, tags.Meta("forward", "input", fqn=f"{positions[source]}"))
        elif kind == "tangent":
            what, number = source  # of a written input too, which _set_results refuses
            output = where[number] if what == "output" else number
            tags.put(node, tags.Meta("backward", "tangent", fqn=str(output)))
            _spread_out(program, node)
        else:
            raise CaptureError(
                f"the traced graph has an input that fxshard does not know: {source}"
            )


def _spread_out(program: Program, tangent: fx.Node) -> None:
    """Let the gradient of an output whose elements share places (``x.unfold``) have one for each.

    The trace lays gradients out as outputs are.
    """
    val = tangent.meta["val"]
    if aliasing.overlaps_itself(val):
        stale = tags.storage_ids(tangent)
        tangent.meta["val"] = program.fake(tuple(val.shape), val.dtype, val.device)
        program.refresh_views(tangent, stale)


def _lift_constants(program: Program, graph_module: fx.GraphModule) -> None:
    """Tensors that the model holds outside of parameters and buffers become placeholders."""
    last = list(program.graph.find_nodes(op="placeholder"))[-1]
    found: dict[str, list[fx.Node]] = defaultdict(list)
    for node in program.graph.find_nodes(op="get_attr"):
        found[str(node.target)].append(node)
    for name, nodes in found.items():
        value = program.constants[name] = getattr(graph_module, name)
        with program.graph.inserting_after(last):
            last = program.graph.placeholder(name)
        readers = [user for node in nodes for user in node.users]
        fake = _fake_constant(value, readers, program.fake_mode)
        tags.put(last, tags.Meta("forward", "buffer", fqn=name), fake)
        for node in nodes:
            node.replace_all_uses_with(last)
            program.graph.erase_node(node)


def _fake_constant(
    value: torch.Tensor, readers: list[fx.Node], fake_mode: FakeTensorMode
) -> torch.Tensor:
    """The fake value of a constant; if the trace has views of it, they are of its storage."""
    for reader in readers:
        if tags.shares_by_schema(reader):
            view = next(tags.tensors(reader.meta["val"]))
            return view.as_strided(value.shape, value.stride(), value.storage_offset())
    return fake_like(value, fake_mode)


def _forward_first(program: Program, targets: list[Any]) -> None:
    """Move what forward returns in front of backward.

    The trace ends with views of what forward has written in place, made of its last value.
    """
    made = [n for n in program.graph.nodes if n.op == "call_function"]
    first = next((i for i, n in enumerate(made) if provenance.is_backward(n)), None)
    if first is None:
        return
    todo = [
        value
        for value, desc in zip(program.values, targets, strict=True)
        if export.output_source(desc)[0] in ("output", "mutation")
    ]
    late, needed = set(made[first:]), set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in late and node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    for node in made[first:]:
        if node in needed:
            made[first].prepend(node)
            node.meta["partitioner_tag"] = "is_forward"


def _tag_compute(program: Program) -> None:
    """Give every operator its phase and its module, once and for all later readers.

    Backward nodes carry the forward module of the autograd node that ran them. Sums of gradients
    (where a value had several uses) carry none: they take that of the node before them.
    Checkpoints are numbered in the order in which forward runs them. Nodes alike share one tag.
    """
    numbers: dict[int | None, int | None] = {None: None}
    places: dict[str, Place] = {"forward": ("", None, ""), "backward": ("", None, "")}
    by_stack: dict[int, tuple[str | None, int | None, str]] = {}
    made: dict[Any, tags.Meta] = {}
    phase: tags.Phase = "forward"
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        held = node.meta
        if provenance.is_backward(node):
            phase = "backward"
        stack = provenance.stack_of(node, phase)
        place = by_stack.get(id(stack))
        if place is None:
            at = provenance.call_in(stack), provenance.line_in(stack)
            place = by_stack[id(stack)] = (provenance.module_in(stack), *at)
        module, call, line = place
        if module is not None:
            places[phase] = module, call, line
        region = checkpointing.checkpoint_of(node)
        checkpoint = numbers.setdefault(region, len(numbers) - 1)
        save = phase == "forward" and region is not None and checkpointing.is_saved_by_policy(node)
        what = (phase, places[phase], checkpoint, save)
        tag = made.get(what)
        if tag is None:
            module, call, line = places[phase]
            more: dict[str, Any] = {"checkpoint": checkpoint, "save": save, "call": call}
            tag = made[what] = tags.Meta(phase, "compute", module, line=line, **more)
        held["fxshard"] = tag
        if is_collective(node):
            note_ranks(node)
    tags.put(
        program.output, tags.Meta("backward" if program.signature.training else "forward", "output")
    )


def _set_results(
    program: Program, sources: list[Any], targets: list[Any], replaced: dict[str, bool]
) -> None:
    """Name the outputs; write mutated buffers back at the end of forward."""
    first = _first_names(program)
    positions = program.signature.tensor_inputs
    where = program.signature.computed_outputs
    values = program.values
    holders = {
        (tags.get(n).role, tags.get(n).fqn): n for n in program.graph.find_nodes(op="placeholder")
    }
    tangents = [source for kind, source in map(export.input_source, sources) if kind == "tangent"]
    kept: list[fx.Node] = []
    mutated: list[tuple[fx.Node, fx.Node]] = []
    for value, desc in zip(values, targets, strict=True):
        kind, source = export.output_source(desc)
        if kind == "output" and source >= len(where):
            name, attached = list(replaced.items())[source - len(where)]
            if attached:
                _refuse_attached(program, "buffer", name, value)
            mutated.append((holders[("buffer", name)], value))
        elif kind == "output":
            program.results.append(Result("output", str(where[source])))
            kept.append(value)
        elif kind == "grad" and value is not None:
            what, name = source
            if what == "buffer":  # it was set after compile
                raise CaptureError(learned_buffer(_fqn(name)))
            _refuse_sparse(name, value)
            if what == "param":
                program.results.append(Result("grad", _known(_fqn(name), first)))
            else:
                position = positions[name]
                program.results.append(Result("grad", f"input[{position}]"))
            kept.append(value)
        elif kind == "mutation":
            what, name = source
            if what == "param":
                raise CaptureError(
                    f"parameter {_fqn(name)!r} is changed in place during forward, "
                    f"{tags.place(value)}. A rank holds only a shard of it: change it "
                    f"between steps, or make it a buffer."
                )
            role: tags.Role = "buffer" if what == "buffer" else "input"
            fqn = _fqn(name) if what == "buffer" else str(positions[name])
            if ("mutation", source) in tangents:
                _refuse_attached(program, role, fqn, value)
            mutated.append((holders[(role, fqn)], value))
        elif kind == "other":
            raise CaptureError(
                f"the traced graph has an output that fxshard does not know: {source}"
            )
    program.values = kept
    _write_back(program, mutated)


def _refuse_attached(program: Program, role: str, fqn: str, value: fx.Node) -> None:
    """Raise CaptureError for a tensor of the caller's that gets a gradient by what is written.

    Eager takes a loss back from there to all that `value` was computed of; a program does not.
    """
    if role == "buffer":
        what = f"buffer {fqn!r}"
        remedy = "detach it (.detach()), or return it if a loss reads it"
    else:
        what = program.signature.input_names[int(fqn)]
        remedy = "write into a clone (x = x.clone()), or return the new value"
    raise CaptureError(
        f"forward gives {what} a value that requires a gradient, {tags.place(value)}: what is "
        f"computed of it outside of forward would take no gradient back to the model. "
        f"{remedy[0].upper()}{remedy[1:]}."
    )


def _refuse_sparse(name: Any, grad: fx.Node) -> None:
    if grad.meta["val"].layout is not torch.strided:
        raise CaptureError(
            f"the gradient of {_fqn(str(name))!r} is sparse, which cannot be reduced in chunks. "
            f"Make it dense: nn.Embedding(..., sparse=False)."
        )


def _refuse_sparse_values(program: Program) -> None:
    for node in program.graph.nodes:
        if any(value.layout is not torch.strided for value in tags.tensors(node.meta.get("val"))):
            raise CaptureError(
                f"{node.target} gives a sparse tensor, {tags.place(node)}, of which fxshard "
                f"counts no bytes. Compute with dense tensors, or with indices and values."
            )


def _allocate_zeros(program: Program) -> None:
    """Zeros without memory, as second derivatives make them, get some: a program keeps storages."""
    for node in program.graph.find_nodes(
        op="call_function", target=aten._efficientzerotensor.default
    ):
        node.target = aten.zeros.default


def _write_back(program: Program, mutated: list[tuple[fx.Node, fx.Node]]) -> None:
    """Copy new values into buffers and inputs, after everything that reads the old ones.

    Where backward or the caller reads the old one, be it through a view, forward begins with a copy
    of it.
    """
    forward = program.phase("forward")
    written = set().union(*(tags.storage_ids(holder) for holder, _ in mutated))
    for i, (holder, value) in enumerate(mutated):
        if tags.storage_ids(value) & written:  # two buffers change places
            mutated[i] = (holder, aliasing.copied(program, value, forward[-1]))
    forward = program.phase("forward")
    _warn_of_checkpoints([holder for holder, value in mutated if _in_checkpoint(value)])
    returned = set(program.values)
    for holder, _ in mutated:
        views = aliasing.with_views(holder)
        if any(node in returned or tags.backward_users(node) for node in views):
            aliasing.keep_old_value(program, holder)
    for holder, value in mutated:
        with program.graph.inserting_after(forward[-1]):
            node = program.graph.call_function(aten.copy_.default, (holder, value))
        module = (tags.get(holder).fqn or "").rpartition(".")[0]
        tags.put(node, tags.Meta("forward", "compute", module=module), holder.meta["val"])
        forward.append(node)


def _in_checkpoint(value: fx.Node) -> bool:
    return value.op == "call_function" and tags.get(value).checkpoint is not None


def _warn_of_checkpoints(holders: list[fx.Node]) -> None:
    """Say that what a checkpoint writes is written once, where eager writes it in backward too."""
    names = [str(tags.get(holder).fqn) for holder in holders if tags.get(holder).role == "buffer"]
    if names:
        log.warning(
            "fxshard: %s %s written inside of an activation checkpoint: once, as without the "
            "checkpoint. Eager PyTorch writes it again where backward runs forward once more.",
            ", ".join(names[:4]) + (", ..." if len(names) > 4 else ""),
            "is" if len(names) == 1 else "are",
        )


def _check_gradients(program: Program) -> None:
    """Every trainable parameter that forward uses differentiably has its gradient.

    Raises:
        CaptureError: a parameter is read by an operator of the backward graph, or feeds an output
            that backward starts from, and yet has no gradient output.
    """
    if not program.signature.training:
        return
    have = {r.name for r in program.results if r.kind == "grad"}
    reach = _dependent_outputs(program)
    for node in program.graph.find_nodes(op="placeholder"):
        tag = tags.get(node)
        if (
            tag.role not in ("param", "ignored")
            or tag.fqn in have
            or not (program.params | program.ignored)[tag.fqn or ""].requires_grad
        ):
            continue
        if any(reach.get(user) for user in node.users):
            raise CaptureError(
                f"parameter {tag.fqn!r} reaches the loss but the trace "
                f"has no gradient for it. If that is meant, say so with requires_grad_(False) on "
                f"it, with torch.no_grad() around its use, or .detach() on what it computes."
            )


def reached(program: Program) -> dict[str, frozenset[int]]:
    """`Program.reached`, of a program that no pass has touched.

    A gradient that is computed from no tangent is a constant, such as that of ``sign``, or of an
    empty tensor in ``cat``: eager has it where a loss is computed from what forward makes of it.
    """
    tangents = program.signature.tangents
    if len(tangents) < 2:
        return {}
    found: dict[fx.Node, frozenset[int]] = {}
    for node in program.graph.nodes:
        tag = tags.get(node) if node.op != "output" else None
        if tag is not None and tag.role == "tangent":
            found[node] = frozenset([int(tag.fqn or 0)])
        elif tag is not None and tag.phase == "backward":
            found[node] = _union(found, node.all_input_nodes)
    gradients = {
        result.name: found.get(value, frozenset())
        for value, result in zip(program.values, program.results, strict=True)
        if result.kind == "grad"
    }
    if not all(gradients.values()):
        dependent = _dependent_outputs(program)
        for node in program.graph.find_nodes(op="placeholder"):
            tag = tags.get(node)
            name = f"input[{tag.fqn}]" if tag.role == "input" else tag.fqn or ""
            if name in gradients and not gradients[name]:
                gradients[name] = _union(dependent, node.users)
    return {name: reach for name, reach in gradients.items() if 0 < len(reach) < len(tangents)}


def _union(sets: dict[fx.Node, frozenset[int]], nodes: Iterable[fx.Node]) -> frozenset[int]:
    return frozenset().union(*(sets.get(node, ()) for node in nodes))


def _dependent_outputs(program: Program) -> dict[fx.Node, frozenset[int]]:
    """Of each forward node: which outputs with a tangent (flat indices) depend on it, if any.

    The walk stops at operators that cut gradients on purpose, and at those that the user runs
    without gradients: eager has none there either.
    """
    ends: dict[fx.Node, frozenset[int]] = {}
    for value, result in zip(program.values, program.results, strict=True):
        if result.kind == "output" and int(result.name) in program.signature.tangents:
            ends[value] = ends.get(value, frozenset()) | {int(result.name)}
    found: dict[fx.Node, frozenset[int]] = {}
    for node in reversed(program.graph.nodes):
        if node.op == "output" or tags.get(node).phase == "backward":
            continue
        if node.target in CUTS_GRADIENT:
            continue
        if provenance.without_gradient(node.meta.get(provenance.STACK)):
            continue
        val = next(tags.tensors(node.meta.get("val")), None)
        if val is not None and not val.is_floating_point() and not val.is_complex():
            continue
        found[node] = ends.get(node, frozenset()) | _union(found, node.users)
    return found
