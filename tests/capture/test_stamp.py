"""Truncate and stamp: equal to the flat capture, byte for byte, or captured flat with one line."""

import contextlib
import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import fxshard
from fxshard.capture import fakes, trace
from fxshard.capture.repeat import write
from fxshard.capture.repeat.ghosts import Ghost
from fxshard.errors import CaptureError
from fxshard.ir import dump, tags
from fxshard.ir.program import Program
from fxshard.ir.splitting import find_units
from tests.zoo import deep
from tests.zoo import transformers_configs as configs
from tests.zoo.architecture import ADAMW
from tests.zoo.deep import HALF, STAMPED, Block, Net, x
from tests.zoo.transformers_batches import TOKENS, TRANSLATION, images
from tests.zoo.transformers_rows import TRANSFORMERS, hf, hf_checkpointed
from tests.zoo.traps import DEEP_TRAPS, TRAPS

FLAT = "is captured block by block"


class Seen:
    """What one call of `both` saw.

    Attributes:
        stamped: how many captures were stamped.
        lines: lines of the log that say why one was not.
    """

    def __init__(self, stamped: int, lines: list[str]) -> None:
        self.stamped, self.lines = stamped, lines


def planned(model: nn.Module, call: Any, options: dict[str, Any]) -> tuple[list[str], Any]:
    """All that a plan says, as text, and its report."""
    plan = fxshard.plan(model, *call, world_size=2, **options)
    text = [dump.text(plan.program), plan.dump(fold=False)]
    return [*text, *tags_of(plan.program)], plan.memory.to_dict()


def captured(model: nn.Module, call: Any, options: dict[str, Any]) -> tuple[list[str], Any]:
    """The program before any pass, as text, and the storages of its values."""
    training = torch.is_grad_enabled()
    program = trace.capture(
        model, *call, units=find_units(model), world_size=2, training=training, **options
    )
    # torch keeps results of fake kernels without the offset and bytes of their storage: what comes
    # again differs from what is first, here or in an earlier test. The first pass sets it right.
    fakes.correct(program)
    return [dump.text(program), *tags_of(program)], storages(program)


def tags_of(program: Program) -> list[str]:
    """What the text of a program leaves out."""
    lines = [str(node.meta["fxshard"]) for node in program.graph.nodes]
    return [*lines, *map(str, program.calls), str(program.results), str(program.signature)]


def storages(program: Program) -> list[Any]:
    """Per node, of each tensor: number and bytes of its storage, and how it lies there."""
    numbers: dict[int, int] = {}
    return [
        [
            (
                numbers.setdefault(id(t.untyped_storage()), len(numbers)),
                *(t.untyped_storage().nbytes(), t.storage_offset(), t.shape, t.stride(), t.dtype),
                *(t.device, t.requires_grad),
            )
            for t in tags.tensors(node.meta.get("val"))
        ]
        for node in program.graph.nodes
    ]


def both(
    build: Callable[[], nn.Module],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: Callable[..., tuple[list[str], Any]] = captured,
    **options: Any,
) -> Seen:
    """Capture a model as it is and with FXSHARD_FLAT_CAPTURE=1, and compare all that is `said`."""
    written: list[Any] = []
    original = write.written

    def counted(*args: Any) -> Any:
        found = original(*args)
        written.append(found)
        return found

    monkeypatch.setattr(write, "written", counted)
    found: list[Any] = []
    lines: list[list[str]] = []
    for flat in ("0", "1"):
        monkeypatch.setenv("FXSHARD_FLAT_CAPTURE", flat)
        caplog.clear()
        torch.manual_seed(0)
        model = build()
        before, numbers = state(model), torch.get_rng_state()
        with caplog.at_level(logging.INFO, "fxshard"):
            found.append(said(model, call, options))
        assert state(model) == before
        assert torch.equal(torch.get_rng_state(), numbers)
        lines.append([r.getMessage() for r in caplog.records if FLAT in r.getMessage()])
    monkeypatch.setattr(write, "written", original)
    assert "\n".join(found[0][0]).splitlines() == "\n".join(found[1][0]).splitlines()
    assert found[0][1] == found[1][1]
    assert not lines[1]
    return Seen(len(written), lines[0])


def state(model: nn.Module) -> list[Any]:
    """Every attribute of every module, by identity; collections with what is in them."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return id(value), [(key, id(item)) for key, item in value.items()]
        return (id(value), list(map(id, value))) if isinstance(value, list) else id(value)

    return [{name: of(v) for name, v in m.__dict__.items()} for m in model.modules()]


# -- what is stamped -------------------------------------------------------------------------------


SLOW = (
    *("in a Sequential", "two lists", "a loss each", "an index unused", "eval", "mixed precision"),
    *("open sizes", "shard_grad_op", "for CUDA", "in a Sequential, by name"),
)


def some_slow(names: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Names, those of `slow` marked so."""
    return [pytest.param(n, marks=[pytest.mark.slow] if n in slow else []) for n in names]


@pytest.mark.parametrize("name", some_slow(STAMPED, SLOW))
@pytest.mark.sample(3)
def test_equals_the_flat_capture(name: str, monkeypatch: Any, caplog: Any) -> None:
    build, options = STAMPED[name]
    said = planned if options else captured
    seen = both(build, ((x(),), {}), monkeypatch, caplog, said, **options)
    assert seen.lines == []
    assert seen.stamped == 1


def test_without_gradients(monkeypatch: Any, caplog: Any) -> None:
    with torch.no_grad():
        seen = both(Net, ((x(),), {}), monkeypatch, caplog)
    assert seen.stamped == 1


# -- traps: depth or index enters the mathematics --------------------------------------------------


FAST_TRAPS = (
    *("1 / len", "i % 4 == 3", "one block is special", "the index scales", "linear drop rates"),
    *("states collected", "reversed", "counter", "custom backward", "hook on a tensor"),
    *("what is saved", "hook on a node", "a refusal is caught", "another default dtype"),
    *("counter of the class, round and round", "iterator", "a block of two names"),
    *("literal", "dense", "one hooked in backward", "one frozen"),
)


@pytest.mark.parametrize("name", some_slow(TRAPS, TRAPS.keys() - set(FAST_TRAPS)))
@pytest.mark.sample(3)
def test_a_trap_is_captured_flat(name: str, monkeypatch: Any, caplog: Any) -> None:
    seen = both(TRAPS[name], ((x(),), {}), monkeypatch, caplog)
    assert seen.stamped == 0
    assert len(seen.lines) == 1


# The same with more blocks, of which some stretch does repeat: right, whatever is done.


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP_TRAPS)
def test_what_repeats_beside_a_trap_is_stamped(name: str, monkeypatch: Any, caplog: Any) -> None:
    seen = both(DEEP_TRAPS[name], ((x(),), {}), monkeypatch, caplog)
    assert seen.stamped + len(seen.lines) == 1


def test_numbers_of_python_are_refused_as_before(caplog: Any) -> None:
    model = deep.LayerDrop()
    before, drawn = state(model), random.getstate()
    with pytest.raises(CaptureError, match="draws from random"):
        fxshard.plan(model, (x(),), world_size=2)
    assert state(model) == before
    assert random.getstate() == drawn


def test_a_model_that_fails_says_so_and_is_as_it_was() -> None:
    model = Net(deep.Fails)
    before = state(model)
    with pytest.raises(CaptureError, match="the sixth block"):
        fxshard.plan(model, (x(),), world_size=2)
    assert state(model) == before


@contextlib.contextmanager
def broken_rehearsals() -> Iterator[None]:
    """A tool of the user's hooks all modules, and cannot look into a tensor of a rehearsal."""

    def look(module: nn.Module, args: Any) -> None:
        if isinstance(module, Block) and module.index == 5 and isinstance(args[0], Ghost):
            raise TypeError("this hook reads values")

    hook = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()


def test_a_rehearsal_that_breaks_leaves_nothing_behind(monkeypatch: Any, caplog: Any) -> None:
    """The flat capture that follows is that of a model that nobody has rehearsed."""
    with broken_rehearsals():
        seen = both(lambda: Net(deep.Leaving), ((x(),), {}), monkeypatch, caplog)
    assert (seen.stamped, len(seen.lines)) == (0, 1)
    assert "this hook reads values" in seen.lines[0]
    assert deep.Leaving.count == 0


def test_a_parent_that_counts_its_blocks_is_captured_flat(monkeypatch: Any, caplog: Any) -> None:
    seen = both(deep.Restless, ((x(),), {}), monkeypatch, caplog)
    assert seen.stamped == 0
    assert len(seen.lines) == 1


def test_shallow_models_are_not_looked_at(monkeypatch: Any, caplog: Any) -> None:
    seen = both(lambda: Net(depth=6), ((x(),), {}), monkeypatch, caplog)
    assert (seen.stamped, seen.lines) == (0, [])


def test_compile_stamps_too(monkeypatch: Any) -> None:
    """Gradients of a stamped program are those of eager."""
    written: list[Any] = []
    original = write.written
    monkeypatch.setattr(write, "written", lambda *a: written.append(a) or original(*a))
    torch.manual_seed(0)
    model = Net()
    loss = model(x())
    loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = fxshard.compile(model, world_size=2)
    found = compiled(x())
    found.backward()
    assert written
    assert torch.equal(found, loss)
    with compiled.summon_full_params(with_grads=True):
        for name, p in compiled.named_parameters():
            assert torch.equal(p.grad, wanted[name]), name


# -- transformers ----------------------------------------------------------------------------------

DEEP = dict(num_hidden_layers=8)
# name -> class, configuration, batch, options of `fxshard.plan`
MODELS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", configs.LM | DEEP, TOKENS, {}),
    "llama, 16 layers": (
        *("LlamaForCausalLM", configs.LM | {"num_hidden_layers": 16}, TOKENS),
        {"checkpoint": "full", "mixed_precision": HALF, "optimizer": ADAMW},
    ),
    "qwen3": ("Qwen3ForCausalLM", configs.HEAD8 | DEEP, TOKENS, {}),
    "gpt2": ("GPT2LMHeadModel", configs.GPT | {"n_layer": 8}, TOKENS, {}),
    "vit": ("ViTForImageClassification", configs.VIT | DEEP, images(8), {}),
    "bert": ("BertForMaskedLM", configs.ENCODER | DEEP, TOKENS, {}),
    "mixtral": ("MixtralForCausalLM", configs.LM | configs.EXPERTS | DEEP, TOKENS, {}),
    "t5": (
        *("T5ForConditionalGeneration", configs.T5 | {"num_layers": 9, "num_decoder_layers": 8}),
        *(TRANSLATION, {}),
    ),
    "bart": (
        "BartForConditionalGeneration",
        *(configs.BART | {"encoder_layers": 8, "decoder_layers": 8}, TRANSLATION, {}),
    ),
    "gemma3, every other layer": (
        "Gemma3ForCausalLM",
        configs.HEAD8
        | dict(sliding_window=4, num_hidden_layers=12)
        | dict(layer_types=["sliding_attention", "full_attention"] * 6),
        *(TOKENS, {}),
    ),
    "gemma3, every third layer, and one more": (
        "Gemma3ForCausalLM",
        configs.HEAD8
        | dict(sliding_window=4, num_hidden_layers=16)
        | dict(layer_types=((["sliding_attention"] * 2 + ["full_attention"]) * 6)[:16]),
        *(TOKENS, {}),
    ),
    "swin": (
        "SwinForImageClassification",
        *(configs.WINDOWS | dict(depths=[1, 14], drop_path_rate=0.0), images(16), {}),
    ),
    "neox": ("GPTNeoXForCausalLM", configs.ENCODER | DEEP, TOKENS, {}),
    "llama, open sizes": (
        *("LlamaForCausalLM", configs.LM | DEEP, TOKENS),
        {"dynamic": {n: [("input_ids", i), ("labels", i)] for i, n in enumerate(("b", "s"))}},
    ),
}


@pytest.mark.parametrize("name", some_slow(MODELS, MODELS.keys() - {"llama"}))
def test_transformers_equal_the_flat_capture(name: str, monkeypatch: Any, caplog: Any) -> None:
    cls, config, batch, options = MODELS[name]
    call, said = batch(0, 0), captured if name == "llama" else planned
    seen = both(lambda: hf(cls, **config), call, monkeypatch, caplog, said, **options)
    assert seen.lines == []
    assert seen.stamped == 1


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_their_checkpointing_too(reentrant: bool, monkeypatch: Any, caplog: Any) -> None:
    def build() -> nn.Module:
        return hf_checkpointed("LlamaForCausalLM", reentrant=reentrant, **configs.LM | DEEP)

    seen = both(build, TOKENS(0, 0), monkeypatch, caplog, planned)
    assert seen.lines == []
    assert seen.stamped == 1


DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
DEPTHS += ("encoder_layers", "decoder_layers")


def deepened(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration of two layers for nine, or for twelve where it says what each is."""
    kinds = config.keys() & {"layer_types", "layers_block_type"}
    depth = 12 if kinds or "attention_types" in config else 9
    found = {k: depth if k in DEPTHS else v for k, v in config.items()}
    for key, value in config.items():
        if isinstance(value, dict):
            found[key] = deepened(value)
    for key in kinds:
        found[key] = config[key] * 6
    if "attention_types" in config:
        found["attention_types"] = [[["global", "local"], 6]]
    return found


SWEEP = {
    name: row if isinstance(row, tuple) else (row, TOKENS)
    for family in ("decoder-only", "mixture of experts", "state space and hybrid")
    for name, row in TRANSFORMERS[family].items()
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEP)
def test_any_architecture_equals_the_flat_capture(name: str, monkeypatch: Any, caplog: Any) -> None:
    """Stamped or not: the same program, or the same refusal."""
    config, batch = SWEEP[name]
    said: list[str] = []

    def captured_or_refused(*args: Any) -> Any:
        try:
            return captured(*args)
        except CaptureError as error:
            said.append(str(error).splitlines()[0])
            return [said[-1]], None

    call = batch(0, 0)
    build = partial(hf, name, **deepened(config))
    seen = both(build, call, monkeypatch, caplog, captured_or_refused)
    assert seen.stamped + len(seen.lines) >= (0 if said else 1)
