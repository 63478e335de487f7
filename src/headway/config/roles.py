"""Roles of a run: each has the type of what it reads, so that any other key is an unknown key there.

    actor_train  TrainingRoleConfig   trains the policy
    actor_infer  RolloutRoleConfig    generates with it
    reference    ScoringRoleConfig    scores samples with the initial policy
    critic       CriticRoleConfig     estimates values
    rewards      RewardConfig         judges the samples of one domain
    validation   ValidationConfig     evaluates the policy on held-out prompts

Keys of other frameworks that mean nothing here are listed in `headway/config/dialects`, not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headway.config.field_types import Amount, Count, Devices, Discount, Positive, Probability, Real, Share, Signed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs:
    """Which model a role holds."""

    model_name_or_path: str | None = None
    """Directory, hub name, GGUF file or built-in name. null: `pretrain` (critic: `reward_pretrain` if given; rewards:
    `reward_pretrain`, for those that are a model)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModelArgs(ModelArgs):
    """Which model engines serve, and how."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of the served weights. On a CPU it is always fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutModelArgs(ModelArgs):
    """Which model the engines of the policy serve, and how."""

    dtype: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    """Type of the served weights. On a CPU it is always fp32. fp8: linear layers in 8 bits, scaled anew with every
    version; on GPUs that multiply it, with the native engine."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of keys and values in the native engine's cache on a GPU. fp8 takes half the memory and is less exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModelArgs(ModelArgs):
    """Which model is trained, and how."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of the computation: bf16 or fp32. On a CPU it is always fp32."""
    disable_gradient_checkpointing: bool = False
    """Keep all activations instead of recomputing them: faster, but needs more memory."""
    activation_offload: bool = False
    """Keep activations in host memory until the backward pass, for very long sequences on one GPU."""
    fused_layers: bool = True
    """Compute decoder layers by fused kernels where a GPU and the model allow it."""
    lora_rank: Count | None = None
    """Train adapters of this rank instead of the weights. null: train the weights."""
    lora_alpha: Positive | None = None
    """Scale of the adapters. null: twice the rank."""
    lora_target: tuple[str, ...] = ()
    """Layers that get adapters, by the last part of their names. Empty: all linear layers but the head."""
    quantization: Literal["nf4"] | None = None
    """Hold the frozen weights under adapters in 4 bits (QLoRA, by bitsandbytes). null: as they are computed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerArgs:
    """The optimizer of a role that is trained."""

    learning_rate: Positive = 1e-6
    """Peak learning rate of AdamW."""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """Moments in fp32, or in 8 bits: 6 bytes per parameter less. 8 bits need a trainer of one rank."""
    stochastic_rounding: bool = False
    """Train bf16 weights without fp32 masters, rounded by chance: 4 bytes per parameter less. For one rank on a GPU."""
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
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate after the warm-up."""
    min_lr_ratio: Probability = 0.0
    """Share of the learning rate at which `linear` and `cosine` end."""
    warmup_steps: Amount = 0
    """Steps over which the learning rate rises from zero."""
    warmup_unit: Literal["training_steps", "optimizer_steps"] = "training_steps"
    """What `warmup_steps` counts; a training step may have several optimizer steps."""
    warmup_ratio: Probability | None = None
    """Share of all training steps that the warm-up takes, in place of `warmup_steps`."""
    offload_optimizer: bool = False
    """Keep AdamW's moments and fp32 masters in host memory: up to 12 bytes per parameter less on the GPU, and a slower
    step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingArgs(OptimizerArgs):
    """The optimizer of the policy, and how a batch is cut for it."""

    per_device_train_batch_size: Count = 1
    """Samples of one micro-batch."""
    gradient_accumulation_steps: Count | None = None
    """Micro-batches of one optimizer step. null: as many as make one optimizer step of the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingArgs:
    """How actions are drawn."""

    max_new_tokens: Count | None = None
    """Longest answer of one turn. null: `response_length`."""
    temperature: Real = 1.0
    """Temperature of the softmax; 0 is greedy. A denoising model draws no noise at 0, the default of validation."""
    top_p: Share = 1.0
    """Nucleus: smallest set of actions with at least this probability."""
    top_k: Amount = 0
    """Only the k most likely actions; 0 (or −1) is off."""
    min_p: Probability = 0.0
    """Only actions at least this likely relative to the likeliest."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    num_return_sequences: Count | None = None
    """Answers per prompt. null: the group size. Agentic configurations may also give 1."""
    num_inference_steps: Count | None = None
    """Denoising steps of an image. null: 10 for denoising models; in validation the number of training."""
    guidance_scale: Real = 1.0
    """Classifier-free guidance of denoising, in rollout and in training; 1 is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataArgs:
    """Where prompts come from."""

    file_name: tuple[str, ...] = ()
    """Files, `hf:` and `reasoning_gym:` names or built-in tasks, one text or a list; see docs/data.md."""
    dataset_dir: str | None = None
    """Directory that relative file names start from."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of entries that are not files, such as size and digits; below an entry's name, for that entry alone."""
    template: str | None = None
    """null: the tokenizer's own chat template, which also stands in for other names; `none`: the text as it is."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking: false`; it ignores those that it does not know."""
    system: str | None = None
    """System message of prompts that have none."""
    question_template: str | None = None
    """Text around the question, which it contains as `{prompt}`. null: the question alone."""
    prompt: str = "prompt"
    """Column that holds the prompt, a text or a list of messages; `a.b` is `b` inside of `a`."""
    answer: str | None = "answer"
    """Column that holds what the reward compares with; `a.b` is `b` inside of `a`. null: no reward needs one."""
    too_long: Literal["drop", "error", "truncate"] = "drop"
    """Prompts longer than `prompt_length` are left out, refused, or cut to their end."""
    shuffle: bool = True
    """Read in an order drawn from `seed`, anew in each pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDataArgs(DataArgs):
    """Where the prompts of training come from."""

    holdout: Real | None = None
    """Rows (from 1) or share of the rows (below 1) kept from training for validation. null: see docs/data.md."""
    max_rows: Count | None = None
    """Train on this many rows, drawn from `seed` where `shuffle` is on, else the first. null: all."""
    domain_interleave_probs: Mapping[str, Probability] = field(default_factory=dict)
    """Share of each domain in a batch. Empty: as in the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStrategyConfig:
    """Parallel sizes and threads of the trainer."""

    tensor_model_parallel_size: Count = 1
    """Devices that share each layer."""
    pipeline_model_parallel_size: Count = 1
    """Devices in a row, each with some of the layers."""
    context_parallel_size: Count = 1
    """Devices that share one sequence."""
    expert_model_parallel_size: Count = 1
    """Devices that share the experts of a layer; inside data parallelism."""
    distributed_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Library that moves tensors between the ranks of the trainer. `auto`: nccl on GPUs, gloo on CPUs."""
    num_threads: Count | None = None
    """CPU threads of one torch operation. null: the role's share of the cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStrategyConfig:
    """Parallel sizes, memory and threads of engines, and where servers run."""

    tensor_model_parallel_size: Count = 1
    """Devices that share each layer."""
    pipeline_model_parallel_size: Count = 1
    """Devices in a row, each with some of the layers."""
    gpu_memory_utilization: Share = 0.8
    """Share of device memory that an engine may take (`mem_fraction_static` is the same)."""
    max_num_seqs: Count | None = None
    """Requests that one replica decodes together. null: as many as fit."""
    num_threads: Count | None = None
    """CPU threads of one torch operation. null: the role's share of the cores."""
    url: tuple[str, ...] = ()
    """Running vllm or sglang servers, each of which is an engine; see docs/servers.md."""
    launch: bool = False
    """Start a vllm or sglang server for each engine, and end it with the run."""
    in_process: bool = False
    """Run vllm in each engine's own process instead of a server, without HTTP."""
    server_python: str | None = None
    """Interpreter that has vllm or sglang, where Headway starts it. null: the one that runs Headway."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Further options of what Headway starts: of its command line, without dashes, or of vllm's engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStrategyArgs:
    """Which back end trains."""

    strategy_name: str | None = None
    """Name of the back end. null: the built-in one."""
    strategy_config: TrainingStrategyConfig = field(default_factory=TrainingStrategyConfig)
    """Its settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStrategyArgs:
    """Which back end generates."""

    strategy_name: str | None = None
    """Name of the back end: a built-in one, or one that a plugin registered. null: the native engine."""
    strategy_config: EngineStrategyConfig = field(default_factory=EngineStrategyConfig)
    """Its settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRoleConfig:
    """The role that trains the policy, and the prompts it trains on."""

    model_args: TrainedModelArgs = field(default_factory=TrainedModelArgs)
    """Which model it trains."""
    training_args: TrainingArgs = field(default_factory=TrainingArgs)
    """Its optimizer."""
    data_args: TrainingDataArgs = field(default_factory=TrainingDataArgs)
    """Its prompts."""
    strategy_args: TrainingStrategyArgs = field(default_factory=TrainingStrategyArgs)
    """Its back end."""
    device_mapping: Devices | None = None
    """Its devices: a list or `list(range(a,b))`. null: by `use_nodes_ratios`, else all or half of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRoleConfig:
    """The role that generates with the policy."""

    model_args: RolloutModelArgs = field(default_factory=RolloutModelArgs)
    """Which model it serves."""
    generating_args: GeneratingArgs = field(default_factory=GeneratingArgs)
    """Its sampling."""
    strategy_args: EngineStrategyArgs = field(default_factory=EngineStrategyArgs)
    """Its back end."""
    device_mapping: Devices | None = None
    """Its devices: a list or `list(range(a,b))`. null: by `use_nodes_ratios`, else those of actor_train or the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRoleConfig:
    """The role that computes log-probabilities under the initial policy, on the trainer's back end."""

    model_args: ModelArgs = field(default_factory=ModelArgs)
    """Which model it holds."""
    device_mapping: Devices | None = None
    """Its devices: a list or `list(range(a,b))`. null: by `use_nodes_ratios`, else those of actor_train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticRoleConfig:
    """The role that estimates values, on the trainer's back end."""

    model_args: ModelArgs = field(default_factory=ModelArgs)
    """Which model it starts from."""
    training_args: OptimizerArgs = field(default_factory=OptimizerArgs)
    """Its optimizer; it is trained on the micro-batches of the actor."""
    device_mapping: Devices | None = None
    """Its devices: a list or `list(range(a,b))`. null: those of actor_train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilterConfig:
    """Which groups of a domain are replaced by others, by the rewards of their members."""

    type: Literal["no_filter", "mean_filter", "std_filter"] = "no_filter"
    """None; those with a mean at or outside two thresholds; those with a standard deviation at or below one."""
    filter_args: Mapping[str, Signed] = field(default_factory=dict)
    """mean_filter: `threshold_down`, `threshold_up`; std_filter: `std_threshold`. One not given rejects none."""


EVERY_TASK = "*"
"""A reward with this tag scores every task, beside the reward that the task has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """The judge of one domain."""

    reward_fn: str | None = None
    """Registered name or `module:function`. null: the registered reward with the domain's name."""
    reward_args: Mapping[str, Any] = field(default_factory=dict)
    """Passed to it by keyword."""
    tag_included: tuple[str, ...] = ()
    """Tags of the data that belong to this domain; `*`: every task, beside its own reward. Empty: the domain's name."""
    weight: Real = 1.0
    """Weight of this reward where a sample has several."""
    query_filter_config: GroupFilterConfig = field(default_factory=GroupFilterConfig)
    """Groups that are not trained. Others take their place, as with `filter_zero_variance`."""
    model_args: ServedModelArgs = field(default_factory=ServedModelArgs)
    """Its model, for `reward_model`, `judge` and `llm_judge`: served here, in a process of its own."""
    strategy_args: EngineStrategyArgs = field(default_factory=EngineStrategyArgs)
    """What serves its model, where that is a judge."""
    device_mapping: Devices | None = None
    """Devices of its model, one copy on each; they count towards `num_nodes`. null: one copy beside the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """What validation does differently from training."""

    data_args: DataArgs = field(default_factory=DataArgs)
    """Held-out prompts."""
    generating_args: GeneratingArgs = field(default_factory=GeneratingArgs)
    """Sampling; whatever is not given here is taken from `actor_infer.generating_args`."""
    mixed_versions: bool = False
    """Send new weights to the engines while held-out answers are made, so that a score may be of several versions;
    curves and reports call it mixed. false: new weights wait, and a score is of one version."""
