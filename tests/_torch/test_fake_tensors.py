"""Contracts of what `fxshard._torch.fake_tensors` uses of torch."""

import operator
from typing import Any

import pytest
import torch
import torch._decomp.decompositions as _decompositions
import torch._dynamo
import torch.utils.checkpoint
from torch import Tensor, fx, nn

from fxshard._torch import export, fake_tensors, inductor, modes
from fxshard._torch import sizes as torch_sizes
from tests._torch.shared import aten


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.sample(2)
def test_recurrent_modules_are_traced_as_eager_runs_them(kind: type[nn.RNNBase]) -> None:
    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(3, 4, num_layers=3, dropout=0.5, bidirectional=True)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [self.rnn(x)[0].sum()]

    before = dict(vars(_decompositions))
    with fake_tensors.FakeTensorMode() as mode:
        model, x = Output(), torch.randn(2, 2, 3)
    with mode, torch.enable_grad():
        graph_module, *_ = export.export_joint(model, (x,))
    assert dict(vars(_decompositions)) == before, "what was patched stays patched"
    targets = [node.target for node in graph_module.graph.nodes]
    assert targets.count(aten.native_dropout.default) == 2, "no dropout between the layers"
    fused = [t for t in targets if "mkldnn" in str(t)]
    assert not fused, "an LSTM on floats is oneDNN's inference kernel"


def test_which_convolutions_onednn_takes() -> None:
    """Of fake tensors too, under their mode; torch names them, but for the transposed one."""
    with fake_tensors.FakeTensorMode():
        x, weight = torch.ones(16, 4, 5, 5), torch.ones(4, 4, 3, 3)
        how: Any = ([4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        assert fake_tensors.convolves_with_onednn(x, weight, *how)
        assert fake_tensors.convolves_with_onednn(x, weight, *how[:4], True, [0, 0], 1)
        assert not fake_tensors.convolves_with_onednn(x.double(), weight.double(), *how)


@pytest.mark.parametrize("read", ["item", "bool", "nonzero", "mask"])
def test_fake_tensors_refuse_to_tell_values(read: str) -> None:
    with fake_tensors.FakeTensorMode():
        x = torch.ones(3)
        with pytest.raises(export.DATA_DEPENDENT_ERRORS):
            if read == "item":
                x.sum().item()
            elif read == "bool":
                bool(x.sum() > 0)
            else:
                x.nonzero() if read == "nonzero" else x[x > 0]


def test_fake_tensors_allocate_nothing_and_share_storages() -> None:
    with fake_tensors.FakeTensorMode():
        huge = torch.empty(2**40)
        view = huge.view(2, -1).t()[1:]
        copy = view.clone()
    assert fake_tensors.is_fake(huge) and not fake_tensors.is_fake(torch.ones(1))
    assert huge.untyped_storage().nbytes() == 4 * 2**40, "a fake storage does not tell its size"
    assert view.untyped_storage() is huge.untyped_storage(), (
        "a fake view has another storage object than its base: aliases are told by identity"
    )
    assert copy.untyped_storage() is not huge.untyped_storage()


def test_fake_tensors_made_directly_are_those_of_the_mode() -> None:
    mode = fake_tensors.FakeTensorMode()
    with mode:
        like = torch.empty(4, 6, dtype=torch.bfloat16)
        seen = [like.t(), like[1:3], like.view(-1)]
    made = fake_tensors.fake_empty(mode, (4, 6), torch.bfloat16, torch.device("cpu"))
    views = [
        fake_tensors.fake_view(mode, made, v)
        for v in (Tensor.t, lambda x: x[1:3], lambda x: x.view(-1))
    ]
    for ours, theirs in zip([made, *views], [like, *seen], strict=True):
        assert fake_tensors.is_fake(ours) and ours.fake_mode is mode  # type: ignore[attr-defined]
        assert (ours.shape, ours.stride(), ours.dtype) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
        )
        assert (ours.storage_offset(), ours.device) == (theirs.storage_offset(), theirs.device)
        assert ours.untyped_storage().nbytes() == 48
    assert len({id(t.untyped_storage()) for t in [made, *views]}) == 1
    # The same views, in storages of another that lies alike.
    storage = torch.UntypedStorage(48, device="meta")
    for over, view in zip(
        (fake_tensors.fake_over(mode, v, storage) for v in views), views, strict=True
    ):
        assert fake_tensors.is_fake(over) and over.untyped_storage() is storage
        assert (over.shape, over.stride(), over.dtype) == (view.shape, view.stride(), view.dtype)
        assert (over.storage_offset(), over.device) == (view.storage_offset(), view.device)
    with mode:  # operators take them
        assert (made + views[2].view(4, 6)).shape == (4, 6)


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda", "meta"])
def test_a_fake_tensor_made_directly_is_what_its_constructor_makes(device: str) -> None:
    home = torch.device(device)
    mode = fake_tensors.FakeTensorMode()
    mode.allow_meta = True
    plain = [torch.empty(2, 3, dtype=torch.float16, device="meta") for _ in range(2)]
    theirs = fake_tensors.FakeTensor(mode, plain[0], home)
    ours = fake_tensors._fake(mode, plain[1], home)
    assert type(ours) is type(theirs)
    mine = {**vars(ours)}
    assert mine == vars(theirs) and mine["fake_mode"] is mode
    assert ours.untyped_storage() is plain[1].untyped_storage()
    for said in (
        *(torch._C._dispatch_keys, Tensor.size, Tensor.stride, Tensor.storage_offset),
        *(lambda t: t.dtype, lambda t: t.device, lambda t: t.requires_grad, lambda t: t.is_leaf),
        *(lambda t: t._version, lambda t: t._is_view(), lambda t: t.grad_fn, lambda t: t.layout),
    ):
        assert said(ours) == said(theirs)  # type: ignore[operator]
    mode._allow_unsafe_data_ptr_access = False
    refusals = []
    for make in (fake_tensors.FakeTensor, fake_tensors._fake):
        fake = make(mode, torch.empty(2, device="meta"), home)
        with pytest.raises(RuntimeError) as refused:
            fake.data_ptr()
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]
    # Attributes are each one's own, and no other mode's.
    ours.constant = plain[0]  # type: ignore[attr-defined]
    other = fake_tensors.FakeTensorMode()
    other.allow_meta = True
    third = fake_tensors._fake(other, plain[0], home)
    assert third.fake_mode is other and third.constant is None  # type: ignore[attr-defined]
    assert ours.fake_mode is mode  # type: ignore[attr-defined]


def test_a_fake_tensor_made_directly_computes_and_needs_gradients() -> None:
    mode = fake_tensors.FakeTensorMode()
    ours = fake_tensors.fake_empty(mode, (2, 3), torch.float32, torch.device("cpu"))
    ours.requires_grad_()
    with mode:
        (ours @ torch.ones(3, 4)).sum().backward()
        mask = torch.ones(2, 3, dtype=torch.bool)
    assert ours.grad is not None and ours.grad.shape == (2, 3)
    assert ours.grad.fake_mode is mode  # type: ignore[attr-defined]
    with mode, pytest.raises(export.DATA_DEPENDENT_ERRORS):
        bool(ours.detach().masked_fill(mask, 0.0).sum() > 0)


def test_inductor_source_keeps_eagers_random_kernels() -> None:
    mode = fake_tensors.FakeTensorMode()
    graph = fx.Graph()
    x = graph.placeholder("x")
    drawn = graph.call_function(aten.native_dropout.default, (x, 0.5, True))
    graph.output(tuple(graph.call_function(operator.getitem, (drawn, i)) for i in range(2)))
    with mode:
        values = [torch.ones(4, 8)]
    assert "aten.native_dropout" in inductor.inductor_source(graph, values, mode).source


def test_fakes_in_one_storage_are_aliases() -> None:
    mode = fake_tensors.FakeTensorMode()
    with mode:
        like = torch.empty(4, 6).t()[1:]
    storage = fake_tensors.fake_storage(96)
    where = like.size(), like.stride(), int(like.storage_offset())
    made = [fake_tensors.fake_of(mode, storage, *where, like.dtype, like.device) for _ in range(2)]
    for fake in made:
        assert fake.untyped_storage() is storage or fake.untyped_storage()._cdata == storage._cdata
        assert (fake.shape, fake.stride(), fake.storage_offset()) == ((5, 4), (1, 6), 1)
        assert (fake.dtype, fake.device.type) == (torch.float32, "cpu")
    assert storage.nbytes() == 96
    with mode:
        assert (made[0] + made[1]).shape == (5, 4)


def test_a_storage_of_an_open_size_leaves_it_open() -> None:
    env = torch_sizes.ShapeEnv(duck_shape=False)
    rows = torch_sizes.symbolic_size(env, "rows", 8)
    mode = fake_tensors.FakeTensorMode(shape_env=env)
    storage = fake_tensors.fake_storage(rows * 12)
    where = (rows, 3), (3, 1), 0, torch.float32, torch.device("cpu")
    made = fake_tensors.fake_of(mode, storage, *where)
    assert (
        made.shape[0].node.expr == rows.node.expr and made.untyped_storage().nbytes() == 12 * rows
    )
    assert not env.replacements


def test_values_of_a_literal_under_a_fake_mode() -> None:
    literal = torch.tensor([1.5, 2.0])
    with fake_tensors.FakeTensorMode():
        assert fake_tensors.values_as_text(literal) == "[1.5, 2.0]"


def test_real_tensors_under_a_fake_mode() -> None:
    with fake_tensors.FakeTensorMode():
        assert fake_tensors.is_fake(torch.ones(2))
        with modes.outside_modes():
            assert not fake_tensors.is_fake(torch.ones(2))
        assert fake_tensors.is_fake(torch.ones(2))


def test_checks_of_linear_algebra_are_operators_and_no_dead_code() -> None:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x)

    with fake_tensors.FakeTensorMode():
        x = torch.eye(3, requires_grad=True)
    graph_module, _, _ = export.export_joint(Inverse(), (x,))
    targets = [str(node.target) for node in graph_module.graph.nodes]
    assert "aten._linalg_check_errors.default" in targets


def test_memory_format_is_that_of_the_strides() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert fake_tensors.suggest_memory_format(x) is torch.contiguous_format
    last = x.contiguous(memory_format=torch.channels_last)
    assert fake_tensors.suggest_memory_format(last) is torch.channels_last


def test_fakes_of_meta_tensors_can_be_swapped() -> None:
    """Torch swaps no tensor that is weakly referred to, as its table of fakes does."""
    with fake_tensors.FakeTensorMode() as mode:
        standing = mode.from_tensor(torch.ones(2, device="meta"))
        other = torch.zeros(3)
    first, second = standing.storage_offset(), other.shape
    fake_tensors.swaps_of_fakes()(standing, other)
    assert first == 0 and standing.shape == second and other.shape == (2,)
