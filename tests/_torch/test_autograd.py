"""Contracts of what `fxshard._torch.autograd` uses of torch."""

import weakref
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from fxshard._torch import autograd
from tests._torch.shared import aten


def test_a_backward_knows_which_leaves_get_gradients() -> None:
    weight, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[list[bool]] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
            return weight * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            seen.append([autograd.will_accumulate(node) for node, _ in ctx.next_functions])
            return grad, grad

    Product.apply(weight, x).sum().backward()
    Product.apply(weight, x).sum().backward(inputs=[x])
    torch.autograd.grad(Product.apply(weight, x * 1).sum(), x)
    assert seen == [[True, True], [False, True], [False, True]]
    torch.autograd.grad(Product.apply(weight, x).sum(), weight)
    assert seen[-1] == [False, False]


def test_plain_torch_functions_pass_subclasses_by() -> None:
    seen: list[Any] = []

    class Loud(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    loud = torch.ones(2).as_subclass(Loud)
    with autograd.plain_torch_functions():
        assert type(loud + 1) is Tensor and not seen
    assert type(loud + 1) is Loud and seen


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_seen(register: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not autograd.has_gradient_hooks(parameter)
    getattr(parameter, register)(lambda _: None)
    assert autograd.has_gradient_hooks(parameter)


def test_gradients_arrive_in_a_list_whose_items_die_when_they_are_taken_out() -> None:
    seen: list[Any] = []

    class Doubled(torch.autograd.Function):
        boxed_grads_call = True

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Tensor | None:
            grads = autograd.boxed(given)
            grad = grads.pop()
            assert grad is not None and not grads
            seen.append(weakref.ref(grad.untyped_storage()))
            result = grad * 2
            del grad
            seen.append(seen[0]() is None)
            return result

    leaf = torch.ones(3, requires_grad=True)
    (Doubled.apply(leaf) * 3).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [6.0, 6.0, 6.0]
    assert seen[1] is autograd.BOXED_GRADS


def test_versions_count_changes_in_place_through_views() -> None:
    base = torch.ones(4)
    before = autograd.version(base)
    base[:2].add_(1)
    assert autograd.version(base) > before
    with torch.inference_mode():
        assert autograd.version(torch.ones(1)) == 0


def test_saved_tensors_hooks_on_top() -> None:
    assert autograd.saved_tensors_hooks_on_top() is None

    def pack(tensor: Tensor) -> Tensor:
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert autograd.saved_tensors_hooks_on_top() == (pack, unpack)


def test_saved_tensors_hooks_are_noted_as_they_are_entered() -> None:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks
    with autograd.noting_saved_tensors_hooks() as entered:
        with hooks(pack, pack), torch.autograd.graph.save_on_cpu():
            pass
        checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)
    with hooks(pack, pack):
        pass
    assert [name.rpartition(".")[2] for name in entered] == ["pack", ""]


@pytest.mark.parametrize(
    ("hooks", "name"),
    [
        (lambda: torch.autograd.graph.saved_tensors_hooks(_doubled, _doubled), "._doubled"),
        (torch.autograd.graph.save_on_cpu, ""),
        (torch.autograd.graph.allow_mutation_on_saved_tensors, None),
    ],
    ids=["the user's", "save_on_cpu", "torch's"],
)
def test_hooks_for_saved_tensors_that_are_on_top(hooks: Any, name: str | None) -> None:
    assert autograd.saved_tensors_hooks_around() == []
    with hooks():
        found = autograd.saved_tensors_hooks_around()
    assert found == ([] if name is None else [f"{__name__}{name}" if name else ""])


def test_hooks_for_saved_tensors_may_be_forbidden() -> None:
    allowed = [autograd.saved_tensors_hooks_allowed()]
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        allowed.append(autograd.saved_tensors_hooks_allowed())
        with pytest.raises(RuntimeError, match="not here"):
            torch.autograd.graph.saved_tensors_hooks(_doubled, _doubled).__enter__()

    def asking(x: Tensor) -> Tensor:
        allowed.append(autograd.saved_tensors_hooks_allowed())
        return x

    torch.func.grad(asking)(torch.ones(()))
    assert allowed == [True, False, False]


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def test_compiled_autograd_asks_for_keys_before_anything_runs() -> None:
    """An error there leaves the graph as it was, and the engine too."""
    ran: list[str] = []

    class Kept(autograd.UncapturedFunction):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def refuse_capture(ctx: Any) -> NoReturn:
            raise LookupError("refused by name")

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            ran.append("ours")
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: ran.append("before"))
    y = Kept.apply(x.sin()).cos()
    y.register_hook(lambda _: ran.append("after"))
    torch._dynamo.reset()
    for _ in range(2):
        captured = compiled_autograd._enable(torch.compile(backend="eager"))
        with pytest.raises(LookupError, match="refused by name"), captured:
            y.sum().backward()
    assert not ran and x.grad is None
    y.sum().backward()
    assert ran == ["after", "ours", "before"] and x.grad is not None


def test_in_backward_is_true_in_hooks_of_the_engine() -> None:
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append(autograd.in_backward()))
    x.square().sum().backward()
    assert seen == [True] and not autograd.in_backward()


def test_a_wrapper_has_a_form_and_its_operators_come_to_dispatch() -> None:
    seen: list[Any] = []

    class Wrapper(Tensor):
        __torch_function__ = autograd.NO_TORCH_FUNCTION

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return args[0]

    shape = ((2, 3), (1, 2), 4, torch.bfloat16, torch.device("cpu"), False)
    made = autograd.wrapper(Wrapper, *shape)
    assert (tuple(made.shape), made.stride(), made.storage_offset()) == shape[:3]
    assert (made.dtype, made.device, made.requires_grad) == shape[3:]
    torch.relu(made)
    assert seen == [aten.relu.default]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * 2


def test_a_custom_function_is_told_from_the_formula_of_an_operator() -> None:
    with torch.library._scoped_library("fxshard_contract", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
        formula = partial(lambda ctx, grad: grad * 2)
        torch.library.register_autograd("fxshard_contract::doubled", formula, lib=library)
        x = torch.ones(2, requires_grad=True)
        operator = torch.ops.fxshard_contract.doubled(x)
        assert "fxshard_contract_doubled" in operator.grad_fn.name()
        assert not autograd.is_custom_function(operator.grad_fn)
        assert autograd.is_custom_function(Doubled.apply(x).grad_fn)
        assert not autograd.is_custom_function((x * 2).grad_fn)


def test_plain_torch_functions() -> None:
    class Asked(Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    asked = torch.ones(2).as_subclass(Asked)
    with autograd.plain_torch_functions():
        assert torch.equal(asked + 1, torch.full((2,), 2.0)) and asked.shape == (2,)
    with pytest.raises(AssertionError):
        asked + 1


def test_a_backward_knows_if_its_graph_is_kept() -> None:
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append(autograd.keeps_graph()))
    loss = x.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [True, False]


def test_a_function_is_called_when_backward_is_over() -> None:
    seen: list[str] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append("leaf"))
    out = x.square()
    out.register_hook(
        lambda grad: autograd.when_backward_ends(lambda: seen.append(f"end {x.grad.item():.0f}"))  # type: ignore[union-attr]
    )
    out.sum().backward()
    out = x.square()
    out.sum().backward()
    assert seen == ["leaf", "end 2", "leaf"]
