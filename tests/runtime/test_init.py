"""Where values come from: meta modules filled one by one, checkpoints, or rank 0."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.config.checked import Config
from fxshard.errors import UnitError
from fxshard.ir.splitting import find_units
from fxshard.runtime.sharding import Sharding, shard_parameters
from fxshard.runtime.world.in_process import InProcessWorld
from tests.fsdp2 import full
from tests.oracles import count_collectives
from tests.runtime.everywhere import EVERYWHERE, run
from tests.runtime.init_cases import Stack, assert_equal, compiled, on_meta, seeded, values
from tests.zoo import MODELS, models


def fill(module: nn.Module) -> None:
    """For modules with and without `reset_parameters`."""
    reset = getattr(module, "reset_parameters", None)
    if reset:
        reset()
    else:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param)


# -- from meta: the values -------------------------------------------------------------------------


def equals_construction(rank: int, world_size: int, build: Callable[[], nn.Module]) -> None:
    plain = seeded(build)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    with count_collectives() as seen:
        ours = compiled(on_meta(build))
    assert seen.count() == 0
    assert torch.equal(torch.get_rng_state(), after)
    assert_equal(values(ours), values(plain))
    assert all(param.requires_grad for param in ours.parameters())


@EVERYWHERE
@pytest.mark.parametrize("build", [Stack, models.ConvNet], ids=lambda build: build.__name__)
def test_meta_models_equal_those_constructed(
    ranks: Any, where: str, build: Callable[[], nn.Module]
) -> None:
    run(ranks, where, equals_construction, build)


def trains_as_filled_in_order(rank: int, world_size: int, name: str) -> None:
    case = MODELS[name]
    plain = case.build()
    init = plain._init_weights if name == "llama" else fill
    for param in plain.parameters():  # Hugging Face marks what it has initialised
        param.__dict__.pop("_is_hf_initialized", None)
    torch.manual_seed(0)
    seen: set[int] = set()
    with torch.no_grad():
        for module in plain.modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if any(id(tensor) not in seen for tensor in own):
                init(module)
            seen.update(map(id, own))
    model = on_meta(case.build)
    torch.manual_seed(0)
    init = model._init_weights if name == "llama" else fill
    ours = compiled(model, units=case.units, param_init_fn=init)
    assert_equal(values(ours), values(plain))
    args, kwargs = case.batch(0, 0)
    losses = []
    for each in (ours, plain):
        torch.manual_seed(1)
        loss = case.loss(each(*args, **kwargs))
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(losses[0], losses[1])
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None and other.grad is not None:
            torch.testing.assert_close(full(mine.grad), other.grad)


@EVERYWHERE
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(3)
def test_every_model_starts_from_meta_and_trains(ranks: Any, where: str, name: str) -> None:
    run(ranks, where, trains_as_filled_in_order, name)


def test_rotary_embeddings_are_filled_too() -> None:
    """Hugging Face's own initialisation does; its buffers are in no checkpoint."""
    model, plain = on_meta(models.llama), models.llama()
    assert model.model.rotary_emb.inv_freq.is_meta
    ours = compiled(model, param_init_fn=model._init_weights)
    rotary = plain.model.rotary_emb
    assert torch.equal(ours.model.rotary_emb.inv_freq, rotary.inv_freq)
    assert torch.equal(ours.model.rotary_emb.original_inv_freq, rotary.original_inv_freq)
    assert "model.rotary_emb.inv_freq" not in ours.state_dict()


def test_an_initialisation_written_by_hand() -> None:
    """What is not in place counts too: here a buffer is assigned."""

    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            torch.nn.init.ones_(param) if param.ndim == 1 else torch.nn.init.normal_(param, 0, 0.02)
        if hasattr(module, "original_inv_freq"):  # the rotary embedding
            module.inv_freq, _ = module.compute_default_rope_parameters(module.config)
            module.original_inv_freq = module.inv_freq.clone()

    ours = compiled(on_meta(models.llama), param_init_fn=init)
    assert torch.equal(ours.model.rotary_emb.inv_freq, models.llama().model.rotary_emb.inv_freq)
    assert torch.equal(values(ours)["model.norm.weight"], torch.ones(32))
    assert 0.01 < values(ours)["lm_head.weight"].std() < 0.03


# -- from meta: what is filled, and what is not ----------------------------------------------------


def test_tied_parameters_are_filled_once_and_stay_tied() -> None:
    model = on_meta(partial(Stack, tied=True))
    assert model.embed.weight is model.head.weight
    calls = []

    def init(module: nn.Module) -> None:
        calls.append(type(module).__name__)
        module.reset_parameters()

    torch.manual_seed(0)
    ours = compiled(model, param_init_fn=init)
    assert ours.head.weight is ours.embed.weight
    assert calls == ["Embedding", *["LayerNorm", "Linear"] * 3, "Linear"]
    first = seeded(lambda: nn.Embedding(17, 13))
    assert torch.equal(ours.head.weight, first.weight)  # the head's own draw is dropped
    assert ours.head.bias.abs().max() > 0


def test_a_module_all_of_whose_tensors_are_tied_is_not_called() -> None:
    model = on_meta(partial(Stack, tied=True))
    model.head.bias = None
    calls: list[nn.Module] = []
    compiled(model, param_init_fn=lambda m: (calls.append(m), m.reset_parameters()))
    assert model.head not in calls and model.embed in calls


def test_a_module_that_stands_in_two_places() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 5)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    plain = seeded(Twice)
    for ours in (compiled(copy.deepcopy(plain)), compiled(seeded(lambda: on_meta(Twice)))):
        assert_equal(values(ours), values(plain))
        x = torch.randn(2, 5)
        torch.testing.assert_close(ours(x), plain(x))


def test_what_has_data_keeps_it() -> None:
    """Though its own module is filled; and modules with all their data are not called."""
    model = seeded(Stack)
    before = values(model)
    model.layers[1].linear.bias = nn.Parameter(torch.empty(13, device="meta"))
    calls: list[nn.Module] = []
    linear = model.layers[1].linear
    ours = compiled(model, param_init_fn=lambda m: (calls.append(m), m.reset_parameters()))
    assert calls == [linear]
    after = values(ours)
    drawn = after.pop("layers.1.linear.bias")
    assert drawn.abs().max() <= 13**-0.5 and not torch.equal(
        drawn, before.pop("layers.1.linear.bias")
    )
    assert_equal(after, before)


def test_buffers_with_data_stay_the_same_tensors() -> None:
    model = on_meta(lambda: nn.Sequential(nn.BatchNorm1d(6)))
    model[0].running_mean = torch.full((6,), 3.0)
    mean = model[0].running_mean
    compiled(model)
    assert model[0].running_mean is mean and mean.tolist() == [3.0] * 6
    assert model[0].running_var.tolist() == [1.0] * 6
    assert model[0].num_batches_tracked.item() == 0


def test_frozen_parameters_stay_frozen() -> None:
    model = on_meta(Stack)
    model.embed.requires_grad_(False)
    ours = compiled(model)
    assert [n for n, p in ours.named_parameters() if not p.requires_grad] == ["embed.weight"]


def test_an_initialisation_that_empties_the_module_anew() -> None:
    """As FSDP1's documentation shows; all that is below comes along, and is dropped again."""
    sizes: list[int] = []

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        sizes.append(sum(p.numel() for p in module.parameters() if not p.is_meta))
        fill(module)

    build = partial(models.Mlp13, depth=2)
    ours = compiled(on_meta(build), param_init_fn=init)
    shapes = {name: p.shape for name, p in build().named_parameters()}
    assert {name: p.shape for name, p in ours.named_parameters()} == shapes
    assert max(sizes) == 13 * 13 + 13 + 13 + 1  # a block: never more than one was there


def test_inside_a_meta_device_block() -> None:
    with torch.device("meta"):
        ours = fxshard.compile(Stack(), world_size=2)
    assert not any(tensor.is_meta for tensor in values(ours).values())


def test_a_call_that_is_traced_before_anything_is_filled() -> None:
    tokens = torch.randint(17, (2, 4))
    torch.manual_seed(0)
    ours = compiled(on_meta(Stack), args=(tokens,))
    torch.testing.assert_close(ours(tokens), seeded(Stack)(tokens))


# -- from meta: refusals ---------------------------------------------------------------------------


class Table(nn.Module):
    """A buffer, and nothing that fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


class Half(nn.Linear):
    """A linear layer with a buffer that its inherited `reset_parameters` does not know."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4))


class Odd(nn.Linear):
    """Whose `reset_parameters` does `what` to it."""

    def __init__(self, what: Callable[[Any], None]) -> None:
        super().__init__(4, 4)
        self.what = what

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            self.what(self)


def other_shape(module: Any) -> None:
    module.weight = nn.Parameter(torch.zeros(4, 5))


def other_dtype(module: Any) -> None:
    module.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))


def removed(module: Any) -> None:
    module.bias = None


def left_on_meta(module: Any) -> None:
    module.to_empty(device="meta")


def boom(module: Any) -> None:
    raise RuntimeError("boom")


REFUSALS: list[tuple[Callable[[], nn.Module], type[Exception], str]] = [
    (Scale, UnitError, r"'1\.gain' is on the meta .* module '1' \(Scale\).*Pass param_init_fn"),
    (Table, UnitError, r"buffer '1\.table' is on the meta .*param_init_fn.*or register the buffer"),
    (
        Half,
        UnitError,
        r"buffer '1\.mask' .*Half\.reset_parameters does not fill it\. Pass",
    ),
    (
        lambda: Odd(other_shape),
        UnitError,
        r"Odd\.reset_parameters made parameter '1\.weight' \[4, 5\] torch\.float32; .* \[4, 4\]",
    ),
    (
        lambda: Odd(other_dtype),
        UnitError,
        r"made parameter '1\.weight' \[4, 4\] torch\.bfloat16; .* torch\.float32",
    ),
    (lambda: Odd(removed), UnitError, r"removed parameter '1\.bias'\. It must fill it"),
    (
        lambda: Odd(left_on_meta),
        UnitError,
        r"left parameter '1\.weight' on meta, but it is needed on 'cpu'\. Fill it in place",
    ),
    (lambda: Odd(boom), RuntimeError, "boom"),
]


@pytest.mark.parametrize(("build", "error", "message"), REFUSALS, ids=[m for *_, m in REFUSALS])
def test_what_cannot_be_filled(
    build: Callable[[], nn.Module], error: type[Exception], message: str
) -> None:
    """The model is left as it was: what was filled before the refusal is on meta again."""
    model = on_meta(lambda: nn.Sequential(nn.BatchNorm1d(4), build(), nn.Linear(4, 4)))
    model[2] = nn.Linear(4, 4)
    parts = (dict(model.named_parameters()), dict(model.named_buffers()))
    data = model[2].weight.clone()
    with pytest.raises(error, match=message) as failure:
        compiled(model)
    if error is RuntimeError:
        assert "to fill module '1'" in failure.value.__notes__[0]
    for before, now in zip(
        parts, (dict(model.named_parameters()), dict(model.named_buffers())), strict=True
    ):
        assert list(now) == list(before)
        assert all(now[name] is tensor for name, tensor in before.items())
    assert torch.equal(model[2].weight, data)


def test_a_parameter_of_the_root_that_nothing_fills() -> None:
    with pytest.raises(UnitError, match=r"'gain' is on the meta .* module '\(root\)' \(Scale\)"):
        compiled(on_meta(Scale))


def test_param_init_fn_may_leave_buffers_and_parameters_alone() -> None:
    """What comes from a checkpoint needs no values before."""
    ours = compiled(
        on_meta(lambda: nn.Sequential(Half(), Scale(), Table())), param_init_fn=lambda m: None
    )
    assert not any(tensor.is_meta for tensor in values(ours).values())


def with_reset_params(module: nn.Module) -> None:
    """As PyTorch's test_fsdp_meta.py has it: it looks whether the module is on meta."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if any(tensor.is_meta for tensor in own):
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()  # type: ignore[operator]


@EVERYWHERE
def test_an_initialisation_that_looks_for_the_meta_device(ranks: Any, where: str) -> None:
    run(ranks, where, looks_for_meta)


def looks_for_meta(rank: int, world_size: int) -> None:
    plain = seeded(Stack)
    torch.manual_seed(0)
    ours = compiled(on_meta(Stack), param_init_fn=with_reset_params)
    assert_equal(values(ours), values(plain))


@pytest.mark.parametrize("write", ["in place", "data", "numpy", "assigned", "on meta only"])
def test_ways_to_fill(write: str, caplog: pytest.LogCaptureFixture) -> None:
    def init(module: nn.Module) -> None:
        for name, param in list(module.named_parameters(recurse=False)):
            if write == "in place":
                param.fill_(3.0)
            elif write == "data":
                param.data.fill_(3.0)
            elif write == "numpy" and not param.is_meta:
                param.detach().numpy()[:] = 3.0
            elif write == "assigned" or (write == "on meta only" and param.is_meta):
                setattr(module, name, nn.Parameter(torch.full(param.shape, 3.0)))

    ours = compiled(on_meta(Stack), param_init_fn=init)
    assert all((value == 3.0).all() for value in values(ours).values())
    assert "without values" not in caplog.text


def test_what_an_initialisation_leaves_out_is_named_and_nan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of two kinds of memory: what we make, and what the function makes."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            module.to_empty(device="cpu", recurse=False)
            module.weight.fill_(1.0)
        elif not isinstance(module, nn.Embedding):
            module.reset_parameters()  # type: ignore[operator]

    plain = seeded(Stack)
    torch.manual_seed(0)
    torch.nn.Embedding(17, 13)
    ours = compiled(on_meta(Stack), param_init_fn=init)
    left = {name for name, value in values(ours).items() if value.isnan().any()}
    assert left == {"embed.weight", *(f"layers.{i}.norm.bias" for i in range(3))}
    for name in left:
        assert f"param_init_fn has left {name!r} without values (NaN)" in caplog.text
        assert values(ours)[name].isnan().all()
    for name in values(plain).keys() - left:
        assert torch.equal(values(ours)[name], values(plain)[name]), name


def test_a_parameter_that_reset_parameters_leaves_out() -> None:
    class Gained(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.gain = nn.Parameter(torch.ones(4))

    message = (
        r"parameter '0\.gain' .*Gained\.reset_parameters does not fill it\. Pass param_init_fn"
    )
    with pytest.raises(UnitError, match=message):
        compiled(on_meta(lambda: nn.Sequential(Gained())))


def test_an_ignored_parameter_on_meta() -> None:
    model = on_meta(Stack)
    units = find_units(model, ignored=["embed.weight"])
    with pytest.raises(UnitError, match=r"'embed\.weight' is ignored, and on the meta device"):
        shard_parameters(Sharding(model, units, InProcessWorld(2), Config()))
    torch.manual_seed(0)
    model.embed = nn.Embedding(17, 13)
    units = find_units(model, ignored=["embed.weight"])
    embed = model.embed.weight
    slots = shard_parameters(Sharding(model, units, InProcessWorld(2), Config()))
    assert "embed.weight" not in slots and model.embed.weight is embed
    assert_equal(values(model), values(seeded(Stack)))
