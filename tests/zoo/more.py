"""More models, for the matrix of memory tests: `MATRIX` is `MODELS` and as many again.

`MODELS` stays small, since many tests take every model of it. Hugging Face models are tiny ones of
their real classes, without a download.
"""

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from tests.zoo import MODELS, Case, cross_entropy, float_batch, output_loss
from tests.zoo import labelled_token_batch as labelled
from tests.zoo import token_batch as tokens
from tests.zoo.handmade import MixtureOfExperts, Recurrent, Twice, UNet, lora, save_matmuls
from tests.zoo.handmade_rows import moe_loss, twice_loss
from tests.zoo.transformers_batches import image_batch, translation_batch
from tests.zoo.transformers_configs import DECODER
from tests.zoo.transformers_rows import hf


def checkpointed(case: Case, *, selective: bool = False) -> nn.Module:
    """`case`'s model with a checkpoint around each unit: transformers' own, or torch's wrapper."""
    model = case.build()
    more: dict[str, Any] = {"context_fn": save_matmuls} if selective else {}
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, **more}
        )
        return model
    globs = case.units or []
    for path in [p for p, _ in model.named_modules() if any(fnmatchcase(p, g) for g in globs)]:
        if not any(path.count(".") == glob.count(".") for glob in globs):
            continue  # "*" stops at a dot
        parent, _, name = path.rpartition(".")
        block = checkpoint_wrapper(
            model.get_submodule(path), checkpoint_impl=CheckpointImpl.NO_REENTRANT, **more
        )
        setattr(model.get_submodule(parent), name, block)
    return model


def causal(name: str, cls: str, *, dropout: bool = False, **config: Any) -> Case:
    """A causal language model of transformers with `model.layers`."""
    units = config.pop("units", ["model.layers.*"])
    return Case(
        name,
        build=partial(hf, cls, **config, use_cache=False),
        batch=partial(labelled, vocab=64),
        loss=output_loss,
        units=units,
        dropout=dropout,
    )


MORE: dict[str, Case] = {
    case.name: case
    for case in (
        causal("qwen3", "Qwen3ForCausalLM", **DECODER, head_dim=8),
        causal(
            "gemma3", "Gemma3ForCausalLM", **DECODER, head_dim=8, sliding_window=4, pad_token_id=0
        ),
        causal(
            "gpt2",
            "GPT2LMHeadModel",
            vocab_size=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLM",
            units=["transformer.h.*"],
            dropout=True,
        ),
        causal(
            "mixtral",
            "MixtralForCausalLM",
            **DECODER,
            num_local_experts=4,
            experts_implementation="grouped_mm",
        ),
        causal(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            **DECODER,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            experts_implementation="batched_mm",
        ),
        Case(
            "bert",
            build=partial(
                hf,
                "BertForMaskedLM",
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                max_position_embeddings=32,
            ),
            batch=partial(labelled, vocab=64),
            loss=output_loss,
            units=["bert.encoder.layer.*"],
            dropout=True,
        ),
        Case(
            "t5",
            build=partial(
                hf,
                "T5ForConditionalGeneration",
                vocab_size=64,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
                use_cache=False,
            ),
            batch=partial(translation_batch, vocab=64),
            loss=output_loss,
            units=["encoder.block.*", "decoder.block.*"],
            dropout=True,
        ),
        Case(
            "vit",
            build=partial(
                hf,
                "ViTForImageClassification",
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                image_size=8,
                patch_size=4,
                num_labels=10,
            ),
            batch=partial(image_batch, shape=(2, 3, 8, 8), classes=10),
            loss=output_loss,
            units=["vit.layers.*"],
        ),
        Case(
            "gru",
            build=Recurrent,
            batch=partial(tokens, vocab=32, shape=(2, 5)),
            loss=cross_entropy,
            units=["layers.*"],
        ),
        Case(
            "lora",
            build=lora,
            batch=partial(labelled, vocab=128),
            loss=output_loss,
            units=["model.layers.*"],
        ),
        Case(
            "twice",
            build=Twice,
            batch=partial(float_batch, shape=(4, 13)),
            loss=twice_loss,
            units=["blocks.*"],
        ),
        Case(
            "moe",
            build=MixtureOfExperts,
            batch=partial(tokens, vocab=32),
            loss=moe_loss,
            units=["layers.*"],
        ),
        Case(
            "unet",
            build=UNet,
            batch=partial(float_batch, shape=(2, 3, 8, 8)),
            loss=cross_entropy,
            units=["down", "up"],
        ),
    )
}
MATRIX: dict[str, Case] = MODELS | MORE
