"""Contracts of what `fxshard._torch.dynamo` uses of torch."""

import sys
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from fxshard._torch import dynamo
from tests._torch import shared
from tests._torch.shared import Two


def test_dynamo_names_the_modules_of_a_node(dynamo_graph: tuple[Two, fx.GraphModule]) -> None:
    model, graph_module = dynamo_graph
    ids = [str(id(model.inner)), str(id(model.inner[0]))]
    node = next(n for n in graph_module.graph.nodes if n.target is nn.functional.linear)
    assert dynamo.dynamo_modules(node) == [(ids[0], 0), (ids[1], 0)]
    assert dynamo.dynamo_paths(node) == [(ids[0], "inner"), (ids[1], "inner.0")]
    path, _, function = dynamo.stack_line(node).partition(" in ")
    assert path.startswith(shared.__file__) and function == "forward"


def test_dynamo_treats_marked_modules_as_managed_by_fsdp() -> None:
    from torch._dynamo.variables.nn_module import FSDPManagedNNModuleVariable

    seen: list[Any] = []
    init = FSDPManagedNNModuleVariable.__init__

    def watched(self: Any, value: Any, **kwargs: Any) -> None:
        seen.append(value)
        init(self, value, **kwargs)

    model = Two()
    for module in model.modules():
        dynamo.mark_for_dynamo(module)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPManagedNNModuleVariable, "__init__", watched)
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(3, 2))
    assert any(value is model.inner[0] for value in seen)


class Seeing(TorchFunctionMode):
    """Notes the functions that it sees, in a way that Dynamo cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"{sys._getframe(1).f_code.co_name} {func.__name__}")
        return func(*args, **(kwargs or {}))


def test_function_modes_are_left_where_frames_are_compiled() -> None:
    """They are back in what is left out, after it, and after an error; before it they were not."""
    graphs: list[fx.GraphModule] = []

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph_module)
        return graph_module

    @torch.compiler.disable
    def left_out(x: Tensor) -> Tensor:
        return x.sin()

    @torch.compile(backend=backend)
    def outer(x: Tensor) -> Tensor:
        return left_out(x.cos()).tan()

    @torch.compile(backend=backend, fullgraph=True)
    def refused(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.cos()

    torch._dynamo.reset()
    x = torch.ones(2)
    with dynamo.left_where_compiled(Seeing), Seeing() as mode:
        for _ in range(2):  # the second call evaluates guards
            outer(x)
        assert [call.split()[-1] for call in mode.seen if "sin" in call] == ["sin", "sin"]
        assert not [call for call in mode.seen if call.startswith("outer ")], "Dynamo ran eager"
        targets = [node.target for graph in graphs for node in graph.graph.nodes]
        assert {"cos", "tan"} <= set(targets) and "sin" not in targets
        with pytest.raises(torch._dynamo.exc.Unsupported):
            refused(x)
        x.exp()
        assert mode.seen[-1].endswith(" exp")
    torch._dynamo.reset()
    with Seeing() as mode:
        outer(x)
    assert "outer cos" in mode.seen, "Dynamo does not run eager any more: this is not needed"


def test_a_backend_is_registered_once() -> None:
    from torch._dynamo.backends import registry

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        return graph_module

    try:
        dynamo.register_backend("fxshard_test", backend)
        dynamo.register_backend("fxshard_test", lambda *args: None)
        assert registry.lookup_backend("fxshard_test") is backend
    finally:
        registry._COMPILER_FNS.pop("fxshard_test", None)
        registry._BACKENDS.pop("fxshard_test", None)


def test_functions_of_one_def_are_compiled_apart() -> None:
    def around(inner: Any, apart: bool) -> Any:
        def outer(x: torch.Tensor) -> Any:
            return inner(x)

        return dynamo.with_a_cache_of_its_own(outer) if apart else outer

    def compiled(apart: bool) -> None:
        torch._dynamo.reset()
        for inner in (torch.sin, torch.cos, torch.tanh, torch.exp):
            run = torch.compile(around(inner, apart), backend="eager", fullgraph=True)
            assert run(torch.ones(2)).equal(inner(torch.ones(2)))

    with torch._dynamo.config.patch(recompile_limit=2):
        compiled(apart=True)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            compiled(apart=False)


def test_only_inlined_functions_are_traced_by_their_callers_alone() -> None:
    counts = {"graphs": 0}

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        counts["graphs"] += 1
        return graph_module

    def read(x: Tensor) -> Any:
        return torch.compiler.is_compiling(), x + 1

    def caller(x: Tensor) -> Any:
        return read(x)

    dynamo.only_inlined(read)
    torch._dynamo.reset()
    assert torch.compile(caller, backend=backend, fullgraph=True)(torch.ones(1))[0] is True
    assert counts["graphs"] == 1
    torch._dynamo.reset()
    assert torch.compile(read, backend=backend)(torch.ones(1))[0] is False
    assert counts["graphs"] == 1
