"""Contracts of what `fxshard._torch.checkpointing` uses of torch."""

from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import Tensor, fx, nn

from fxshard._torch import checkpointing, dynamo, export, fake_tensors
from tests._torch.shared import Two, _contexts, aten


def test_a_wrapped_module_is_an_attribute_and_has_its_names() -> None:
    """FSDP2 and dry runs count on both; a context function says what is saved."""
    wrapped = checkpointing.checkpoint_wrapper(nn.Linear(2, 3), context_fn=partial(_contexts, 1))
    assert isinstance(wrapped._checkpoint_wrapped_module, nn.Linear)
    assert {name for name, _ in wrapped.named_parameters()} == {"weight", "bias"}
    wrapped(torch.ones(4, 2)).sum().backward()
    assert wrapped.weight.grad is not None


def test_checkpoints_inline_marks_forward_and_backward() -> None:
    """By what transformers holds (``checkpoint`` itself), in both modes, and with a policy."""
    call = torch.utils.checkpoint.checkpoint
    inner = partial(call, torch.tanh, use_reentrant=True)
    policy = partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, [aten.tanh.default]
    )

    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            x = torch.sin(x)
            x = inner(x)
            x = call(lambda x: torch.exp(inner(x)), x, use_reentrant=False)
            return [call(torch.tanh, x, use_reentrant=False, context_fn=policy).sum()]

    with fake_tensors.FakeTensorMode(), torch.fx.traceback.preserve_node_meta():
        x = torch.ones(3, requires_grad=True)
        with checkpointing.checkpoints_inline():
            graph = export.export_joint(Checkpointed(), (x,))[0].graph

    def marks(target: Any) -> list[int | None]:
        nodes = graph.find_nodes(op="call_function", target=target)
        return [checkpointing.checkpoint_of(node) for node in nodes]

    first, second, third = marks(aten.tanh.default)
    assert None not in (first, second, third) and len({first, second, third}) == 3, (
        "operators inside torch.utils.checkpoint are not marked: checkpoint() does not look up "
        "_checkpoint_without_reentrant_generator and CheckpointFunction when it is called"
    )
    assert marks(aten.exp.default) == [second], "a checkpoint inside a checkpoint has its own mark"
    assert marks(aten.sin.default) == marks(aten.cos.default) == [None], "what is outside is marked"
    assert marks(aten.tanh_backward.default) == [third, second, first], (
        "backward nodes do not take meta['custom'] of their forward"
    )
    saved = [
        checkpointing.is_saved_by_policy(n) for n in graph.nodes if n.target is aten.tanh.default
    ]
    assert saved == [False, False, True], "policies do not write meta['recompute'] under a trace"


def test_checkpoints_inline_is_undone() -> None:
    module = torch.utils.checkpoint
    before = (module._checkpoint_without_reentrant_generator, module.CheckpointFunction)
    with pytest.raises(KeyError), checkpointing.checkpoints_inline():
        raise KeyError
    assert before == (module._checkpoint_without_reentrant_generator, module.CheckpointFunction)


def test_dynamo_makes_an_operator_of_a_checkpoint(dynamo_graph: tuple[Two, fx.GraphModule]) -> None:
    model, graph_module = dynamo_graph
    target = checkpointing.checkpoint_operator()
    (node,) = [n for n in graph_module.graph.nodes if n.target is target]
    assert node.args[0].op == "get_attr"
    body = getattr(graph_module, node.args[0].target)
    context = checkpointing.checkpoint_context(body)
    assert isinstance(context, partial) and context.func is _contexts
    (inside,) = [n for n in body.graph.nodes if n.target is nn.functional.linear]
    assert dynamo.dynamo_modules(inside) == [
        (str(id(model.inner)), 1),
        (str(id(model.inner[0])), 1),
    ]
    assert checkpointing.checkpoint_context(graph_module) is torch.utils.checkpoint.noop_context_fn


def test_a_node_goes_to_another_checkpoint() -> None:
    inside = {"custom": {checkpointing._CHECKPOINT: 3, "mine": 1}, "val": 0}
    assert checkpointing.checkpoint_number(inside) == 3
    moved = dict(inside)
    checkpointing.in_checkpoint(moved, 7)
    assert checkpointing.checkpoint_number(moved) == 7
    assert moved["custom"]["mine"] == 1
    assert checkpointing.checkpoint_number(inside) == 3
    assert checkpointing.checkpoint_number({}) is None
