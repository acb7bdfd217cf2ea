"""Architectures of Hugging Face transformers, as data: rows of the table.

Each of transformers is a tiny one of its real class with random weights, made from its
configuration: nothing is downloaded. What a row does not say is the class's own default,
`use_cache` and the implementations of attention and of experts among them: it is what users call.
Dropout is on wherever the class has it. A new architecture is one entry in `TRANSFORMERS`;
`python -m benchmarks.models_page` then writes docs/models.md again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from tests.zoo import Case, output_loss
from tests.zoo.architecture import LOOKS, Architecture
from tests.zoo.transformers_batches import (
    CLASSIFIED,
    TOKENS,
    TRANSLATION,
    captions_batch,
    images,
    pairs_batch,
    pixels_only,
    segmentation_batch,
    spectrogram_batch,
    spectrum_batch,
    speech_batch,
)
from tests.zoo.transformers_configs import (
    BART,
    DECODER,
    ENCODER,
    EVEN,
    EXPERTS,
    GPT,
    HEAD8,
    LATENT,
    LM,
    MAMBA2,
    PYRAMID,
    SPEECH,
    STAGES,
    T5,
    TOWER,
    TOWERS,
    VIT,
    WINDOWS,
)


def hf(name: str, **config: Any) -> nn.Module:
    """The model of class `name`, in training mode, fp32."""
    import transformers  # 2 s, so only for those who build it

    cls = getattr(transformers, name)
    return cls(cls.config_class(**config)).train()


def scalars_as_vectors(name: str, **config: Any) -> nn.Module:
    """The same with `logit_scale` of shape [1]: what the refusal of scalars tells users to do."""
    model = hf(name, **config)
    model.logit_scale = nn.Parameter(model.logit_scale.detach().reshape(1))
    return model


def hf_checkpointed(name: str, *, reentrant: bool, **config: Any) -> nn.Module:
    """The same under transformers' own gradient checkpointing."""
    model = hf(name, **config)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


# family -> class of transformers -> its configuration, or that and a batch
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "decoder-only": {
        "ApertusForCausalLM": LM,
        "ArceeForCausalLM": LM,
        "BioGptForCausalLM": ENCODER | dict(activation_dropout=0.1),
        "BitNetForCausalLM": LM,
        "BloomForCausalLM": dict(
            vocab_size=64,
            hidden_size=32,
            n_layer=2,
            n_head=4,
            hidden_dropout=0.1,
            attention_dropout=0.1,
        ),
        "CTRLLMHeadModel": GPT | dict(dff=48),
        "CodeGenForCausalLM": GPT | dict(rotary_dim=4, attn_pdrop=0.1, resid_pdrop=0.1),
        "CohereForCausalLM": LM,
        "Cohere2ForCausalLM": LM,
        "DiffLlamaForCausalLM": DECODER,
        "Ernie4_5ForCausalLM": HEAD8,
        "Exaone4ForCausalLM": HEAD8,
        "FalconForCausalLM": ENCODER | dict(hidden_dropout=0.1, attention_dropout=0.1),
        "GPT2LMHeadModel": GPT,
        "GPTBigCodeForCausalLM": GPT,
        "GPTJForCausalLM": GPT | dict(rotary_dim=4, attn_pdrop=0.1, resid_pdrop=0.1),
        "GPTNeoForCausalLM": dict(
            vocab_size=64,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=32,
            window_size=4,
            attention_dropout=0.1,
            resid_dropout=0.1,
            bos_token_id=0,
            eos_token_id=0,
        ),
        "GPTNeoXForCausalLM": ENCODER | dict(attention_dropout=0.1, hidden_dropout=0.1),
        "GemmaForCausalLM": HEAD8,
        "Gemma2ForCausalLM": HEAD8 | dict(sliding_window=4),
        "Gemma3ForCausalLM": HEAD8 | dict(sliding_window=4),
        "GlmForCausalLM": HEAD8,
        "Glm4ForCausalLM": HEAD8,
        "GraniteForCausalLM": LM,
        "HeliumForCausalLM": HEAD8,
        "HunYuanDenseV1ForCausalLM": HEAD8,
        "Lfm2ForCausalLM": LM,
        "LlamaForCausalLM": LM,
        "MinistralForCausalLM": HEAD8,
        "MistralForCausalLM": LM | dict(sliding_window=4),
        "MptForCausalLM": dict(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=32),
        "NemotronForCausalLM": LM,
        "OPTForCausalLM": ENCODER | dict(ffn_dim=48, word_embed_proj_dim=32, pad_token_id=1),
        "OlmoForCausalLM": LM,
        "Olmo2ForCausalLM": LM,
        "Olmo3ForCausalLM": LM,
        "OpenAIGPTLMHeadModel": GPT,
        "PersimmonForCausalLM": LM,
        "PhiForCausalLM": LM,
        "Phi3ForCausalLM": LM,
        "Qwen2ForCausalLM": LM,
        "Qwen3ForCausalLM": HEAD8,
        "SeedOssForCausalLM": HEAD8,
        "SmolLM3ForCausalLM": LM,
        "StableLmForCausalLM": LM,
        "Starcoder2ForCausalLM": LM,
        "VaultGemmaForCausalLM": HEAD8,
        "XGLMForCausalLM": dict(
            vocab_size=64,
            d_model=32,
            num_layers=2,
            attention_heads=4,
            ffn_dim=48,
            max_position_embeddings=32,
        ),
    },
    "mixture of experts": {
        "DeepseekV2ForCausalLM": LATENT | EXPERTS,
        "DeepseekV3ForCausalLM": LATENT | EXPERTS,
        "Ernie4_5_MoeForCausalLM": HEAD8 | EXPERTS | dict(moe_num_experts=4, moe_k=2),
        "FlexOlmoForCausalLM": LM | EXPERTS,
        "Glm4MoeForCausalLM": HEAD8 | EXPERTS | dict(n_group=1, topk_group=1),
        "GptOssForCausalLM": HEAD8 | EXPERTS | dict(sliding_window=4),
        "GraniteMoeForCausalLM": LM | EXPERTS,
        "GraniteMoeSharedForCausalLM": LM | EXPERTS,
        "HunYuanMoEV1ForCausalLM": HEAD8 | EXPERTS | dict(moe_topk=2),
        "JetMoeForCausalLM": EVEN | EXPERTS | dict(kv_channels=8),
        "Llama4ForCausalLM": HEAD8
        | EXPERTS
        | dict(intermediate_size_mlp=48, attention_chunk_size=8),
        "MiniMaxForCausalLM": HEAD8
        | EXPERTS
        | dict(layer_types=["full_attention", "linear_attention"], block_size=4),
        "MixtralForCausalLM": LM | EXPERTS,
        "OlmoeForCausalLM": LM | EXPERTS,
        "PhimoeForCausalLM": LM | EXPERTS,
        "Qwen2MoeForCausalLM": LM | EXPERTS,
        "Qwen3MoeForCausalLM": HEAD8 | EXPERTS,
        "Qwen3NextForCausalLM": HEAD8
        | EXPERTS
        | dict(
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        ),
        "SwitchTransformersForConditionalGeneration": (
            T5
            | dict(
                num_sparse_encoder_layers=1,
                num_decoder_layers=2,
                num_sparse_decoder_layers=1,
                num_experts=4,
            ),
            TRANSLATION,
        ),
    },
    "state space and hybrid": {
        "BambaForCausalLM": MAMBA2 | dict(attn_layer_indices=[1]),
        "FalconH1ForCausalLM": MAMBA2 | dict(mamba_d_ssm=32, mamba_d_head=8),
        "FalconMambaForCausalLM": dict(
            vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, time_step_rank=4
        ),
        "GraniteMoeHybridForCausalLM": MAMBA2 | EXPERTS | dict(layer_types=["mamba", "attention"]),
        "JambaForCausalLM": LM
        | dict(
            num_experts=2,
            mamba_d_state=4,
            mamba_dt_rank=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            use_mamba_kernels=False,
        ),
        "MambaForCausalLM": dict(
            vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, time_step_rank=4
        ),
        "Mamba2ForCausalLM": dict(
            vocab_size=64,
            hidden_size=32,
            state_size=4,
            num_hidden_layers=2,
            num_heads=4,
            head_dim=16,
            n_groups=2,
            chunk_size=4,
        ),
        "RecurrentGemmaForCausalLM": LM
        | dict(lru_width=32, attention_window_size=8, block_types=["recurrent", "attention"]),
        "RwkvForCausalLM": dict(
            vocab_size=64,
            hidden_size=32,
            attention_hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=48,
            context_length=32,
        ),
        "Zamba2ForCausalLM": EVEN
        | dict(
            mamba_d_state=4,
            mamba_ngroups=2,
            n_mamba_heads=4,
            mamba_headdim=16,
            chunk_size=4,
            use_mamba_kernels=False,
            layers_block_type=["mamba", "hybrid"],
            num_mem_blocks=1,
            adapter_rank=4,
        ),
    },
    "encoder": {
        "AlbertForMaskedLM": ENCODER
        | dict(embedding_size=16, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1),
        "BertForMaskedLM": ENCODER,
        "BigBirdForMaskedLM": ENCODER | dict(attention_type="original_full"),
        "ConvBertForMaskedLM": ENCODER | dict(embedding_size=16, conv_kernel_size=3),
        "DebertaForMaskedLM": ENCODER | dict(relative_attention=True, pos_att_type=["c2p", "p2c"]),
        "DebertaV2ForMaskedLM": ENCODER
        | dict(
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_buckets=8,
            norm_rel_ebd="layer_norm",
        ),
        "DistilBertForMaskedLM": dict(
            vocab_size=64,
            dim=32,
            hidden_dim=48,
            n_layers=2,
            n_heads=4,
            max_position_embeddings=32,
        ),
        "ElectraForMaskedLM": ENCODER | dict(embedding_size=16),
        "EsmForMaskedLM": ENCODER
        | dict(pad_token_id=1, mask_token_id=3, position_embedding_type="rotary"),
        "FNetForMaskedLM": ENCODER,
        "FunnelForMaskedLM": dict(
            vocab_size=64, block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=48
        ),
        "LongformerForMaskedLM": ENCODER
        | dict(attention_window=4, pad_token_id=1, max_position_embeddings=64),
        "MPNetForMaskedLM": ENCODER,
        "ModernBertForMaskedLM": ENCODER
        | dict(
            local_attention=4,
            attention_dropout=0.1,
            mlp_dropout=0.1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
        "RoFormerForMaskedLM": ENCODER | dict(embedding_size=32),
        "RobertaForMaskedLM": ENCODER | dict(pad_token_id=1),
        "XLNetLMHeadModel": dict(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=48),
    },
    "encoder-decoder": {
        "BartForConditionalGeneration": (BART, TRANSLATION),
        "BlenderbotForConditionalGeneration": (BART, TRANSLATION),
        "LEDForConditionalGeneration": (
            BART
            | dict(
                attention_window=4,
                max_encoder_position_embeddings=32,
                max_decoder_position_embeddings=32,
            ),
            TRANSLATION,
        ),
        "LongT5ForConditionalGeneration": (T5 | dict(local_radius=4), TRANSLATION),
        "M2M100ForConditionalGeneration": (BART, TRANSLATION),
        "MBartForConditionalGeneration": (BART, TRANSLATION),
        "MT5ForConditionalGeneration": (T5, TRANSLATION),
        "MarianMTModel": (BART, TRANSLATION),
        "PLBartForConditionalGeneration": (BART, TRANSLATION),
        "PegasusForConditionalGeneration": (BART, TRANSLATION),
        "ProphetNetForConditionalGeneration": (
            dict(
                vocab_size=64,
                hidden_size=32,
                encoder_ffn_dim=48,
                decoder_ffn_dim=48,
                num_encoder_layers=2,
                num_decoder_layers=2,
                num_encoder_attention_heads=4,
                num_decoder_attention_heads=4,
                max_position_embeddings=32,
                decoder_start_token_id=0,
            ),
            TRANSLATION,
        ),
        "T5ForConditionalGeneration": (T5, TRANSLATION),
    },
    "vision": {
        "BeitForImageClassification": (VIT, images(8)),
        "ConvNextForImageClassification": (
            STAGES | dict(num_stages=2, image_size=16, patch_size=2, drop_path_rate=0.1),
            images(16),
        ),
        "ConvNextV2ForImageClassification": (
            STAGES | dict(num_stages=2, image_size=16, patch_size=2, drop_path_rate=0.1),
            images(16),
        ),
        "DeiTForImageClassification": (VIT, images(8)),
        "Dinov2ForImageClassification": (VIT, images(8)),
        "Dinov2WithRegistersForImageClassification": (VIT, images(8)),
        "LevitForImageClassification": (
            dict(
                image_size=32,
                hidden_sizes=[16, 24],
                num_attention_heads=[2, 3],
                depths=[1, 1],
                key_dim=[4, 4],
                mlp_ratio=[2, 2],
                attention_ratio=[2, 2],
                down_ops=[["Subsample", 4, 4, 4, 2, 2], [""]],
                num_labels=10,
            ),
            images(32),
        ),
        "MobileNetV2ForImageClassification": (
            dict(depth_multiplier=0.25, image_size=32, num_labels=10),
            images(32),
        ),
        "MobileViTForImageClassification": (
            dict(
                hidden_sizes=[16, 16, 16],
                neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32],
                num_attention_heads=2,
                image_size=32,
                num_labels=10,
            ),
            images(64),
        ),
        "PoolFormerForImageClassification": (
            dict(
                hidden_sizes=[8, 16],
                num_encoder_blocks=2,
                depths=[1, 1],
                patch_sizes=[7, 3],
                strides=[4, 2],
                padding=[2, 1],
                num_labels=10,
            ),
            images(16),
        ),
        "PvtV2ForImageClassification": (PYRAMID | dict(image_size=32), images(16)),
        "RegNetForImageClassification": (
            STAGES | dict(embedding_size=8, groups_width=4),
            images(32),
        ),
        "ResNetForImageClassification": (STAGES | dict(embedding_size=8), images(32)),
        "SegformerForImageClassification": (PYRAMID, images(16)),
        "SegformerForSemanticSegmentation": (
            PYRAMID | dict(decoder_hidden_size=16),
            segmentation_batch,
        ),
        "SwinForImageClassification": (WINDOWS, images(16)),
        "Swinv2ForImageClassification": (WINDOWS, images(16)),
        "ViTForImageClassification": (VIT, images(8)),
        "ViTMAEForPreTraining": (
            VIT
            | dict(
                decoder_hidden_size=16,
                decoder_num_hidden_layers=1,
                decoder_num_attention_heads=2,
                decoder_intermediate_size=32,
            ),
            pixels_only,
        ),
    },
    "speech": {
        "ASTForAudioClassification": (
            VIT | dict(max_length=16, num_mel_bins=8, frequency_stride=4, time_stride=4),
            spectrogram_batch,
        ),
        "Data2VecAudioForSequenceClassification": (SPEECH, CLASSIFIED),
        "HubertForSequenceClassification": (SPEECH, CLASSIFIED),
        "MoonshineForConditionalGeneration": (
            dict(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=48,
                encoder_num_hidden_layers=2,
                decoder_num_hidden_layers=2,
                encoder_num_attention_heads=4,
                decoder_num_attention_heads=4,
                max_position_embeddings=64,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            ),
            partial(spectrum_batch, name="input_values", shape=(2, 2000)),
        ),
        "SEWForSequenceClassification": (SPEECH, CLASSIFIED),
        "Speech2TextForConditionalGeneration": (
            BART
            | dict(
                input_feat_per_channel=8,
                conv_channels=16,
                num_conv_layers=2,
                conv_kernel_sizes=(3, 3),
                max_source_positions=32,
                max_target_positions=16,
            ),
            partial(spectrum_batch, name="input_features", shape=(2, 32, 8)),
        ),
        "UniSpeechSatForSequenceClassification": (SPEECH, CLASSIFIED),
        "WavLMForSequenceClassification": (SPEECH, CLASSIFIED),
        "Wav2Vec2ForCTC": (
            SPEECH | dict(pad_token_id=0),
            partial(speech_batch, labels=[[1, 2, 3], [4, 5, 6]]),
        ),
        "Wav2Vec2ForSequenceClassification": (SPEECH, CLASSIFIED),
        "WhisperForConditionalGeneration": (
            BART | dict(num_mel_bins=8, max_source_positions=16, max_target_positions=16),
            partial(spectrum_batch, name="input_features", shape=(2, 8, 32)),
        ),
    },
    "two towers, image and text": {
        "AltCLIPModel": (TOWERS, pairs_batch),
        "CLIPModel": (TOWERS, pairs_batch),
        "ChineseCLIPModel": (TOWERS, pairs_batch),
        "LlavaForConditionalGeneration": (
            dict(
                text_config=dict(**DECODER, attention_dropout=0.1, model_type="llama"),
                vision_config=TOWER
                | dict(num_hidden_layers=3, model_type="clip_vision_model", projection_dim=16),
                image_token_index=60,
                vision_feature_layer=-2,
                image_seq_length=4,
            ),
            captions_batch,
        ),
        "SiglipModel": (TOWERS, pairs_batch),
    },
}


SCALAR = r"'logit_scale' is a scalar .* Make it a 1-D tensor"
# class of transformers -> what the error matches, and what the line that it shows holds
REFUSED: dict[str, tuple[str, str]] = {
    "AltCLIPModel": (SCALAR, ""),
    "CLIPModel": (SCALAR, ""),
    "ChineseCLIPModel": (SCALAR, ""),
    "LEDForConditionalGeneration": (LOOKS, "any().item()"),
    "LongformerForMaskedLM": (LOOKS, "any().item()"),
    "SwitchTransformersForConditionalGeneration": (LOOKS, ".nonzero()"),
    "Wav2Vec2ForCTC": (LOOKS, "labels.max() >= self.config.vocab_size"),
}
# classes of transformers that are taken, and whose bytes depend on the data
SIZED_BY_DATA = {"JetMoeForCausalLM"}
# variant of a class -> its family, what builds it, its batch, its refusal
VARIANTS: dict[str, tuple[str, Callable[[], nn.Module], Any, tuple[str, str] | None]] = {
    "CLIPModel, logit_scale of shape [1]": (
        "two towers, image and text",
        partial(scalars_as_vectors, "CLIPModel", **TOWERS),
        pairs_batch,
        None,
    ),
    "LlamaForCausalLM, gradient_checkpointing_enable()": (
        "decoder-only",
        partial(hf_checkpointed, "LlamaForCausalLM", reentrant=False, **LM),
        TOKENS,
        None,
    ),
    "LlamaForCausalLM, gradient_checkpointing_enable(), reentrant": (
        "decoder-only",
        partial(hf_checkpointed, "LlamaForCausalLM", reentrant=True, **LM),
        TOKENS,
        None,
    ),
    "MixtralForCausalLM, batched_mm": (
        "mixture of experts",
        partial(hf, "MixtralForCausalLM", **LM, **EXPERTS, experts_implementation="batched_mm"),
        TOKENS,
        None,
    ),
    "MixtralForCausalLM, eager experts": (
        "mixture of experts",
        partial(hf, "MixtralForCausalLM", **LM, **EXPERTS, experts_implementation="eager"),
        TOKENS,
        (LOOKS + r"[\s\S]*set_experts_implementation\('grouped_mm'\)", "nonzero()"),
    ),
    "LlamaForCausalLM, eager attention": (
        "decoder-only",
        partial(hf, "LlamaForCausalLM", **LM, attn_implementation="eager"),
        TOKENS,
        None,
    ),
    "Wav2Vec2ForSequenceClassification, SpecAugment": (
        "speech",
        partial(
            hf,
            "Wav2Vec2ForSequenceClassification",
            **SPEECH | dict(apply_spec_augment=True, mask_time_length=2, mask_time_prob=0.5),
        ),
        CLASSIFIED,
        (r"draws from numpy\.random.*apply_spec_augment=False", ""),
    ),
    "Wav2Vec2ForSequenceClassification, LayerDrop": (
        "speech",
        partial(hf, "Wav2Vec2ForSequenceClassification", **SPEECH | dict(layerdrop=0.1)),
        CLASSIFIED,
        (LOOKS + r"[\s\S]*LayerDrop.*layerdrop", "skip_the_layer"),
    ),
}


def of_transformers() -> dict[str, Architecture]:
    """All rows, in the order of their families."""
    found: dict[str, Architecture] = {}
    for family, classes in TRANSFORMERS.items():
        for name, row in classes.items():
            config, batch = row if isinstance(row, tuple) else (row, TOKENS)
            case = Case(name, partial(hf, name, **config), batch, output_loss)
            sized = name in SIZED_BY_DATA
            found[name] = Architecture(family, case, *REFUSED.get(name, ()), sized_by_data=sized)
        for name, (of, build, batch, refusal) in VARIANTS.items():
            if of == family:
                case = Case(name, build, batch, output_loss)
                found[name] = Architecture(family, case, *(refusal or ()))
    return found
