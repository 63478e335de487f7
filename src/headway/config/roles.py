"""The roles of a run: who trains, who generates, who judges, and on which devices.

The shape is `<role>.{model_args, training_args, generating_args, data_args, strategy_args, device_mapping,
infer_batch_size}`. A role reads the parts that concern it; the rest stay at their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headway.config.field_types import Amount, Count, Devices, Discount, Positive, Probability, Real, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs:
    """Which model a role holds, and how."""

    model_name_or_path: str | None = None
    """Directory, hub name, GGUF file or built-in name. null: `pretrain` (`reward_pretrain` for critic and rewards)."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of the weights held by this role; bf16 or fp32 for actor_train. On a CPU all are fp32."""
    attn_implementation: Literal["auto", "fa2", "sdpa", "eager"] = "auto"
    """Accepted, not read: trainer and engine have attention of their own."""
    disable_gradient_checkpointing: bool = False
    """Keep all activations instead of recomputing them: faster, more memory. Read by training roles."""
    lora_rank: Count | None = None
    """Train adapters of this rank instead of the weights. null: train the weights. Read for actor_train."""
    lora_alpha: Positive | None = None
    """Scale of the adapters. null: twice the rank."""
    lora_target: tuple[str, ...] = ()
    """Layers that get adapters, by the last part of their names. Empty: all linear ones but the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingArgs:
    """The optimizer of a training role."""

    learning_rate: Positive = 1e-6
    """Peak learning rate of AdamW."""
    weight_decay: Real = 0.0
    """Decoupled weight decay."""
    adam_beta1: Discount = 0.9
    """Decay of the first moment."""
    adam_beta2: Discount = 0.999
    """Decay of the second moment."""
    adam_epsilon: Positive = 1e-8
    """Added to the denominator."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    per_device_train_batch_size: Count = 1
    """Samples of one micro-batch."""
    gradient_accumulation_steps: Count | None = None
    """Micro-batches of one optimizer step. null: as many as make one optimizer step of the whole batch."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up."""
    warmup_steps: Amount = 0
    """Training steps over which the learning rate rises from zero."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in the memory of the host: 8 bytes a parameter less on the GPU, and a slower step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingArgs:
    """How actions are drawn."""

    max_new_tokens: Count | None = None
    """Longest answer of one turn. null: `response_length`."""
    temperature: Real = 1.0
    """Of the softmax; 0 is greedy. Where pictures are made, 0 draws no noise (validation does so by default)."""
    top_p: Share = 1.0
    """Nucleus: smallest set of actions with at least this probability."""
    top_k: Amount = 0
    """Only the k most likely actions; 0 (or −1) is off."""
    min_p: Probability = 0.0
    """Only actions at least this likely relative to the likeliest."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    num_return_sequences: Count | None = None
    """Answers per prompt. null: the group size; agentic configurations may also say 1."""
    num_inference_steps: Count | None = None
    """Denoising steps of a picture. null: 10 where pictures are made; in validation as in training."""
    guidance_scale: Real = 1.0
    """Classifier-free guidance of pictures, in rollout and in training alike; 1 is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataArgs:
    """Where prompts come from."""

    file_name: tuple[str, ...] = ()
    """Files, `hf:` and `reasoning_gym:` names or built-in tasks, one text or a list; see docs/data.md."""
    dataset_dir: str | None = None
    """Directory that relative file names start from."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For entries that are not files, such as size and digits; below an entry's name, for that entry alone."""
    template: str | None = None
    """null: the tokenizer's own chat template, which also stands in for other names; `none`: the text as it is."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking: false`; those that it does not read change nothing."""
    system: str | None = None
    """System message of prompts that bring none."""
    question_template: str | None = None
    """Text around the question, which stands in it as `{prompt}`. null: the question alone."""
    prompt: str = "prompt"
    """Column that holds the prompt, a text or a list of messages; `a.b` is `b` inside of `a`."""
    answer: str | None = "answer"
    """Column that holds what the reward compares with; `a.b` is `b` inside of `a`. null: no reward needs one."""
    too_long: Literal["drop", "error", "truncate"] = "drop"
    """Prompts longer than `prompt_length` are left out, refused, or cut to their end."""
    holdout: Real | None = None
    """Rows (from 1) or share of the rows (below 1) kept from training for validation. null: see docs/data.md."""
    shuffle: bool = True
    """Read in an order drawn from `seed`, anew in each pass."""
    domain_interleave_probs: Mapping[str, Probability] = field(default_factory=dict)
    """Share of each domain in a batch. Empty: as in the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyConfig:
    """Parallel sizes of a role and the memory of an engine."""

    tensor_model_parallel_size: Count = 1
    """Devices that share each layer."""
    pipeline_model_parallel_size: Count = 1
    """Devices in a row, each with some of the layers."""
    context_parallel_size: Count = 1
    """Devices that share one sequence."""
    expert_model_parallel_size: Count = 1
    """Devices that share the experts of a layer; inside data parallelism."""
    use_distributed_optimizer: bool = True
    """Accepted, not read: the optimizer's state is always sharded over data parallel devices."""
    sequence_parallel: bool = False
    """Accepted, not read: see `context_parallel_size`."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Accepted, not read: all is recomputed in the backward pass, unless `disable_gradient_checkpointing`."""
    gpu_memory_utilization: Share = 0.8
    """Share of device memory that an engine may take (`mem_fraction_static` is the same)."""
    block_size: Count = 16
    """Accepted, not read: the KV cache of our engine has no blocks."""
    max_num_seqs: Count | None = None
    """Requests that one replica decodes together. null: as many as fit."""
    num_threads: Count | None = None
    """CPU threads of one torch operation of the role. null: its share of the cores."""
    url: tuple[str, ...] = ()
    """Servers that run already, each an engine. Read for actor_infer with vllm or sglang; see docs/servers.md."""
    launch: bool = False
    """Start a vllm or sglang server for each engine, and end it with the run. Read for actor_infer."""
    in_process: bool = False
    """Run vllm in each engine's own process instead of a server, without HTTP. Read for actor_infer."""
    server_python: str | None = None
    """Interpreter that has vllm or sglang, where we start it. null: the one that runs Headway."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Further options of what we start: of its command line, without dashes, or of vllm's engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyArgs:
    """Which back end runs a role."""

    strategy_name: str | None = None
    """Back end by name; null takes the built-in one for the role."""
    strategy_config: StrategyConfig = field(default_factory=StrategyConfig)
    """Its settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    """One role of the run."""

    model_args: ModelArgs = field(default_factory=ModelArgs)
    """Which model it holds."""
    training_args: TrainingArgs = field(default_factory=TrainingArgs)
    """Its optimizer. Read for actor_train and critic."""
    generating_args: GeneratingArgs = field(default_factory=GeneratingArgs)
    """Its sampling. Read for actor_infer, and for rewards that generate."""
    data_args: DataArgs = field(default_factory=DataArgs)
    """Its data. Read for actor_train."""
    strategy_args: StrategyArgs = field(default_factory=StrategyArgs)
    """Its back end."""
    device_mapping: Devices | None = None
    """Its devices: a list or `list(range(a,b))`. null: by `use_nodes_ratios`, else shared with actor_train."""
    infer_batch_size: Count = 1
    """Accepted, not read: forward passes are packed by tokens, as those of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """The judge of one domain."""

    reward_fn: str | None = None
    """Registered name or `module:function`. null: the registered reward with the domain's name."""
    reward_args: Mapping[str, Any] = field(default_factory=dict)
    """Passed to it by keyword."""
    tag_included: tuple[str, ...] = ()
    """Tags of the data that belong to this domain. Empty: the domain's own name."""
    weight: Real = 1.0
    """Of this reward where a sample has several."""
    model_args: ModelArgs = field(default_factory=ModelArgs)
    """Model of a learned reward."""
    generating_args: GeneratingArgs = field(default_factory=GeneratingArgs)
    """Sampling of a reward that generates."""
    data_args: DataArgs = field(default_factory=DataArgs)
    """Template of a reward that generates."""
    strategy_args: StrategyArgs = field(default_factory=StrategyArgs)
    """Back end of a learned reward."""
    device_mapping: Devices | None = None
    """Devices of a learned reward. null: none, it runs on the host."""
    infer_batch_size: Count = 1
    """Accepted, not read: samples are judged as they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """What the validation flow does differently from training."""

    data_args: DataArgs = field(default_factory=DataArgs)
    """Held-out prompts."""
    generating_args: GeneratingArgs = field(default_factory=GeneratingArgs)
    """Sampling; whatever is not given here is taken from `actor_infer.generating_args`."""
