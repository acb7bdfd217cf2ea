"""`fxshard.dry_run`: devices, values, streams, steps, and what is left behind."""

import copy
import gc
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import fxshard
from fxshard.errors import CaptureError, ConfigError, DoesNotFitError
from fxshard.memory.category import Category
from fxshard.memory.cuda.settings import AllocatorSettings
from fxshard.memory.report import MemoryReport

MIB = 1 << 20


def dense(layers: int = 3) -> nn.Sequential:
    """Layers of 1 MiB of weights each, without bias."""
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)))


def sharded_steps(run: fxshard.DryRun, steps: int = 2) -> None:
    with torch.device("meta"):
        model = dense()
    for layer in model:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    fully_shard(model)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        x = torch.randn(64, 512, device="cuda")
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.step()


@pytest.fixture(scope="module")
def sharded() -> fxshard.DryRun:
    with fxshard.dry_run(world_size=4) as run:
        sharded_steps(run)
    return run


def test_tensors_say_where_they_were_asked_to_be() -> None:
    with fxshard.dry_run(world_size=2):
        here, there = torch.zeros(3), torch.zeros(3, device="cuda")
        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        assert (here.device.type, there.device.type) == ("cpu", "cuda")
        assert there.is_cuda and not here.is_cuda
        assert (there + 1).is_cuda and torch.zeros_like(there).is_cuda
        assert there.cpu().device.type == "cpu" and here.to("cuda", torch.half).is_cuda
        assert here.to(there).is_cuda and there.to(torch.half).is_cuda
        tokens = torch.arange(4, device="cuda")
        assert tokens.is_cuda and tokens.tolist() == [0, 1, 2, 3]


def test_an_emptied_tensor_is_still_on_its_device() -> None:
    """As FSDP leaves an unsharded parameter: its storage has no bytes."""
    with fxshard.dry_run(world_size=2):
        here, there = torch.zeros(3), torch.zeros(3, device="cuda")
        for each in (here, there):
            each.untyped_storage().resize_(0)
        assert (here.device.type, there.device.type) == ("cpu", "cuda")
        assert there.detach().device.type == "cuda"
        there.untyped_storage().resize_(12)
        assert there.device.type == "cuda"


def test_tensors_of_python_numbers_and_arrays_on_the_gpu() -> None:
    with fxshard.dry_run(world_size=2):
        x = torch.zeros(3, device="cuda")
        for made in (
            *(torch.tensor(1.5, device="cuda"), torch.as_tensor(np.ones(3), device="cuda")),
            *(torch.asarray([1.0], device="cuda"), x.new_tensor([1, 2])),
        ):
            assert made.is_cuda
        assert torch.tensor([7], device="cuda").item() == 7
        host = torch.tensor([1.0]).pin_memory()
        assert not host.is_cuda and not torch.from_numpy(np.ones(3)).is_cuda


def test_addresses_tell_tensors_apart() -> None:
    """As accelerate does, when it looks for the sharded parameters of an optimizer."""
    for device in ("cpu", "h100"):
        with fxshard.dry_run(world_size=2, device=device):
            a, b = (torch.randn(10, 3, device=device.replace("h100", "cuda")) for _ in range(2))
            assert 0 < a.data_ptr() != b.data_ptr() > 0 and a.view(30).data_ptr() == a.data_ptr()
            assert a[2:].data_ptr() - a.data_ptr() == 2 * 3 * 4
            assert a.untyped_storage().data_ptr() == a[2:].untyped_storage().data_ptr()
            assert torch.empty(3, device="meta").data_ptr() == 0


def test_numbers_count_as_finite() -> None:
    with fxshard.dry_run(world_size=2):
        loss = torch.randn(2, 2, device="cuda").mean()
        assert torch.isfinite(loss) and not torch.isnan(loss) and not loss.isinf()
        assert not torch.isnan(torch.randn(5)).any()
        assert f"{math.exp(loss.item()):.2f} {math.sqrt(loss.item())}" == "unknown unknown"
        with pytest.raises(CaptureError, match=r"test_dry_run\.py"):
            assert loss == loss + 1
    assert math.exp(0.0) == 1.0


def test_sharded_parameters_are_initialised() -> None:
    with fxshard.dry_run(world_size=4) as run:
        with torch.device("meta"):
            model = dense()
        fully_shard(model).to_empty(device="cuda")
        before = torch.cuda.memory_allocated()
        for layer in model:
            nn.init.normal_(layer.weight)
            layer.reset_parameters()
        assert torch.cuda.memory_allocated() == before
    assert run.steps == 0


def test_loaders_start_no_workers() -> None:
    with fxshard.dry_run(world_size=2):
        loader = DataLoader(
            TensorDataset(torch.arange(8)), 4, num_workers=2, prefetch_factor=3, pin_memory=True
        )
        assert [x.tolist() for (x,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert loader.num_workers == 0


def test_only_what_is_on_the_gpu_takes_its_memory() -> None:
    with fxshard.dry_run(world_size=2):
        before = torch.cuda.memory_allocated()
        kept = torch.zeros(MIB, device="cuda"), torch.zeros(MIB)
        assert torch.cuda.memory_allocated() - before == 4 * MIB
        copy = kept[0].cpu()
        assert torch.cuda.memory_allocated() - before == 4 * MIB
        moved = kept[1].cuda()
        assert torch.cuda.memory_allocated() - before == 8 * MIB
        assert moved.cuda().data_ptr is not None and copy.device.type == "cpu"
        assert torch.cuda.memory_allocated() - before == 8 * MIB  # it is there already
        del kept
        assert torch.cuda.memory_allocated() - before == 4 * MIB
        assert torch.cuda.max_memory_allocated() - before == 8 * MIB


def test_a_step_without_sharding_counted_by_hand() -> None:
    """1 MiB each: the weight, its two states, x, y, its gradient, the weight's gradient."""
    with fxshard.dry_run(world_size=1) as run:
        layer = nn.Linear(512, 512, bias=False, device="cuda")
        optimizer = torch.optim.AdamW(layer.parameters())
        x = torch.randn(512, 512, device="cuda")
        for _ in range(2):
            layer(x).backward(torch.ones(512, 512, device="cuda"))
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    report = run.memory
    assert report.optimizer == "AdamW" and report.device == "cuda"
    assert report.peak_bytes == 7 * MIB
    assert report.peak_at.phase == "backward"
    # without y and its gradient, with the square root of one state
    assert max(p.peak_bytes for p in report.phases() if p.phase == "optimizer") == 6 * MIB
    assert report.peak_by_category[Category.OPT_STATE] == 2 * MIB
    assert report.peak_by_category[Category.SHARDED_GRAD] == MIB
    assert report.peak_by_category[Category.SHARDED_PARAM] == MIB
    assert report.peak_by_category[Category.INPUTS] == MIB


def test_what_a_kernel_takes_for_itself_counted_by_hand() -> None:
    """1 MiB each: x, its softmax, the gradient of that, of x, and the product of both."""
    with fxshard.dry_run(world_size=1) as run:
        layer = nn.Linear(1, 1, device="cuda")  # a forward, after which the step begins
        for _ in range(2):
            layer(torch.zeros(1, 1, device="cuda"))
            x = torch.randn(512, 512, device="cuda", requires_grad=True)
            x.softmax(-1).backward(torch.ones(512, 512, device="cuda"))
            del x
            run.step()
    found = [each for each in run.memory.kernel_temporaries if "softmax" in each.op]
    assert [each.bytes for each in found] == [MIB]
    assert 0 <= run.memory.peak_bytes - 5 * MIB < 1024


@pytest.mark.filterwarnings("error")
def test_copies_of_modules_counted_by_hand() -> None:
    """Three layers of 1 MiB, two of them copies, and what an average of them copies on the GPU."""
    with fxshard.dry_run(world_size=1) as run:
        layer = nn.Linear(512, 512, bias=False)
        model = nn.Sequential(layer, copy.deepcopy(layer), copy.deepcopy(layer))
        for param in model.parameters():  # as FSDP1 moves them
            param.data = param.to("cuda")
        average = copy.deepcopy(model)
        for each in (model, average):
            assert all(p.detach().device.type == "cuda" for p in each.parameters())
        model(torch.randn(1, 512, device="cuda")).sum().backward()
        run.step()
    held = [each for each in run.memory.first.ranges if each.bytes == MIB and not each.host]
    assert sum(each.died is None for each in held) == 3 + 3 + 3  # weights, averages, gradients
    assert sum(each.category is Category.SHARDED_PARAM for each in held) == 3
    assert run.memory.peak_bytes // MIB == 9
    assert run.device_memory().allocated // MIB >= 9


def test_what_fsdp2_holds(sharded: fxshard.DryRun) -> None:
    report = sharded.memory
    assert isinstance(report, MemoryReport) and report.world_size == 4
    assert [unit.name for unit in report.units] == ["0", "1", "2"]
    steady = report.steady
    shard = MIB // 4
    by_category = {
        category: [each for each in steady.ranges if each.category is category and not each.host]
        for category in Category
    }
    assert [each.bytes for each in by_category[Category.SHARDED_PARAM]] == 3 * [shard]
    assert {each.name for each in by_category[Category.SHARDED_PARAM]} == {
        "0.weight", "1.weight", "2.weight"
    }  # fmt: skip
    # unsharded in bf16, in forward and again in backward
    assert [each.bytes for each in by_category[Category.UNSHARDED_PARAM]] == 6 * [MIB // 2]
    assert [each.bytes for each in by_category[Category.UNSHARDED_GRAD]] == 3 * [MIB // 2]
    assert {each.stream for each in by_category[Category.ALL_GATHER]} == {"all-gather copy-in"}
    assert [each.bytes for each in by_category[Category.SHARDED_GRAD]] == 3 * [shard]
    assert {each.stream for each in by_category[Category.SHARDED_GRAD]} == {"reduce-scatter"}
    assert [each.bytes for each in by_category[Category.OPT_STATE]] == 6 * [shard]
    # the rows of the table, the first step and every view
    assert report.snapshot("1", "Peak Backward")[Category.UNSHARDED_PARAM] > 0
    assert report.first_step_peak_bytes > 0
    assert "AdamW" in str(report.to_dict()) and "1" in report.table() and report.to_csv()
    assert "test_dry_run.py" in str(report.explain_peak())


def test_a_pickled_report_is_the_same_also_of_a_first_step_with_more_calls() -> None:
    with fxshard.dry_run(world_size=2) as run:
        model = nn.Sequential(dense(), dense()).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for micro_batches in (2, 1):
            for _ in range(micro_batches):
                model(torch.zeros(4, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    made = run.memory
    loaded = pickle.loads(pickle.dumps(made))
    assert loaded.to_dict() == made.to_dict()
    assert loaded.table() == made.table()
    for first_step in (True, False):
        assert loaded.rows(first_step=first_step) == made.rows(first_step=first_step) != {}
    assert loaded.device_memory().phases == made.device_memory().phases


def test_the_report_asks_the_run_for_other_settings(sharded: fxshard.DryRun) -> None:
    expandable = AllocatorSettings(expandable_segments=True)
    found = sharded.memory.device_memory(settings=expandable)
    assert found.reserved == sharded.device_memory(expandable).reserved
    needed = found.outside + sharded.device_memory().reserved
    sharded.memory.assert_fits(needed)
    with pytest.raises(DoesNotFitError, match="finds no room in step 1"):
        sharded.memory.assert_fits(found.outside + (2 << 20))
    loaded = pickle.loads(pickle.dumps(sharded.memory))
    with pytest.raises(ConfigError, match="no plan to ask"):
        loaded.device_memory(settings=expandable)


def test_the_allocator(sharded: fxshard.DryRun) -> None:
    plain, expandable = sharded.device_memory(), sharded.device_memory("expandable_segments:True")
    assert plain.requested >= sharded.memory.peak_bytes
    assert plain.requested <= plain.allocated <= plain.active <= plain.reserved
    assert expandable.requested == plain.requested
    streams = {"compute", "all-gather copy-in", "reduce-scatter"}
    assert set(plain.reserved_by_stream) == streams
    assert sum(plain.reserved_by_stream.values()) == plain.reserved
    assert sharded.memory.device_memory().reserved == plain.reserved
    assert sharded.device_memory(capacity=plain.requested // 2).out_of_memory is not None


def test_the_environments_settings(
    sharded: fxshard.DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    expandable = sharded.device_memory("expandable_segments:True").reserved
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
        assert sharded.device_memory().reserved == expandable
        monkeypatch.delenv(name)
    assert sharded.device_memory().reserved != expandable


def test_cuda_graphs_are_refused() -> None:
    graph = torch.cuda.CUDAGraph
    with fxshard.dry_run(world_size=1):
        for make in (torch.cuda.CUDAGraph, torch.cuda.graph_pool_handle, torch.cuda.graph):
            with pytest.raises(CaptureError, match=r"test_dry_run\.py.*pool of its own.*is_dry"):
                make()  # type: ignore[call-arg]
    assert torch.cuda.CUDAGraph is graph


def test_compiled_tensor_parallelism_is_refused() -> None:
    with (
        pytest.raises(CaptureError, match=r"Leave torch\.compile out") as caught,
        fxshard.dry_run(world_size=2),
    ):
        model = nn.Sequential(nn.Linear(8, 8)).cuda()
        parallelize_module(model, init_device_mesh("cuda", (2,)), {"0": ColwiseParallel()})
        torch.compile(model)(torch.randn(2, 8, device="cuda"))
    assert "test_dry_run.py" in str(caught.value)


def test_numbers_are_unknown() -> None:
    with fxshard.dry_run(world_size=2):
        loss = torch.randn(3, device="cuda").sum()
        text = f"{loss.item():.3f} {loss.item() / 2} {-loss.item() + 1}"
        assert text == "unknown unknown unknown"
        with pytest.raises(CaptureError, match=r"test_dry_run\.py:\d+ in test_numbers.*not known"):
            assert loss.item() < 3
        with pytest.raises(CaptureError, match="needs values"):
            assert loss > 3
        with pytest.raises(CaptureError, match="nonzero"):
            torch.randn(3, device="cuda").nonzero()


def test_masks_and_positions_have_values() -> None:
    """As in transformers, which leaves out a mask of ones."""
    with fxshard.dry_run(world_size=2):
        mask = torch.ones(2, 4, dtype=torch.long, device="cuda")
        positions = mask.cumsum(-1) - 1
        assert bool((mask == 1).all()) and positions[0].tolist() == [0, 1, 2, 3]
        mask[:, 2:] = (torch.randn(2, 2, device="cuda") > 0).long()  # and from now on has none
        with pytest.raises(CaptureError, match="not known"):
            assert (mask == 1).all()


def test_attention_and_dropout_are_those_of_cuda() -> None:
    with fxshard.dry_run(world_size=1) as run:
        model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).to("cuda", torch.bfloat16)
        x = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
        model(x).sum().backward()
        run.step()
    operators = {moment.op for moment in run.memory.first.moments}
    assert any("flash_attention" in name for name in operators), operators
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" not in operators
    assert "aten.native_dropout.default" in operators
    assert "aten.bernoulli_.float" not in operators


def test_products_in_float8_into_a_tensor_are_not_computed() -> None:
    """Compiled float8 training calls this form, which torch has no fake form of."""
    product = torch.ops.aten._scaled_mm.out
    with fxshard.dry_run(world_size=2):
        a = torch.empty(16, 32, device="cuda").to(torch.float8_e4m3fn)
        b = torch.empty(48, 32, device="cuda").to(torch.float8_e4m3fn)
        scale, out = torch.ones((), device="cuda"), torch.empty(16, 48, device="cuda")
        assert product(a, b.t(), scale, scale, out_dtype=torch.float32, out=out) is out
        with pytest.raises(RuntimeError, match="same reduction dim"):
            product(a, b, scale, scale, out_dtype=torch.float32, out=out)
        with pytest.raises(RuntimeError, match=r"out is .*\[16, 48\]"):
            product(a, b[:8].t(), scale, scale, out_dtype=torch.float32, out=out)


def test_checkpointing_and_accumulation() -> None:
    from torch.utils.checkpoint import checkpoint

    with fxshard.dry_run(world_size=1, device="cpu") as run:
        model = dense()
        for _ in range(2):
            checkpoint(model, torch.randn(8, 512), use_reentrant=False).sum().backward()
        run.step()
    report = run.memory
    assert report.micro_batches == 2
    assert {phase.phase for phase in report.phases()} >= {"forward", "backward"}
    assert any(moment.recomputed for moment in report.first.moments)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"world_size": 0}, "world_size"),
        ({"world_size": 2, "rank": 2}, "rank=2"),
        ({"world_size": 2, "device": "tpu"}, "expected 'cpu', 'cuda' or one of a100"),
    ],
)
def test_bad_arguments(arguments: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text), fxshard.dry_run(**arguments):
        raise AssertionError("not reached")


def test_refusals() -> None:
    with fxshard.dry_run(world_size=2, device="cpu") as run:
        assert fxshard.is_dry_run()
        with pytest.raises(ConfigError, match="no step of this dry run is over"):
            run.memory  # noqa: B018
        with pytest.raises(ConfigError, match="for the CPU"):
            run.device_memory()
        with pytest.raises(CaptureError, match="does not follow"):
            torch.compile(dense())
        with pytest.raises(ConfigError, match="one is initialised"), fxshard.dry_run(world_size=2):
            raise AssertionError("not reached")
    assert not fxshard.is_dry_run()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    before = (
        nn.Module.__call__, torch.UntypedStorage.resize_, torch.cuda.is_available,
        torch.cuda.Stream, torch.compile, dist.init_process_group, gc.isenabled(),
        F.scaled_dot_product_attention,
    )  # fmt: skip
    try:
        with fxshard.dry_run(world_size=2) as run:
            sharded_steps(run, 1)
            if fails:
                raise RuntimeError("the user's")
    except RuntimeError:
        assert fails
    after = (
        nn.Module.__call__, torch.UntypedStorage.resize_, torch.cuda.is_available,
        torch.cuda.Stream, torch.compile, dist.init_process_group, gc.isenabled(),
        F.scaled_dot_product_attention,
    )  # fmt: skip
    assert after == before
    assert not dist.is_initialized() and not torch.cuda.is_available()
    x = torch.randn(2, 3, requires_grad=True)
    x.square().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())


def test_a_model_may_look_at_its_values_and_read_its_weights_while_it_is_built() -> None:
    with fxshard.dry_run(world_size=2, device="cpu") as run:
        model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        nn.init.trunc_normal_(model.bias, std=0.02)
        assert model.weight.shape == (8, 8)
        run.step()
        model(torch.ones(2, 8)).sum().backward()
        run.step()
        assert run.steps == 1


def test_constants_have_values_until_something_unknown_is_added() -> None:
    with fxshard.dry_run(world_size=2, device="cpu"):
        mask, total = torch.ones(2, 3), torch.zeros(())
        assert mask.bool().all() and total.item() == 0.0
        total += torch.randn(4).sum()
        assert f"{total.item()}" == "unknown"


def test_gradients_are_added_up_in_place() -> None:
    with fxshard.dry_run(world_size=2, device="cpu") as run:
        x = torch.randn(1 << 20, requires_grad=True)
        model = nn.Linear(1, 1)
        model(torch.ones(1, 1))
        y = x * 1
        (y.sin() + y.cos()).sum().backward()
        run.step()
    added = [moment.op for moment in run.memory.first.moments if moment.op.startswith("aten.add")]
    assert added[-1] == "aten.add_.Tensor"
