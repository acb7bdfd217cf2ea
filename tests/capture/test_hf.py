"""What fxshard knows of Hugging Face transformers: caches, experts, checks, outputs.

The branch of attention that tracing must keep is in test_capture.py and test_parity.py.
"""

import copy
import logging
import os
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import fxshard
from fxshard.capture import hf
from fxshard.errors import CaptureError
from tests.zoo import MODELS, models

BATCH = MODELS["llama"].batch(0, 0)


def test_models_that_would_return_a_cache_train_without_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = models.llama(1, use_cache=True)
    eager = copy.deepcopy(model)
    theirs = eager(**BATCH[1])
    theirs.loss.backward()
    ours = fxshard.compile(model, world_size=2)
    with caplog.at_level(logging.INFO, logger="fxshard"):
        output = ours(**BATCH[1])
    output.loss.backward()
    assert type(output) is type(theirs)
    assert theirs.past_key_values is not None and output.past_key_values is None
    assert "outputs hold no past_key_values" in caplog.text
    torch.testing.assert_close(output.loss, theirs.loss, rtol=0, atol=0)
    for ours_p, theirs_p in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours_p.grad, theirs_p.grad, rtol=0, atol=0)
    assert model.config.use_cache is True
    with torch.no_grad():
        assert ours.eval()(**BATCH[1]).past_key_values is None


def test_a_cache_that_the_call_asks_for_is_refused_and_the_config_put_back() -> None:
    model = models.llama(1, use_cache=True)
    with pytest.raises(CaptureError, match=r"past_key_values.*DynamicCache.*leave use_cache=True"):
        fxshard.plan(model, (), BATCH[1] | {"use_cache": True}, world_size=2)
    assert model.config.use_cache is True


def tiny(cls: str, **config: Any) -> nn.Module:
    """A model of transformers, of few parameters."""
    import transformers

    made = getattr(transformers, cls)
    return made(made.config_class(**config))


def test_each_half_of_an_encoder_decoder_gets_its_config_back() -> None:
    sizes = dict(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = tiny("T5ForConditionalGeneration", **sizes, decoder_start_token_id=0)
    parts = (model.config, model.encoder.config, model.decoder.config)
    before = [part.use_cache for part in parts]
    assert before == [True, False, True] and len(set(map(id, parts))) == 3
    with pytest.raises(KeyError), hf.while_tracing(model):
        assert [part.use_cache for part in parts] == [False, False, False]
        raise KeyError
    assert [part.use_cache for part in parts] == before


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_checks_of_values_are_off_while_tracing_only(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(hf.CHECKS_OFF, raising=False)
    if before is not None:
        monkeypatch.setenv(hf.CHECKS_OFF, before)
    from transformers.utils import torch_compilable_check

    with hf.while_tracing(nn.Linear(1, 1)):
        torch_compilable_check(torch.tensor(False), "not looked at")
    assert os.environ.get(hf.CHECKS_OFF) == before


def test_experts_that_look_at_values_are_refused_with_the_way_to_others() -> None:
    sizes = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=2, num_local_experts=2, vocab_size=128)
    torch.manual_seed(0)
    model = tiny("MixtralForCausalLM", **sizes, experts_implementation="eager")
    eager = model(**BATCH[1]).loss
    with pytest.raises(CaptureError, match=r"expert_hit(.|\n)*set_experts_implementation") as told:
        fxshard.plan(model, (), BATCH[1], world_size=2)
    assert "('grouped_mm') or 'batched_mm'" in str(told.value)
    for way in ("grouped_mm", "batched_mm"):  # and what it says works
        model.set_experts_implementation(way)
        ours = fxshard.compile(copy.deepcopy(model), world_size=2)
        torch.testing.assert_close(ours(**BATCH[1]).loss, eager, rtol=1e-6, atol=0)


@pytest.mark.parametrize("as_tuple", [False, True])
def test_outputs_are_of_the_type_that_the_call_asks_for(as_tuple: bool) -> None:
    kwargs = BATCH[1] | {"output_hidden_states": True, "return_dict": not as_tuple}
    model = models.llama(2, use_cache=True)
    theirs = model(**kwargs)
    ours = fxshard.compile(model, world_size=2)(**kwargs)
    assert type(ours) is type(theirs)
    if as_tuple:
        assert len(ours) == len(theirs) - 1  # transformers leaves out what is None
    else:
        assert len(ours.hidden_states) == len(theirs.hidden_states) == 3
        assert [key for key in theirs if key not in ours] == ["past_key_values"]


def test_models_without_experts_are_not_told_of_them() -> None:
    model = models.llama(1)
    assert model.config._experts_implementation == "eager"
    assert hf.remedy_of_values(model) == ""


def test_methods_on_whole_are_found_below_a_users_own() -> None:
    class Saves(LlamaForCausalLM):
        def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
            super().save_pretrained(*args, **kwargs)

    class Unlike(nn.Module):
        def generate(self) -> None: ...

    assert hf.methods_on_whole(Saves) == ("generate", "save_pretrained", "push_to_hub")
    assert hf.methods_on_whole(Unlike) == ()


def test_checkpointing_that_is_turned_off_and_on_again_is_what_it_was() -> None:
    """As TRL does around the forward of a reference. A hook is left behind each time."""
    torch.manual_seed(0)
    eager = models.llama(1)
    eager.gradient_checkpointing_enable()
    ours = fxshard.compile(copy.deepcopy(eager), world_size=2)
    for _ in range(3):
        for model in (eager, ours):
            model.zero_grad()
            logits = model(**BATCH[1]).logits
            with torch.no_grad():
                model.gradient_checkpointing_disable()
                model(**BATCH[1])
            model.gradient_checkpointing_enable()
            logits.square().mean().backward()  # forward runs again: not from the loss
        for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert len(ours.get_input_embeddings()._forward_hooks) == 4
    assert len(ours._fxshard.variants) == 3  # from the loss, from the logits, without gradients
