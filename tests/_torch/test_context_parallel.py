"""What fxshard relies on of torch's context parallelism."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel as around
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

from fxshard._torch import context_parallel
from fxshard._torch.dtensors import dtensor_handlers
from fxshard._torch.process_groups import fake_process_group


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_process_group(1, 4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))


def inside(mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    with around(mesh, buffers=[x], buffer_seq_dims=[2]):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_its_state_is_told_by_the_ranks_and_the_options(mesh: DeviceMesh) -> None:
    assert context_parallel.state() is None
    x = torch.zeros(1, 1, 4, 2)
    with around(mesh["cp"], buffers=[x], buffer_seq_dims=[2]):
        first = context_parallel.state()
    with around(mesh["dp"], buffers=[x], buffer_seq_dims=[2]):
        other = context_parallel.state()
    assert context_parallel.state() is None
    assert isinstance(first, tuple) and first[0] == (0, 1)
    assert isinstance(other, tuple) and other[0] == (1, 3)
    options = torchs._cp_options
    assert first[1:] == (
        *(options.rotate_method, options.enable_load_balance, options.convert_to_f32),
    )


def test_kernels_of_cpus_have_no_handler_of_torchs(mesh: DeviceMesh) -> None:
    """If one has, `on_cpus` need not give it one."""
    with pytest.raises(NotImplementedError, match="flash_attention_for_cpu"):
        inside(mesh["cp"], torch.zeros(1, 1, 4, 2))
    torchs._disable_context_parallel_dispatcher_impl()  # torch 2.11 forgets it after an error


def test_kernels_of_cpus_go_round_inside_of_both_alone(mesh: DeviceMesh) -> None:
    before = dict(dtensor_handlers())
    with context_parallel.on_cpus():
        assert dtensor_handlers() == before, "not inside of context_parallel"
    x = torch.randn(1, 1, 4, 2, requires_grad=False)
    with around(mesh["cp"], buffers=[x], buffer_seq_dims=[2]):
        kept = dict(dtensor_handlers())
        with context_parallel.on_cpus():
            made = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        assert dtensor_handlers() == kept
    assert made.shape == (1, 1, 2, 2)
    masked = torch.zeros(1, 1, 2, 2)
    with (
        around(mesh["cp"], buffers=[x], buffer_seq_dims=[2]),
        context_parallel.on_cpus(),
        pytest.raises((NotImplementedError, RuntimeError)),
    ):
        F.scaled_dot_product_attention(x, x, x, attn_mask=masked)
    assert dtensor_handlers() == before


def test_an_operator_is_called_as_its_schema_says(mesh: DeviceMesh) -> None:
    forward = context_parallel._FORWARD._schema
    backward = context_parallel._BACKWARD._schema
    assert [a.name for a in forward.arguments][:5] == [
        "query",
        "key",
        "value",
        "dropout_p",
        "is_causal",
    ]
    assert [a.name for a in backward.arguments][:6] == [
        *("grad_out", "query", "key", "value", "out", "logsumexp"),
    ]
    local = torch.zeros(1, 1, 2, 2)
    placed = DTensor.from_local(local, mesh["cp"], [Shard(2)], run_check=False)
    assert context_parallel._local(placed).shape == local.shape
    assert context_parallel._local(0.5) == 0.5
