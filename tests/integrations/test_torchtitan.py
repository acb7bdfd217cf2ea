"""torchtitan's models by fxshard: what is registered, what it becomes, and what is refused.

torchtitan is not needed: files of its layout and names stand in for it, and prove what is ours.
Where it can be imported (0.2, from a clone on PYTHONPATH), the same runs with the real one, too.
What it trains: `benchmarks/torchtitan_curves.py`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import fsdp

import fxshard
from fxshard._torch import process_groups

OURS = "fxshard.integrations.torchtitan"
FILES = {
    "protocols/train_spec.py": """
from dataclasses import dataclass
from typing import Any

@dataclass
class TrainSpec:
    model_cls: type
    model_args: Any
    parallelize_fn: Any
    pipelining_fn: Any
    build_loss_fn: Any

registered = {}

def register_train_spec(name, spec):
    assert name not in registered
    registered[name] = spec
""",
    "models/llama3/infra.py": """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

def apply_fsdp(model, mesh):
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard([model.norm, model.output], mesh=mesh)
    fully_shard(model, mesh=mesh)

def parallelize_llama(model, parallel_dims, job_config):
    if job_config is None:
        raise ValueError("no configuration")
    if parallel_dims.tp_enabled:
        parallelize_module(model, parallel_dims.get_mesh("tp"), {"output": ColwiseParallel()})
    apply_fsdp(model, parallel_dims.get_mesh("fsdp"))
    return model
""",
    "models/llama3/__init__.py": """
from torch import nn
from torchtitan.protocols.train_spec import TrainSpec
from .infra import parallelize_llama

class Transformer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(size, size) for i in range(2)})
        self.norm, self.output = nn.LayerNorm(size), nn.Linear(size, size)

def get_train_spec():
    return TrainSpec(Transformer, {"debugmodel": 4}, parallelize_llama, len, print)
""",
    # its apply_fsdp is another model's
    "models/qwen3/__init__.py": """
from torchtitan.models.llama3 import TrainSpec, Transformer
from torchtitan.models.llama3.infra import apply_fsdp

def parallelize_qwen3(model, parallel_dims, job_config):
    apply_fsdp(model, parallel_dims.get_mesh("fsdp"))
    return model

def get_train_spec():
    return TrainSpec(Transformer, {"debugmodel": 4}, parallelize_qwen3, len, print)
""",
    "models/__init__.py": "",
    "protocols/__init__.py": "",
    "__init__.py": "",
}
REAL = importlib.util.find_spec("torchtitan") is not None


def config(**compile: Any) -> Any:
    if REAL and "stand_in" not in sys.modules["torchtitan"].__file__:
        made = importlib.import_module("torchtitan.config").JobConfig()
    else:
        made = SimpleNamespace(compile=SimpleNamespace(enable=False, components=[]))
        made.parallelism = SimpleNamespace(expert_parallel_comm_backend="standard")
    vars(made.compile).update(compile)
    return made


@pytest.fixture(params=["stand-in", *["torchtitan"] * REAL])
def specs(
    request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """What importing ours has registered, by name."""

    def forget(*packages: str) -> None:
        for name in [name for name in sys.modules if name.startswith(packages)]:
            del sys.modules[name]

    if request.param == "torchtitan":
        importlib.import_module("benchmarks.torchtitan_curves").imported()  # on the CPU
    else:
        forget("torchtitan")
        for path, text in FILES.items():
            file = tmp_path / "stand_in" / "torchtitan" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.syspath_prepend(tmp_path / "stand_in")
    importlib.import_module(OURS)
    train_spec = sys.modules["torchtitan.protocols.train_spec"]
    yield getattr(train_spec, "registered", None) or train_spec._extra_train_specs
    forget("torchtitan", OURS)


@pytest.fixture
def dims(specs: dict[str, Any]) -> Iterator[Any]:
    """torchtitan's own, of two ranks, if it is there."""
    with process_groups.fake_process_group(0, 2):
        if "torchtitan.distributed" in sys.modules:
            from torchtitan.distributed import ParallelDims

            yield ParallelDims(1, 2, 1, 1, 1, 1, 1, 2)
            return
        yield stand_in(torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))


def stand_in(mesh: Any) -> Any:
    """For torchtitan's `ParallelDims`, of some dimensions of a mesh."""
    on = {f"{name}_enabled": name in mesh.mesh_dim_names for name in ("fsdp", "tp", "cp", "ep")}
    return SimpleNamespace(get_mesh=lambda name: mesh[name], **on)


def dims_beside_tensor_parallelism(specs: dict[str, Any]) -> Any:
    """torchtitan's own, of 2 x 2 ranks, if it is there."""
    if "torchtitan.distributed" in sys.modules:
        from torchtitan.distributed import ParallelDims

        return ParallelDims(1, 2, 1, 2, 1, 1, 1, 4)
    names = ("fsdp", "tp")
    return stand_in(torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


def model_of(spec: Any) -> Any:
    args = spec.model_args["debugmodel"]
    if getattr(args, "enable_weight_tying", False):  # torch 2.13 and fxshard refuse its two calls
        args.enable_weight_tying = False
    with torch.device("meta"):
        return spec.model_cls(args)


def sharded(model: Any) -> list[str]:
    """FQNs of what `fully_shard` was called on."""
    return [fqn for fqn, part in model.named_modules() if isinstance(part, fsdp.FSDPModule)]


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_a_model_is_torchtitans_but_for_what_shards_it(
    name: str, specs: dict[str, Any], dims: Any
) -> None:
    ours = specs[f"fxshard.{name}"]
    torchs = importlib.import_module(f"torchtitan.models.{name}").get_train_spec()
    changed = {k for k, value in vars(ours).items() if vars(torchs)[k] != value}
    assert changed - {"pipelining_fn"} == {"parallelize_fn"}
    assert ours.pipelining_fn is None  # which torchtitan's trainer refuses by itself
    model = ours.parallelize_fn(model_of(ours), dims, config())
    theirs = torchs.parallelize_fn(model_of(torchs), dims, config())
    assert isinstance(model, fxshard.FxshardModule)
    assert not isinstance(theirs, fxshard.FxshardModule), "only while ours is called"
    assert len(sharded(model)) > 3 and sharded(model) == sharded(theirs)


def test_tensor_parallelism_is_torchtitans(specs: dict[str, Any]) -> None:
    """What it trains: `benchmarks/torchtitan_curves.py`, tests/distributed/test_tensor_parallel."""
    ours, torchs = (
        specs["fxshard.llama3"],
        importlib.import_module("torchtitan.models.llama3").get_train_spec(),
    )
    with process_groups.fake_process_group(0, 4):
        dims = dims_beside_tensor_parallelism(specs)
        model = ours.parallelize_fn(model_of(ours), dims, config())
        theirs = torchs.parallelize_fn(model_of(torchs), dims, config())
        for (name, param), (_, other) in zip(
            model.named_parameters(), theirs.named_parameters(), strict=True
        ):
            found = param.device_mesh.mesh_dim_names, param.placements, param.to_local().shape
            wanted = other.device_mesh.mesh_dim_names, other.placements, other.to_local().shape
            assert found == wanted, name
        assert "tp" in model.output.weight.device_mesh.mesh_dim_names


def test_after_an_error_torchs_function_is_back(specs: dict[str, Any], dims: Any) -> None:
    ours = specs["fxshard.llama3"]
    apply_fsdp = ours.parallelize_fn.__closure__[0].cell_contents.__globals__["apply_fsdp"]
    with pytest.raises(AttributeError):
        ours.parallelize_fn(torch.nn.Linear(2, 2), dims, config())
    assert apply_fsdp.__globals__["fully_shard"] is fsdp.fully_shard


@pytest.mark.parametrize(
    ("flag", "option"),
    [
        ("cp_enabled", "context_parallel_degree: "),
        ("fsdp_enabled", "data_parallel_shard_degree is 1: "),
    ],
)
def test_other_parallelisms_are_refused(flag: str, option: str, specs: dict[str, Any]) -> None:
    flags = {"fsdp_enabled": True, "cp_enabled": False, "ep_enabled": False}
    asked = SimpleNamespace(**{**flags, flag: not flags[flag]})
    with pytest.raises(fxshard.ConfigError, match=rf"^parallelism\.{option}.*torchtitan's own"):
        specs["fxshard.llama3"].parallelize_fn(torch.nn.Linear(2, 2), asked, config())


def test_kernels_that_send_tokens_are_refused(specs: dict[str, Any]) -> None:
    flags = {"fsdp_enabled": True, "cp_enabled": False, "ep_enabled": True}
    asked = config()
    asked.parallelism.expert_parallel_comm_backend = "deepep"
    with pytest.raises(fxshard.ConfigError, match=r"comm_backend is 'deepep': .*'standard'"):
        parallelize = specs["fxshard.llama3"].parallelize_fn
        parallelize(torch.nn.Linear(2, 2), SimpleNamespace(**flags), asked)


def test_experts_get_the_rows_that_the_kernel_would_give_them(specs: dict[str, Any]) -> None:
    """As loops say it; a run of rows may be empty, an expert and the end padded."""
    fill = importlib.import_module(f"{OURS}.experts").fill_indices
    for seed in range(20):
        drawn = torch.Generator().manual_seed(seed)
        ranks, experts = 1 + seed % 3, 1 + seed % 4
        counts = torch.randint(0, 4, (ranks, experts), generator=drawn)
        sizes = counts.sum(0) // 8 * 8 + 8
        offsets, starts = sizes.cumsum(0) - sizes, counts.flatten().cumsum(0) - counts.flatten()
        wanted = [-1] * (int(sizes.sum()) + 8)
        for expert in range(experts):
            place = int(offsets[expert])
            for rank in range(ranks):
                for row in range(int(counts[rank, expert])):
                    wanted[place] = int(starts.view(ranks, experts)[rank, expert]) + row
                    place += 1
        found = fill(counts.flatten(), starts, offsets, experts, ranks, len(wanted))
        assert found.dtype is torch.int32 and found.tolist() == wanted


def test_compiled_blocks_are_refused(specs: dict[str, Any], dims: Any) -> None:
    asked = config(enable=True, components=["model"])
    with pytest.raises(fxshard.ConfigError, match=r"^compile\.components has 'model'"):
        specs["fxshard.llama3"].parallelize_fn(torch.nn.Linear(2, 2), dims, asked)
