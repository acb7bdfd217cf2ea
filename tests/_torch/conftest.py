"""What several of these contracts take."""

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import fx, nn

from fxshard._torch import export, fake_tensors
from fxshard._torch import graphs as torch_graphs
from tests._torch.shared import Small, Two

aten = torch.ops.aten


@pytest.fixture(scope="module")
def joint() -> tuple[fx.GraphModule, list[Any], list[Any]]:
    mode = fake_tensors.FakeTensorMode()
    with mode:
        module = Small()
        args = (torch.ones(4, 3), torch.ones(4, 2, dtype=torch.bool))

    def enter(module: nn.Module, args: Any) -> None:
        torch_graphs.with_current_meta("nn_module_stack", {"": (type(module).__name__,)})

    handle = torch.nn.modules.module.register_module_forward_pre_hook(enter)
    with handle, torch.fx.traceback.preserve_node_meta():
        return export.export_joint(module, args)


@pytest.fixture(scope="module")
def dynamo_graph() -> tuple[Two, fx.GraphModule]:
    """A model, and the graph that Dynamo makes of it."""
    found: list[fx.GraphModule] = []

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        found.append(graph_module)
        return graph_module

    torch._dynamo.reset()
    model = Two()
    torch.compile(model, backend=backend, fullgraph=True)(torch.ones(3, 2))
    (graph_module,) = found
    return model, graph_module
