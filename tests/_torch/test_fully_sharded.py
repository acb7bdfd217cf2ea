"""`fxshard._torch.fully_sharded` and `remembered_device`: what they rely on in torch."""

import contextlib
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import pipelining
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param
from torch.distributed.tensor import DTensor, Shard, _op_schema
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxshard._torch import autograd, fully_sharded, modes, remembered_device, trees
from fxshard._torch.fake_tensors import UnsupportedOperatorException, swaps_of_fakes
from fxshard._torch.process_groups import fake_process_group
from fxshard.dryrun.streams import OF_FSDP


class Told:
    """A `Listener` that writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, type]] = []

    @contextlib.contextmanager
    def _around(self, what: str, module: nn.Module) -> Iterator[None]:
        self.heard.append((what, type(module)))
        yield

    def gathering(self, module: nn.Module) -> Any:
        return self._around("gather", module)

    def copying_out(self, module: nn.Module) -> Any:
        return self._around("copy out", module)

    def reducing(self, module: nn.Module, grads: list[torch.Tensor]) -> Any:
        assert grads
        return self._around("reduce", module)

    def unsharded(self, module: nn.Module) -> None:
        self.heard.append(("unsharded", type(module)))

    def resharded(self, module: nn.Module) -> None:
        self.heard.append(("resharded", type(module)))


def test_fsdp2_tells_what_it_does() -> None:
    told = Told()
    with fake_process_group(0, 2), fully_sharded.watched(told):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0])
        fully_shard(model)
        model(torch.randn(2, 4)).sum().backward()
        assert [type(module) for module, _ in fully_sharded.units_of(model)] == [
            type(model), type(model[0])
        ]  # fmt: skip
        weight = model[0].weight
        assert isinstance(weight, DTensor)
        assert fully_sharded.local_of(weight) is weight._local_tensor
    order = [what for what, kind in told.heard if issubclass(kind, nn.Linear)]
    gathered = ["gather", "copy out", "unsharded"]
    assert order == [*gathered, "resharded", *gathered, "resharded", "reduce"]
    assert {what for what, _ in told.heard} == {*gathered, "resharded", "reduce"}


def test_methods_of_a_mesh_compute_under_fake_tensors() -> None:
    with fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        with fully_sharded.meshes_with_values(), FakeTensorMode(allow_non_fake_inputs=True):
            assert mesh["b"].size() == 2 and list(mesh.get_coordinate() or ()) == [0, 0]


def test_attributes_are_put_back() -> None:
    class Owner:
        kept = 1

    changes: list[fully_sharded.Change] = [(Owner, "kept", 2), (Owner, "new", 3)]
    with fully_sharded.replaced(changes):
        assert vars(Owner)["kept"] == 2 and vars(Owner)["new"] == 3
    assert Owner.kept == 1 and not hasattr(Owner, "new")


def test_nodes_are_numbered_as_forward_makes_them() -> None:
    seen: list[int | None] = []
    x = torch.ones(2, requires_grad=True)
    number = autograd.next_node_number()
    y = x * 2
    assert autograd.next_node_number() == number + 1
    y.register_hook(lambda grad: seen.append(autograd.running_node_number()))
    y.sum().backward()
    assert seen == [number + 1] or seen == [number]  # the hook runs before its node, in the last
    assert autograd.running_node_number() is None


def test_a_fake_tensor_says_where_it_was_asked_to_be() -> None:
    with FakeTensorMode(), remembered_device.remembered(lambda tensor: tensor.dim() == 2):
        there, here = torch.zeros(2, 2), torch.zeros(2)
        assert there.device == torch.device("cuda", 0) and here.device == torch.device("cpu")
        assert (there + 1).shape == (2, 2)  # torch's own code sees the CPU
        assert torch._C._cuda_getCurrentRawStream(0) == 0
        optimizer = torch.optim.AdamW([nn.Parameter(there)])
        optimizer.param_groups[0]["params"][0].grad = torch.zeros(2, 2)
        optimizer.step()
    assert FakeTensor.device.fget is not None  # type: ignore[attr-defined]
    assert there.device == torch.device("cpu")


def test_fake_parameters_that_are_referred_to_weakly_are_exchanged() -> None:
    import weakref

    with FakeTensorMode():
        first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).half())
        kept = weakref.ref(first)
        swaps_of_fakes()(first, second)
    assert first.dtype is torch.half and kept() is first


def test_fsdp2_takes_its_streams_from_the_handle() -> None:
    made: list[int] = []

    class Handle:
        Event = torch.cpu.Event if hasattr(torch.cpu, "Event") else torch.Event

        def Stream(self, priority: int = 0) -> Any:
            made.append(priority)
            return torch.cpu.Stream()

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.cpu, name)

    with fake_process_group(0, 2), fully_sharded.device_handle(Handle()):
        model = nn.Linear(4, 4)
        fully_shard(model)
        model(torch.randn(2, 4))
    # all-gather copy-in, all-gather, reduce-scatter, all-reduce: `streams.OF_FSDP`
    assert len(made) == len(OF_FSDP)


def test_shapes_of_dtensors_are_worked_out_unseen() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(modes.is_wrapper(kind) for kind in types):
                return NotImplemented
            sizes.extend(tuple(arg.shape) for arg in trees.tree_iter(args) if hasattr(arg, "shape"))
            return func(*args, **(kwargs or {}))

    sizes: list[tuple[int, ...]] = []
    with fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        sharded = DTensor.from_local(torch.zeros(3, 5), mesh)
        sharded = sharded.redistribute(mesh, [Shard(0)])
        with fully_sharded.propagation_unseen(), FakeTensorMode(allow_non_fake_inputs=True), Seen():
            torch.ops.aten.tanh(sharded)
    assert sizes and set(sizes) == {tuple(sharded.to_local().shape)}


def test_shapes_of_dtensors_on_gpus_that_are_not_there() -> None:
    """Outside of it, C++ asks for CUDA's library: ``uniform_`` copies on the mesh's device."""
    cuda = types.SimpleNamespace(device_type="cuda")
    meta = TensorMeta(torch.Size((4, 4)), (4, 1), torch.float32)
    spec = types.SimpleNamespace(mesh=cuda, tensor_meta=meta)
    with fully_sharded.propagation_unseen():
        made = _op_schema._rebuild_tensor_from_dtensor_meta(spec)
    assert (made.device.type, tuple(made.shape)) == ("cpu", (4, 4))


def test_clipping_takes_many_fakes_at_once() -> None:
    seen: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Names():
        tensors = [torch.empty(2), torch.empty(3)]
        torch.nn.utils.get_total_norm(tensors)
        assert not any("_foreach" in name for name in seen)
        with remembered_device.foreach_takes_fakes():
            torch.nn.utils.get_total_norm(tensors)
    assert "aten._foreach_norm.Scalar" in seen


def test_the_answers_for_a_device() -> None:
    questions: list[Any] = []

    class Asked(remembered_device.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            questions.append(remembered_device.asked_device(func, args, lambda tensor: True))
            return func(*args, **(kwargs or {}))

    x = torch.zeros(2, requires_grad=True)
    with Asked():
        _ = x.device, x.is_cuda, x.is_cpu, x + 1
    assert questions == [torch.device("cuda", 0), True, False, None]
    assert not remembered_device.asks_for_cpu(inspect.currentframe())
    assert not remembered_device.asks_for_cpu(None)


def test_function_modes_see_what_backward_calls() -> None:
    seen: list[Any] = []

    class Seen(remembered_device.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: torch.neg(grad))
    mode = Seen()
    with mode, remembered_device.in_backward_too(mode):
        y.sum().backward()
    assert torch.neg in seen


def test_operators_that_say_nothing_of_their_results() -> None:
    with torch.library._scoped_library("fxshard_tests", "DEF") as library:
        library.define("silent(Tensor x) -> Tensor")
        library.impl("silent", lambda x: x.clone(), "CPU")
        with FakeTensorMode(), pytest.raises(UnsupportedOperatorException):
            torch.ops.fxshard_tests.silent(torch.zeros(2))


def test_operators_below_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    with modes.below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


def test_a_subclass_on_a_remembered_device_is_on_the_cpu_for_autograd() -> None:
    """Where torch has no CUDA, C++ ends the process that asks a tensor on CUDA for its stream."""
    with FakeTensorMode(), remembered_device.remembered(lambda tensor: True):
        inside = torch.empty(2, 3)
        assert inside.device.type == "cuda"
        wrapped = TwoTensor(inside, inside).requires_grad_()
        (gradient,) = torch.autograd.grad((wrapped * 2).sum(), wrapped)
        assert isinstance(gradient, TwoTensor)


def test_functions_that_ask_for_the_cpu_are_where_they_are_looked_for() -> None:
    known = [*remembered_device.ON_CPU, *remembered_device.ON_DEVICE]
    importlib.import_module("torch._functorch._aot_autograd.runtime_wrappers")
    importlib.import_module("fxshard.dryrun.recorder")
    importlib.import_module("fxshard.capture.trace")
    assert [
        name for name in known if not any(module.startswith(name) for module in sys.modules)
    ] == []
    wraps, unsharded = remembered_device.WRAPPING
    assert callable(getattr(_fsdp_common, wraps))
    assert callable(getattr(_fsdp_param.FSDPParam, unsharded))


def test_only_what_fsdp2_has_sharded_has_its_state() -> None:
    module = nn.Linear(2, 2)
    assert fully_sharded.state_of(module) is None
    with fake_process_group(0, 2):
        fully_shard(module)
        assert fully_sharded.state_of(module) is fully_shard.state(module)  # type: ignore[attr-defined]


def test_a_state_is_found_where_schedules_look_for_fsdp2s() -> None:
    """Beside those of torch's other composable functions."""
    module, state = checkpoint(nn.Linear(2, 2)), object()
    assert fully_shard.state(module) is None  # type: ignore[attr-defined]
    fully_sharded.set_state(module, state)
    assert fully_shard.state(module) is state  # type: ignore[attr-defined]
    rest = nn.Linear(2, 2)
    rest.__dict__.update(fully_sharded.without_state(module.__dict__))
    fully_sharded.forget_state(module)
    for each in (module, rest):
        assert fully_shard.state(each) is None  # type: ignore[attr-defined]
        assert checkpoint.state(each).enable_hook
    asked = inspect.getsource(pipelining.PipelineStage.perform_reduce_grad)
    for name in (
        "_state_ctx.all_states",
        "post_backward()",
        "_root_post_backward_final_callback()",
    ):
        assert name in asked
