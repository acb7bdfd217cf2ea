"""Emitted code calls the operators of the graph, however it spells them."""

import re
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard.codegen import emit, spelling
from tests import zoo
from tests.zoo.more import MATRIX

aten = torch.ops.aten


class Called(TorchDispatchMode):
    """The operators that reach the dispatcher, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _is_aten(name: str) -> bool:
    return name.startswith(("aten.", "transformers."))


@pytest.mark.parametrize("name", ["llama", "gpt2", "convnet"])
def test_a_step_calls_the_operators_of_its_program_in_their_order(name: str) -> None:
    model, args, kwargs = zoo.built(MATRIX[name])
    compiled = fxshard.compile(model, world_size=1)
    loss = MATRIX[name].loss
    loss(compiled(*args, **kwargs)).backward()  # traced
    (variant,) = compiled._fxshard.variants.values()
    program = variant.program
    planned = [
        str(node.target)
        for phase in ("forward", "backward")
        for node in program.phase(phase)  # type: ignore[arg-type]
        if _is_aten(str(node.target))
    ]
    rows = compiled._fxshard.arguments(variant, [a for a in (*args, *kwargs.values())])
    with torch.no_grad(), Called() as called:
        variant.executor.forward(rows)
    seen = [name for name in called.names if _is_aten(name)]
    assert seen == planned[: len(seen)] and len(seen) > len(planned) // 4
    spelled = [
        node
        for node in program.graph.nodes
        if node.op == "call_function" and spelling.spelled(node, str) is not None
    ]
    assert len(spelled) > len(planned) // 2


def test_views_are_spelled_as_methods_of_the_tensor() -> None:
    model, args, kwargs = zoo.built(MATRIX["llama"])
    code = emit.emit(fxshard.plan(model, args, kwargs, world_size=2).program)
    assert re.search(r"= \w+\.view\(\[", code) and re.search(r"= \w+\.t\(\)", code)
    assert "aten_view(" not in code and "aten_transpose_int(" not in code
    assert "torch.mm(" in code and "aten_mm(" not in code


@pytest.mark.parametrize(
    ("start", "end"), [(0, 2), (1, 9223372036854775807), (-3, 9223372036854775807), (2, -1), (4, 2)]
)
def test_a_narrow_is_the_slice_that_it_stands_for(start: int, end: int) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.arange(24).view(4, 6)
    node = graph.call_function(aten.slice.Tensor, (x, 1, start, end))
    node.meta["val"] = expected = aten.slice.Tensor(x.meta["val"], 1, start, end)
    text = spelling.spelled(node, str)
    assert text is not None and "narrow" in text
    got = eval(text, {"x": x.meta["val"]})
    assert torch.equal(got, expected) and got.storage_offset() == expected.storage_offset()
    stepped = graph.call_function(aten.slice.Tensor, (x, 1, 0, 6, 2))
    assert spelling.spelled(stepped, str) is None
