"""Tiny models of the families that people train, with random weights sharp enough to tell attention from none."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
WINDOW = {**GROUPED, "sliding_window": 5}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
OLD_NAMES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
FAST: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": WINDOW,
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "gemma": GROUPED,
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0},
    "gemma3_text": MIXED,
    "phi": {"num_key_value_heads": 2},
    "phi3": WINDOW,
    "gpt2": OLD_NAMES,
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "starcoder2": WINDOW,
    "olmo2": GROUPED,
    "olmo3": MIXED,
    "cohere2": MIXED,
    "granite": GROUPED,
    "glm4": GROUPED,
    "smollm3": GROUPED,
    "exaone4": MIXED,
    "ernie4_5": GROUPED,
    "seed_oss": GROUPED,
    "gpt_oss": {**LOCAL_EXPERTS, **MIXED},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
    "mixtral": LOCAL_EXPERTS,
    "olmoe": EXPERTS,
    "phimoe": LOCAL_EXPERTS,
    "granitemoe": LOCAL_EXPERTS,
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "minimax_m2": LOCAL_EXPERTS,
    "deepseek_v3": {**LATENT, "n_group": 4, "topk_group": 2},
}
"""Families that share a forward pass among sequences."""
SLOW: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "stablelm": {"num_key_value_heads": 2},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64},
    "nemotron": GROUPED,
    "diffllama": GROUPED,
    "llama4_text": {
        **LOCAL_EXPERTS,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 6,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
    "qwen3_next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16},
    "minimax": {**LOCAL_EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 8, "num_heads": 8, "expand": 2, "state_size": 8, "n_groups": 1, "chunk_size": 4},
    "recurrent_gemma": {
        **GROUPED,
        "lru_width": 32,
        "attention_window_size": 5,
        "block_types": ["recurrent", "attention"],
    },
    "falcon_h1": {
        **GROUPED,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
    },
}
"""Families that compute one sequence after the other."""


def make_family(kind: str, seed: int = 0) -> Any:
    """A model of this family in float32."""
    torch.manual_seed(seed)
    options = {**FAST, **SLOW}[kind]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **(SHAPE | options)), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("sinks"):
                tensor.normal_()
            elif tensor.ndim > 1:
                tensor.mul_(4)
    return model
