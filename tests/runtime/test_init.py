"""Where values come from: meta modules filled one by one, checkpoints, or rank 0."""

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard._torch import process_groups
from fxshard.config import Config
from fxshard.errors import FxshardError, RankMismatchError, UnitError
from fxshard.ir.units import find_units
from fxshard.runtime.sharding import shard_parameters
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld
from tests.fsdp2 import full
from tests.oracles import count_collectives, profiler_peak_bytes
from tests.zoo import MODELS, models

EVERYWHERE = pytest.mark.parametrize("where", ["in_process", "2 ranks"])


def run(ranks: Any, where: str, check: Callable[..., None], *args: Any) -> None:
    """`check(rank, world_size, *args)` without a process group, or on 2 gloo ranks."""
    if where == "in_process":
        assert not dist.is_initialized()
        check(0, 2, *args)
    else:
        ranks(2).run(check, *args)


def compiled(model: nn.Module, **options: Any) -> Any:
    return fxshard.compile(model, **({} if dist.is_initialized() else {"world_size": 2}) | options)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def values(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters, also under their tied names, and buffers."""
    both = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: full(tensor) for name, tensor in both}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Bitwise; NaN is NaN."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert not ours[name].is_meta, name
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        left, right = (t.reshape(-1).contiguous().view(torch.uint8) for t in (ours[name], value))
        assert torch.equal(left, right), name


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    """int64 tokens -> logits; constructed in the order of its modules."""

    def __init__(self, width: int = 13, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 17)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def fill(module: nn.Module) -> None:
    """For modules with and without `reset_parameters`."""
    reset = getattr(module, "reset_parameters", None)
    if reset:
        reset()
    else:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param)


# -- from meta: the values ------------------------------------------------------------------------


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


# -- from meta: what is filled, and what is not ---------------------------------------------------


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


# -- from meta: refusals --------------------------------------------------------------------------


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
        shard_parameters(model, units, InProcessWorld(2), Config())
    torch.manual_seed(0)
    model.embed = nn.Embedding(17, 13)
    units = find_units(model, ignored=["embed.weight"])
    embed = model.embed.weight
    slots = shard_parameters(model, units, InProcessWorld(2), Config())
    assert "embed.weight" not in slots and model.embed.weight is embed
    assert_equal(values(model), values(seeded(Stack)))


# -- from meta: memory, in bytes counted by hand --------------------------------------------------

WIDTH, DEPTH = 256, 12
LINEAR = 4 * (WIDTH * WIDTH + WIDTH)
LAYER = LINEAR + 4 * 2 * WIDTH  # and a norm
STACK = DEPTH * LAYER + 2 * 4 * 17 * WIDTH + 4 * 17  # and embedding and head
SMALL = 16_000  # a scalar here and there; the flat storages of units round up to whole rows


def big(**options: Any) -> nn.Module:
    return Stack(width=WIDTH, depth=DEPTH, **options)


@pytest.mark.parametrize("world_size", [2, 8])
def test_peak_of_a_meta_start_is_the_shards_and_one_module(world_size: int) -> None:
    assert sum(4 * p.numel() for p in big().parameters()) == STACK
    with process_groups.fake_process_group(0, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        made: list[Any] = []
        model = on_meta(big)
        peak = profiler_peak_bytes(lambda: made.append(fxshard.compile(model, mesh=mesh)))
    counted = STACK // world_size + LINEAR
    assert counted <= peak <= counted + SMALL
    assert peak < STACK * (0.6 if world_size == 2 else 0.25)


def test_peak_in_one_process_is_the_model_and_one_module() -> None:
    made: list[Any] = []
    model = on_meta(big)
    peak = profiler_peak_bytes(lambda: made.append(fxshard.compile(model, world_size=4)))
    assert STACK + LINEAR <= peak <= STACK + LINEAR + 2 * SMALL


# -- checkpoints into meta models -----------------------------------------------------------------


def loads_a_checkpoint(rank: int, world_size: int, path: str) -> None:
    source = seeded(big)
    want = values(source)
    saved = compiled(source)
    dcp.save(get_model_state_dict(saved), checkpoint_id=path)
    del saved, source
    made: list[Any] = []

    def load() -> None:
        ours = compiled(on_meta(big), param_init_fn=lambda module: None)
        state = get_model_state_dict(ours)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(ours, state)
        made.append(ours)

    peak = profiler_peak_bytes(load)
    assert_equal(values(made[0]), want)
    assert peak < 0.75 * STACK, peak / STACK  # half of it are the shards


def test_a_sharded_checkpoint_goes_into_a_meta_model(ranks: Any) -> None:
    with tempfile.TemporaryDirectory() as path:
        ranks(2).run(loads_a_checkpoint, path)


def loads_a_state_dict(rank: int, world_size: int) -> None:
    """A sharded one, by load_state_dict; and rank 0's full one, by torch's state dict API."""
    want = values(seeded(big))
    state = compiled(seeded(big)).state_dict()
    ours = compiled(on_meta(big), param_init_fn=lambda module: None)
    ours.load_state_dict(state)
    assert_equal(values(ours), want)
    made: list[Any] = []
    whole = dict(seeded(big).state_dict()) if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def compile_it() -> None:
        made.append(compiled(on_meta(big), param_init_fn=lambda module: None))

    peak = profiler_peak_bytes(compile_it)
    assert peak < 0.75 * STACK, peak / STACK  # torch's broadcasts may take more, as gloo pleases
    set_model_state_dict(made[0], whole, options=options)
    assert_equal(values(made[0]), want)


def test_a_state_dict_goes_into_a_meta_model(ranks: Any) -> None:
    ranks(2).run(loads_a_state_dict)


# -- from rank 0 ----------------------------------------------------------------------------------


class Buffers(nn.Module):
    """Parameters of two dtypes and buffers of many; one is a view of few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.half = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.register_buffer("flags", torch.rand(6) > 0.5)
        self.register_buffer("count", torch.randint(100, ()))
        self.register_buffer("short", torch.randint(100, (3,), dtype=torch.int16))
        self.register_buffer("wave", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("wide", torch.randn(1, 4).expand(3, 4), persistent=False)
        self.register_buffer("absent", None)
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.normal_()


def from_rank_0(
    rank: int, world_size: int, build: Callable[[], nn.Module], others: str
) -> tuple[dict[str, Tensor], list[int]]:
    want = values(seeded(build, seed=0))
    model = seeded(build, seed=rank)
    if rank and others == "meta":
        model = on_meta(build)
    if rank and others == "partly meta":
        list(model.children())[1].to("meta")
    stays = {name: buffer for name, buffer in model.named_buffers() if buffer.is_contiguous()}
    draws = torch.get_rng_state()
    with count_collectives() as seen:
        ours = fxshard.compile(model, sync_module_states=True)
    assert torch.equal(torch.get_rng_state(), draws)  # nothing was initialised
    assert_equal(values(ours), want)
    whole = [*model.parameters(), *model.buffers()]
    assert seen.kinds() == ["broadcast"] * len(whole)
    for name, buffer in stays.items():
        assert buffer.is_meta or ours.get_buffer(name) is buffer
    return values(ours), [call.nbytes for call in seen.calls]


@pytest.mark.parametrize("others", ["other values", "meta", "partly meta"])
@pytest.mark.parametrize("build", [Buffers, models.ConvNet, partial(Stack, tied=True)])
def test_rank_0_gives_its_values_to_all(
    ranks: Any, build: Callable[[], nn.Module], others: str
) -> None:
    (zero, sent), (one, received) = ranks(2).run(from_rank_0, build, others)
    assert_equal(one, zero)
    assert sent == received
    model = build()
    whole = [*model.parameters(), *model.buffers()]
    assert sorted(sent) == sorted(t.numel() * t.element_size() for t in whole)


def test_one_rank_alone(ranks: Any) -> None:
    ranks(1).run(from_rank_0, Buffers, "other values")


def test_on_three_ranks(ranks: Any) -> None:
    results = ranks(3).run(from_rank_0, Buffers, "meta")
    assert all(sent == results[0][1] for _, sent in results)


def on_a_2d_mesh(rank: int, world_size: int) -> None:
    """Replicas are given rank 0's values too, over the other dimension."""
    model = seeded(Buffers, seed=rank) if rank % 2 else on_meta(Buffers)
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with count_collectives() as seen:
        shard_parameters(
            model,
            find_units(model),
            C10dWorld(mesh),
            Config(sync_module_states=True, param_init_fn=fill_noisily),
        )
    both = [*model.parameters(), *model.buffers()]
    assert seen.kinds() == ["broadcast"] * 2 * len(both)
    torch.manual_seed(0)
    rank_0 = on_meta(Buffers)
    shard_parameters(
        rank_0, find_units(rank_0), InProcessWorld(2), Config(param_init_fn=fill_noisily)
    )
    assert_equal(values(model), values(rank_0))


def fill_noisily(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        with torch.no_grad():
            tensor.copy_(torch.randint(2, tensor.shape))


def test_on_a_2d_mesh(ranks: Any) -> None:
    ranks(4).run(on_a_2d_mesh)


def fills_on_rank_0_only(rank: int, world_size: int) -> None:
    calls: list[str] = []

    def init(module: nn.Module) -> None:
        calls.append(type(module).__name__)
        module.reset_parameters()

    torch.manual_seed(rank)
    ours = fxshard.compile(on_meta(Stack), sync_module_states=True, param_init_fn=init)
    assert len(calls) == (0 if rank else 8)
    assert_equal(values(ours), values(seeded(Stack)))


def test_a_meta_model_is_filled_on_rank_0_only(ranks: Any) -> None:
    ranks(2).run(fills_on_rank_0_only)


def issues_nothing(rank: int, world_size: int) -> None:
    model = seeded(Buffers, seed=rank)
    with count_collectives() as seen:
        fxshard.compile(model)
    assert seen.count() == 0


def test_without_the_option_no_collective_is_issued(ranks: Any) -> None:
    ranks(2).run(issues_nothing)


def test_in_one_process_there_is_nothing_to_give() -> None:
    ours = compiled(seeded(Buffers), sync_module_states=True)
    assert_equal(values(ours), values(seeded(Buffers)))


def peak_from_rank_0(rank: int, world_size: int) -> int:
    model = on_meta(big) if rank else seeded(big)
    made: list[Any] = []
    return profiler_peak_bytes(
        lambda: made.append(fxshard.compile(model, sync_module_states=True)),
    )


def test_peak_from_rank_0_is_the_shards_and_one_parameter(ranks: Any) -> None:
    for peak in ranks(2).run(peak_from_rank_0):
        assert peak <= STACK // 2 + 4 * WIDTH * WIDTH + SMALL


def refuses_alone(rank: int, world_size: int) -> str:
    """What each rank says if one of them cannot go on; the models stay as they were."""
    model = seeded(Stack, seed=rank)
    if rank == 1:
        model.head.weight.register_hook(lambda grad: None)
    before = list(model.parameters())
    data = [param.detach().clone() for param in before]
    with pytest.raises(FxshardError) as failure:
        fxshard.compile(model, sync_module_states=True)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, data, strict=True))
    assert isinstance(failure.value, RankMismatchError)
    return str(failure.value)


def test_a_rank_that_refuses_stops_all_before_the_first_broadcast(ranks: Any) -> None:
    for text in ranks(2).run(refuses_alone):
        assert "rank 1 'parameter 'head.weight' has a hook" in text


def has_another_buffer(rank: int, world_size: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("seen", torch.zeros(4 + rank))
    with pytest.raises(RankMismatchError) as failure:
        fxshard.compile(model, sync_module_states=True)
    return str(failure.value)


def test_buffers_that_do_not_fit(ranks: Any) -> None:
    for text in ranks(2).run(has_another_buffer):
        assert "rank 0 has 'buffer seen [4] torch.float32', rank 1 'buffer seen [5]" in text
