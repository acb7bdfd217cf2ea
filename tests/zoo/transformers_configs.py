"""Tiny configurations that several models of Hugging Face transformers share."""

from typing import Any

DECODER: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
LM: dict[str, Any] = DECODER | dict(
    attention_dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2
)
HEAD8: dict[str, Any] = LM | dict(head_dim=8)
EVEN: dict[str, Any] = LM | dict(num_key_value_heads=4)
GPT: dict[str, Any] = dict(
    vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
)
ENCODER: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
)
EXPERTS: dict[str, Any] = dict(
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
    shared_intermediate_size=24,
)
LATENT: dict[str, Any] = EVEN | dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=8,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
)
MAMBA2: dict[str, Any] = LM | dict(
    mamba_n_heads=4, mamba_d_head=16, mamba_d_state=4, mamba_n_groups=2, mamba_chunk_size=4
)
T5: dict[str, Any] = dict(
    vocab_size=64,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)
BART: dict[str, Any] = dict(
    vocab_size=64,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=32,
    attention_dropout=0.1,
    activation_dropout=0.1,
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=2,
    forced_eos_token_id=2,
    decoder_start_token_id=2,
)
TOWER: dict[str, Any] = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    image_size=8,
    patch_size=4,
)
VIT: dict[str, Any] = TOWER | dict(
    num_labels=10, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, mlp_ratio=2
)
STAGES: dict[str, Any] = dict(hidden_sizes=[8, 16], depths=[1, 2], num_labels=10)
PYRAMID: dict[str, Any] = dict(
    num_encoder_blocks=2,
    depths=[1, 1],
    sr_ratios=[2, 1],
    hidden_sizes=[8, 16],
    patch_sizes=[3, 3],
    strides=[2, 2],
    num_attention_heads=[1, 2],
    mlp_ratios=[2, 2],
    num_labels=10,
)
WINDOWS: dict[str, Any] = dict(
    image_size=16,
    patch_size=2,
    embed_dim=16,
    depths=[1, 2],
    num_heads=[2, 4],
    window_size=4,
    num_labels=10,
)
SPEECH: dict[str, Any] = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    conv_dim=(8, 8),
    conv_stride=(5, 2),
    conv_kernel=(10, 3),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2,
    vocab_size=32,
    num_labels=4,
    classifier_proj_size=16,
    layerdrop=0.0,
    apply_spec_augment=False,
)
TOWERS: dict[str, Any] = dict(
    text_config=dict(
        **ENCODER, projection_size=32, attention_dropout=0.1, bos_token_id=0, eos_token_id=63
    ),
    vision_config=dict(**TOWER, attention_dropout=0.1),
    projection_dim=16,
)
