"""Contracts of what `fxshard._torch.gpu_inductor` and `triton_stub` use of torch."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxshard._torch import gpu_inductor, triton_stub
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard._torch.gpu_inductor import CUDA, Gpu
from fxshard._torch.inductor import Generated

GPU = Gpu((9, 0), 132)
aten = torch.ops.aten


def test_triton_can_be_imported_in_the_block_and_is_as_before_afterwards() -> None:
    missing = triton_stub.is_missing()
    with triton_stub.importable():
        import triton
        import triton.language as tl

        assert isinstance(triton.Config, type) and tl.float32 is not None
        assert not missing or triton.jit(len) is len
    assert triton_stub.is_missing() == missing and ("triton" in sys.modules) != missing
    with triton_stub.importable():
        import triton as again
    assert again is triton


def test_a_gpu_is_present_in_the_block_only() -> None:
    from torch._dynamo.device_interface import get_interface_for_device
    from torch._inductor import utils
    from torch.utils._triton import has_triton

    def answers() -> tuple[Any, ...]:
        return torch.cuda.is_available(), has_triton(), utils.get_gpu_type()

    before = answers()
    for gpu in (GPU, Gpu((8, 0), 108)):
        with pytest.raises(KeyError), gpu_inductor.present(gpu):
            assert answers() == (True, True, "cuda")
            assert torch.cuda.get_device_capability() == gpu.capability
            found = get_interface_for_device("cuda").Worker.get_device_properties(CUDA)
            assert found.multi_processor_count == gpu.multiprocessors
            raise KeyError
    assert answers() == before


def test_fake_tensors_on_a_gpu_are_indexed_copied_and_made_contiguous() -> None:
    """Where torch's own methods want CUDA's library before they are dispatched."""
    with gpu_inductor.present(GPU), FakeTensorMode():
        x = torch.empty(4, 6, device=CUDA)
        part, plain = x[1:3, None, 2], torch.empty(4, 6)[1:3, None, 2]
        assert (part.shape, part.stride()) == (plain.shape, plain.stride())
        assert part.storage_offset() == 8 and part.device == CUDA
        assert part.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert x.t().contiguous().stride() == (4, 1)
        assert x.copy_(torch.empty(6, device=CUDA)) is x
        host = torch.empty(4, 6)
        assert host[1].shape == (6,) and host.t().contiguous().stride() == (4, 1)


def test_compile_gets_fakes_of_dynamos_mode_and_code_for_a_gpu() -> None:
    """Inductor's `gpu_code` allocates by these names; its scheduling is for Triton's kernels."""
    codes: list[tuple[Generated, bool]] = []
    seen: list[Any] = []

    def compiler(graph: fx.GraphModule, inputs: list[Any], options: dict[str, Any]) -> Any:
        seen.append((inputs, options))

        def run(code: Generated, is_backward: bool) -> gpu_inductor.Run:
            codes.append((code, is_backward))
            return lambda args: pytest.fail("not run here")

        return gpu_inductor.compiled(graph, inputs, GPU, options, run)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu((x @ w).sin()).softmax(-1)

    given: gpu_inductor.Compiler = compiler
    with gpu_inductor.inductor_replaced(given), FakeTensorMode() as mode:
        x, w = torch.empty(64, 32), torch.empty(32, 32, requires_grad=True)
        with pytest.raises(BaseException, match="not run here"):
            torch.compile(function, options={"epilogue_fusion": False})(x, w)
    (inputs, options), *others = seen
    assert not others and options == {"epilogue_fusion": False}
    assert all(each.fake_mode is not mode for each in inputs)
    assert [is_backward for _, is_backward in codes] == [False, True]
    for code, _ in codes:
        assert "= empty_strided_cuda((" in code.source and "triton_" in code.source
        assert "with torch.cuda._DeviceGuard(0):" in code.source
        assert "# Topologically Sorted Source Nodes: [" in code.source


def test_code_that_is_compiled_sees_a_gpu_and_functions_inside_of_it_are_for_one() -> None:
    """`_validate_device` and `TensorVariable.specialize` are replaced; subgraphs are moved."""
    from torch.nn.attention.flex_attention import flex_attention

    codes: list[str] = []
    seen: list[Any] = []

    def compiler(graph: fx.GraphModule, inputs: list[Any], options: dict[str, Any]) -> Any:
        last = graph.graph.find_nodes(op="call_function", target=torch.full)[-1]
        seen.append((last.args[0], gpu_inductor.on_host(graph)))

        def run(code: Generated, is_backward: bool) -> gpu_inductor.Run:
            codes.append(code.source)
            return lambda args: pytest.fail("not run here")

        return gpu_inductor.compiled(graph, inputs, GPU, options, run)

    def function(x: Tensor) -> Tensor:
        y: Any = flex_attention(x, x, x, lambda score, b, h, q, k: score + (q - k))
        return y * torch.full((64 if x.is_cuda else 1,), 2.0, device=x.device)

    with gpu_inductor.inductor_replaced(compiler), FakeTensorMode():
        x = torch.empty(1, 2, 256, 64, requires_grad=True)
        with pytest.raises(BaseException, match="not run here"):
            torch.compile(function)(x)
    assert seen == [((64,), None)]
    assert len(codes) == 2 and all("triton_tem_fused_flex_attention" in code for code in codes)


def test_options_have_the_names_that_are_refused() -> None:
    for name in ("max_autotune", "max_autotune_gemm", "triton.cudagraphs", "cpp_wrapper"):
        assert gpu_inductor.option(name) is False


def test_dynamos_own_errors_are_known() -> None:
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    assert gpu_inductor.is_for_dynamo(TensorifyScalarRestartAnalysis())
    assert not gpu_inductor.is_for_dynamo(RuntimeError())


def test_graphs_of_dynamos_name_no_gpu_and_say_who_asks_for_the_host() -> None:
    graphs: list[fx.GraphModule] = []

    def compiler(graph_module: fx.GraphModule, inputs: Any, options: Any) -> Any:
        graphs.append(graph_module)
        return graph_module

    def on_gpu(x: Tensor) -> Tensor:
        moved: Tensor = x.cuda().to("cuda:0") + torch.ones(2, device=CUDA)
        return moved.to(device="cuda", dtype=torch.float64)

    def on_host(x: Tensor) -> Tensor:
        return x.sin().cpu()

    with gpu_inductor.inductor_replaced(compiler), FakeTensorMode() as mode, mode:
        for function in (on_gpu, on_host):
            torch.compile(function, fullgraph=True)(torch.ones(2))
    said = [str((node.target, node.args[1:], node.kwargs)) for node in graphs[0].graph.nodes]
    assert len(said) == 7 and not any("cuda" in each for each in said)
    assert gpu_inductor.on_host(graphs[0]) is None
    found = gpu_inductor.on_host(graphs[1])
    assert found is not None and found.target == "cpu"
