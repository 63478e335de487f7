"""The components of a run that trains a denoising model, whose answers are images: trainer and engines.

Everything else of a run (scheduler, buffer, ledger, weights, staleness, resume) is the same as for language models.
Prompts are tokenized as UTF-8 bytes. `create_*` functions are the targets of child processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config import ResolvedConfig
from headway.engines.base import Engine
from headway.errors import ConfigError
from headway.launch.components import (
    ComponentArgs,
    LaunchContext,
    ModelFamily,
    TrainingComponents,
    create_own_engine,
    make_own_engine,
    make_publishing_trainer,
)
from headway.launch.rank_components import describe_rank, make_remote_trainer
from headway.models.policy_info import PolicyInfo
from headway.placement.memory_model import count_engine_slots
from headway.placement.trainer_ranks import make_rank_layout
from headway.trainers.base import Trainer
from headway.weights.transports import ReceiverEnd, make_transport, select_wire_dtype

if TYPE_CHECKING:
    from headway.data import DataSources
    from headway.denoising.denoising_engine import DenoisingEngine
    from headway.denoising.denoising_trainer import DenoisingTrainer
    from headway.denoising.settings import DenoisingSettings, DenoisingTrainerSettings
    from headway.denoising.sharded_denoising import DenoisingRankTrainer
    from headway.trainers.sharded.rank_host import RankSpec
    from headway.weights.base import PublishingStore


class Utf8PromptTokenizer:
    """Tokenizer of prompts for denoising models: one token per byte of UTF-8."""

    def apply_chat_template(
        self, conversation: list[Any], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> str:
        """Return the text of the only message."""
        if variables:
            raise ValueError("a picture has a prompt, and no template that reads variables")
        if len(conversation) != 1:
            raise ValueError(f"a picture has a prompt, not a conversation of {len(conversation)} messages")
        return str(conversation[0]["content"])

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return the bytes of the text."""
        return tuple(text.encode())

    def decode(self, actions: Sequence[Any], **_: Any) -> str:
        """Return no text: the actions are denoising steps."""
        return ""


class DenoisingModelFamily(ModelFamily):
    """The `ModelFamily` of denoising models: the small ones that ship with Headway, and Stable Diffusion 3."""

    def find_policy(self, resolved: ResolvedConfig) -> PolicyInfo:
        """Find the model and read as much of it as the controller needs. Raises `ConfigError`."""
        from headway.denoising.models.denoiser_storage import find_shipped_model, list_shipped_models
        from headway.denoising.models.mmdit import is_small_mmdit
        from headway.denoising.models.stable_diffusion_3 import is_sd3
        from headway.models.model_checks import check_adapter_targets

        wanted = resolved.config.actor_train.model_args.model_name_or_path or resolved.config.pretrain or ""
        shipped = list_shipped_models()
        path = find_shipped_model(wanted) if wanted in shipped else Path(wanted).expanduser()
        if not path.is_dir():
            hint = f"a directory, or one of {', '.join(shipped)}"
            raise ConfigError("there is no such directory", key="pretrain", value=wanted, hint=hint)
        if not (is_small_mmdit(path) or is_sd3(path)):
            hint = "without `denoising` it is taken for a language model"
            raise ConfigError(
                "holds no denoising model, but `denoising` is given", key="pretrain", value=wanted, hint=hint
            )
        weights = path / "transformer" if (path / "transformer").is_dir() else path
        shapes = _read_shapes(weights)
        args, layers = (
            resolved.config.actor_train.model_args,
            [name for name, shape in shapes.items() if len(shape) == 2],
        )
        if args.lora_rank is not None:
            check_adapter_targets(args.lora_target, [name.removesuffix(".weight") for name in layers])
        tokenizer, parameters = Utf8PromptTokenizer(), sum(map(prod, shapes.values()))
        return PolicyInfo(path=path.resolve(), critic=None, tokenizer=tokenizer, parameters=parameters, positions=None)

    def check_sources(self, policy: PolicyInfo, sources: DataSources) -> None:
        """Raise `ConfigError` for the first prompt that the model cannot read."""
        check = make_prompt_check(policy.path)
        for source in filter(None, (sources.train, sources.validation)):
            for position in range(len(source)):
                task = source.task(position)
                if task is not None:
                    check(bytes(task.prompt).decode())

    def make_training_components(self, context: LaunchContext) -> TrainingComponents:
        """Make trainer and engines where the placement puts them."""
        placement = context.placement
        engines = self.make_engines(context)
        if placement.processes:
            trainer: Trainer = make_remote_trainer(context, create_trainer, create_rank)
        else:
            trainer = make_denoising_trainer(context.make_args(placement.train_threads), context.make_local_store())
        transport = make_transport(context.resolved, placement.transport)
        return TrainingComponents(trainer=trainer, engines=engines, transport=transport, cluster=placement.cluster)

    def read_weights(self, policy: PolicyInfo) -> Mapping[str, Any]:
        from headway.denoising.models.denoiser_storage import open_denoiser

        return dict(open_denoiser(policy.path).state_dict())

    def make_engine(self, context: LaunchContext, name: str) -> Engine:
        """Make one denoising engine where the placement puts it."""
        return make_own_engine(context, name, make_denoising_engine, create_engine)


def make_prompt_check(path: Path) -> Callable[[str], object]:
    """Return a function that raises `ConfigError` for a prompt that the model in `path` cannot read."""
    from headway.denoising.models.mmdit import is_small_mmdit, read_mmdit_config

    return read_mmdit_config(path).tokenize if is_small_mmdit(path) else lambda prompt: None


# -- components, made in the process that they live in


def make_denoising_trainer(args: ComponentArgs, store: PublishingStore) -> DenoisingTrainer:
    """Make the trainer of the policy, which publishes into `store`."""
    from headway.denoising.denoising_trainer import DenoisingTrainer

    return DenoisingTrainer(_make_denoiser_loader(args), store=store, **_make_trainer_options(args))


def make_denoising_rank(args: ComponentArgs, store: PublishingStore | None, ranks: int) -> DenoisingRankTrainer:
    """Make one rank of a trainer whose ranks have connected to each other; rank 0 publishes into `store`."""
    from headway.denoising.sharded_denoising import DenoisingRankTrainer, ShardedDenoisingRanks
    from headway.trainers.sharded.sharded_trainer import ShardedRankGroup
    from headway.weights.weight_store import NonPublishingStore

    resolved = args.load_config()
    group = ShardedDenoisingRanks(ShardedRankGroup(make_rank_layout(resolved, ranks), args.device))
    own_store = NonPublishingStore(select_wire_dtype(resolved, args.device)) if store is None else store
    return DenoisingRankTrainer(
        _make_denoiser_loader(args), store=own_store, ranks=group, **_make_trainer_options(args)
    )


def _make_trainer_options(args: ComponentArgs) -> dict[str, Any]:
    """Return what a trainer needs beside its model and its store."""
    from headway.algorithms.kl import make_kl_controller

    resolved = args.load_config()
    return {
        "settings": _add_default_lora_targets(make_denoising_training(args, resolved), Path(args.model)),
        "make_kl": lambda: make_kl_controller(resolved.config),
    }


def make_denoising_engine(args: ComponentArgs, name: str, end: ReceiverEnd | None = None) -> DenoisingEngine:
    """Make one engine, whose weights arrive later; without `end` they come from this process."""
    from headway.denoising.denoising_engine import DenoisingEngine
    from headway.engines.native.settings import NativeSettings

    resolved = args.load_config()
    settings = NativeSettings(
        slots=count_engine_slots(resolved, args.device),
        threads=args.threads,
        seed=resolved.config.seed,
        device=args.device,
        dtype=args.select_engine_dtype(resolved),
    )
    return DenoisingEngine(
        name,
        _make_denoiser_loader(args),
        make_denoising_settings(resolved),
        settings,
        check=make_prompt_check(Path(args.model)),
        open_payload=None if end is None else end.open_payload,
    )


def make_denoising_settings(resolved: ResolvedConfig) -> DenoisingSettings:
    """Return the settings that engine and trainer share."""
    from headway.denoising.settings import DenoisingSettings

    config = resolved.config
    denoising = config.denoising
    assert denoising is not None
    return DenoisingSettings(
        sampler=denoising.sampler,
        noise_level=denoising.noise_level,
        shift=denoising.timestep_shift,
        window="last" if denoising.algorithm == "diffusion_nft" else denoising.window,
        window_size=denoising.window_size,
        window_range=denoising.window_range,
        window_interval=denoising.window_interval,
        window_stride=denoising.window_stride,
        share_prefix=denoising.share_prefix,
        guidance=config.actor_infer.generating_args.guidance_scale,
        seed=config.seed,
    )


def make_denoising_training(args: ComponentArgs, resolved: ResolvedConfig) -> DenoisingTrainerSettings:
    """Return the settings of the trainer."""
    from headway.algorithms.diffusion_nft import DiffusionNftParams
    from headway.denoising.settings import DenoisingTrainerSettings
    from headway.trainers.local.settings import make_local_settings

    config = resolved.config
    denoising = config.denoising
    assert denoising is not None
    precision = args.select_precision(resolved)
    local = make_local_settings(resolved, precision=precision, device=args.device, threads=args.threads)
    kl_coef = config.kl_loss_coef if config.use_kl_loss else None
    nft = DiffusionNftParams(beta=denoising.nft_beta, clip=config.advantage_clip or 5.0, kl_coef=kl_coef or 0.0)
    return DenoisingTrainerSettings(
        local=replace(local, objective=replace(local.objective, kl_coef=None)),
        denoising=make_denoising_settings(resolved),
        micro_batch_samples=config.actor_train.training_args.per_device_train_batch_size,
        kl_coef=kl_coef,
        kl_mode=denoising.kl_mode,
        nft=nft if denoising.algorithm == "diffusion_nft" else None,
        nft_levels=denoising.nft_levels,
        seed=config.seed,
    )


def _add_default_lora_targets(training: DenoisingTrainerSettings, path: Path) -> DenoisingTrainerSettings:
    """Choose the layers that get adapters if nothing does: those of Flow-GRPO in Stable Diffusion, else all."""
    from headway.denoising.models.stable_diffusion_3 import SD3_LORA_TARGETS, is_sd3

    lora = training.local.lora
    if lora is None or lora.targets or not is_sd3(path):
        return training
    return replace(training, local=replace(training.local, lora=replace(lora, targets=SD3_LORA_TARGETS)))


def _read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in the weight files of a directory without reading them."""
    from safetensors import safe_open

    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found[name] = tuple(tensors.get_slice(name).get_shape())
    return found


def _make_denoiser_loader(args: ComponentArgs) -> Callable[[], Any]:
    from headway.denoising.models.denoiser_storage import open_denoiser

    denoising = args.load_config().config.denoising
    assert denoising is not None
    return partial(open_denoiser, Path(args.model), height=denoising.height, width=denoising.width)


# -- targets of child processes


def create_trainer(args: Mapping[str, Any]) -> Trainer:
    """Make the trainer, which publishes its versions for other processes."""
    return make_publishing_trainer(args, make_denoising_trainer)


def create_rank(args: Mapping[str, Any]) -> RankSpec:
    """Describe one rank of the trainer."""
    return describe_rank(args, make_denoising_rank)


async def create_engine(args: Mapping[str, Any]) -> Engine:
    """Make one denoising engine."""
    return await create_own_engine(args, make_denoising_engine)
