"""The components of a run that trains a language model: trainer, engines and scorers, here or in child processes.

`make_*` functions make a component in the process that it lives in. `create_*` functions are the targets of child
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config import ResolvedConfig
from headway.engines.base import Engine
from headway.launch.adapter_bases import (
    find_adapter_problem,
    list_adaptable_layers,
    make_adapter_settings,
    make_base_loader,
    make_frozen_base,
)
from headway.launch.components import (
    ComponentArgs,
    LaunchContext,
    ModelFamily,
    TrainingComponents,
    create_own_engine,
    make_own_engine,
    make_publishing_trainer,
    read_child_args,
)
from headway.launch.in_process_engines import make_in_process_engines
from headway.launch.inference_servers import ServerOptions, count_shared_cache_bytes, make_server_engines
from headway.launch.rank_components import check_shared_card, describe_rank, make_remote_trainer
from headway.models.policy_info import PolicyInfo
from headway.placement.component_places import (
    has_own_critic,
    let_engines_sleep,
    list_scorer_replicas,
)
from headway.placement.memory_model import count_engine_slots, count_prefix_tokens
from headway.placement.placement import Placement
from headway.placement.server_requirements import uses_external_engines, uses_in_process_vllm
from headway.placement.trainer_ranks import make_rank_layout
from headway.registry import ENGINES
from headway.trainers.base import Scorer, Trainer, TrainerScorer
from headway.trainers.remote_critic import TrainerWithCritic
from headway.trainers.remote_trainer import RemoteTrainer, ReplicaScorer, ScorerReplicas
from headway.trainers.sharded.rank_layout import RankLayout
from headway.weights.transports import ReceiverEnd, make_receiver_end, make_transport, select_wire_dtype

if TYPE_CHECKING:
    from headway.engines.native.native_engine import NativeEngine
    from headway.models.frozen_base import FrozenBase
    from headway.trainers.local.critic_learner import LocalCritic
    from headway.trainers.local.local_trainer import LocalTrainer
    from headway.trainers.local.policy_scorer import PolicyScorer
    from headway.trainers.local.settings import LocalSettings
    from headway.trainers.sharded.rank_host import RankSpec
    from headway.trainers.sharded.sharded_trainer import RankTrainer
    from headway.weights.base import PublishingStore


class LanguageModelFamily(ModelFamily):
    """The `ModelFamily` of causal language models that `transformers` can load."""

    _base: FrozenBase | None = None
    """Frozen weights that trainer and engines of this process share."""

    def find_policy(self, resolved: ResolvedConfig) -> PolicyInfo:
        """Find the model; fetch or convert it where needed. Raises `ConfigError` where there is none."""
        from transformers.utils import logging

        from headway.models.model_checks import check_adapter_targets
        from headway.models.model_loading import load_tokenizer, make_architecture_factory, max_sequence_length
        from headway.models.model_names import resolve_model

        logging.disable_progress_bar()  # a run has its own display
        config = resolved.config
        path = resolve_model(config.actor_train.model_args.model_name_or_path or config.pretrain or "")
        empty_model = make_architecture_factory(path)()
        if config.actor_train.model_args.lora_rank is not None:
            names, head = list_adaptable_layers(empty_model)
            check_adapter_targets(config.actor_train.model_args.lora_target, names, head)
        critic = config.critic.model_args.model_name_or_path or config.reward_pretrain
        return PolicyInfo(
            path=path,
            critic=resolve_model(critic) if critic and resolved.derived.needs_critic else None,
            tokenizer=load_tokenizer(path),
            parameters=sum(one.numel() for one in empty_model.parameters()),
            positions=max_sequence_length(path),
        )

    def check_policy(self, resolved: ResolvedConfig, policy: PolicyInfo, placement: Placement) -> None:
        """Check that sequences are not too long for our engine, and that ranks can share the layers."""
        from transformers import AutoConfig

        from headway.models.model_checks import check_attention, check_rotation
        from headway.models.model_loading import make_architecture_factory

        check_shared_card(resolved, placement)
        if not uses_external_engines(resolved):
            config = AutoConfig.from_pretrained(policy.path, local_files_only=True)
            check_rotation(config, resolved.derived.sequence_length)
        if placement.layout.ranks > 1:
            check_attention(make_architecture_factory(policy.path)())
        check_tensor_parallel_model(placement.layout, policy.path)

    def find_adapter_problem(self, policy: PolicyInfo) -> str | None:
        return find_adapter_problem(policy.path)

    def make_training_components(self, context: LaunchContext) -> TrainingComponents:
        """Make trainer, engines and scorers where the placement puts them."""
        self._base = make_frozen_base(context)
        resolved, placement, engines = context.resolved, context.placement, self.make_engines(context)
        transport = make_transport(resolved, placement.transport)
        derived, replicas = resolved.derived, list_scorer_replicas(resolved)
        if placement.processes:
            trainer: RemoteTrainer | TrainerWithCritic | LocalTrainer = _make_trainer_process(context)
        else:
            trainer = make_local_trainer(
                context.make_args(placement.train_threads, "trainer"), context.make_local_store(), self._base
            )
        reference: Scorer = TrainerScorer(trainer, "reference")
        logp: Scorer = TrainerScorer(trainer, "policy")
        if placement.processes and "reference" in replicas:
            reference = _make_replica_scorer(context, "reference", create_reference_scorer)
        if placement.processes and "logp" in replicas:
            logp = _make_replica_scorer(context, "logp", create_logp_scorer, trainer)
        return TrainingComponents(
            trainer=trainer,
            engines=engines,
            transport=transport,
            ref_logp=reference if derived.needs_reference else None,
            logp=logp if "logp" in replicas else None,
            critic=TrainerScorer(trainer, "value") if derived.needs_critic else None,
            cluster=placement.cluster,
        )

    def read_weights(self, policy: PolicyInfo) -> Mapping[str, Any]:
        import torch

        from headway.models.model_loading import load_model

        return dict(load_model(policy.path, torch.float32).named_parameters())

    def make_engine(self, context: LaunchContext, name: str) -> Engine:
        """Make one native engine where the placement puts it."""
        return make_own_engine(context, name, partial(make_engine, base=self._base), create_engine)

    def make_engines(self, context: LaunchContext) -> list[Engine]:
        placement, resolved = context.placement, context.resolved
        if not uses_external_engines(resolved):
            return super().make_engines(context)
        options = ServerOptions(
            resolved=resolved,
            model=context.policy.path,
            device=placement.device,
            replicas=placement.replicas,
            slots=count_engine_slots(resolved, placement.device),
            threads=placement.infer_threads,
            cards=[placement.places[name].cards for name in placement.list_components("engine") if placement.gpus],
            logs=context.logs,
            transport=placement.transport,
            sleeps=let_engines_sleep(placement.places),
            cache_bytes=count_shared_cache_bytes(
                resolved, placement.places, placement.machine, context.policy.parameters
            ),
        )
        if uses_in_process_vllm(resolved):
            return make_in_process_engines(options)
        return make_server_engines(options)


def check_tensor_parallel_model(layout: RankLayout, path: Path) -> None:
    """Check that ranks can share the layers of the model; only its shapes are read. Raises `ConfigError`."""
    if layout.tensor == 1:
        return

    from headway.models.model_loading import make_architecture_factory
    from headway.trainers.sharded.sharded_model import check_tensor_parallel, find_decoder_layers, make_parallel_plan

    backbone = make_architecture_factory(path)().base_model
    check_tensor_parallel(backbone.config, layout.tensor)
    for layer in find_decoder_layers(backbone):
        make_parallel_plan(layer, layout.tensor)


def _make_trainer_process(context: LaunchContext) -> RemoteTrainer | TrainerWithCritic:
    """Make the trainer in processes of its own, and the critic in another one if it has devices of its own."""
    trainer, placement = make_remote_trainer(context, create_trainer, create_rank), context.placement
    if not has_own_critic(context.resolved):
        return trainer
    return TrainerWithCritic(
        trainer, context.make_child_spec("critic", create_critic, placement.train_threads), placement.start_child
    )


def _make_replica_scorer(
    context: LaunchContext, role: str, target: Callable[..., Scorer], follows: Trainer | None = None
) -> Scorer:
    """Make a scorer with a process and a model on each of its devices; with `follows` it takes a trainer's weights."""
    placement = context.placement
    specs = [
        context.make_child_spec(name, target, placement.train_threads)
        for name in context.placement.list_components(role)
    ]
    scorers = [ReplicaScorer(spec, placement.start_child, follows=follows) for spec in specs]
    return scorers[0] if len(scorers) == 1 else ScorerReplicas(scorers)


# -- components, made in the process that they live in


def make_local_trainer(args: ComponentArgs, store: PublishingStore, base: FrozenBase | None = None) -> LocalTrainer:
    """Make the trainer of the policy in the process of the run, with a critic in it; it publishes into `store`.

    Its frozen weights are those of `base`, where engines of this process compute with them too.
    """
    return _make_trainer(args, store, _make_local_settings(args), base)


def make_remote_part(args: ComponentArgs, store: PublishingStore) -> LocalTrainer:
    """Make the trainer of the policy in a process of its own; the critic may be in another one."""
    return _make_trainer(args, store, _make_trainer_settings(args))


def _make_trainer(
    args: ComponentArgs, store: PublishingStore, settings: LocalSettings, base: FrozenBase | None = None
) -> LocalTrainer:
    from headway.trainers.local.local_trainer import LocalTrainer

    load = _make_model_loader(args.model) if settings.lora is None else make_base_loader(args)
    make_model = load if base is None else lambda: base.adopt(load())
    return LocalTrainer(make_model, settings, store, **_make_trainer_options(args))


def make_rank_trainer(args: ComponentArgs, store: PublishingStore | None, ranks: int) -> RankTrainer:
    """Make one rank of a trainer whose ranks have connected to each other; it may publish into `store`."""
    from headway.trainers.sharded.sharded_trainer import RankTrainer, ShardedRankGroup
    from headway.weights.weight_store import NonPublishingStore

    resolved = args.load_config()
    group = ShardedRankGroup(make_rank_layout(resolved, ranks), args.device)
    own_store = NonPublishingStore(select_wire_dtype(resolved, args.device)) if store is None else store
    model, options = _make_model_loader(args.model), _make_trainer_options(args)
    return RankTrainer(model, _make_trainer_settings(args), own_store, ranks=group, **options)


def make_policy_scorer(args: ComponentArgs, end: ReceiverEnd | None = None) -> PolicyScorer:
    """Make a scorer with the initial policy; with a receiver `end` it takes the trainer's weights."""
    import torch

    from headway.trainers.local.policy_scorer import PolicyScorer
    from headway.weights.weight_receiver import DoubleBufferedReceiver

    settings, model = _make_local_settings(args), _make_model_loader(args.model)()
    if end is None:
        return PolicyScorer(model, settings)
    make_receiver = partial(
        DoubleBufferedReceiver,
        dtype=torch.float32,
        threads=args.threads,
        open_payload=end.open_payload,
        release_payloads=end.release_payloads,
    )
    return PolicyScorer(model, settings, make_receiver)


def make_engine(
    args: ComponentArgs, name: str, end: ReceiverEnd | None = None, base: FrozenBase | None = None
) -> Engine:
    """Make the engine that the configuration names: ours, or one that a plugin registered."""
    strategy = args.load_config().derived.strategies["actor_infer"]
    if strategy in ENGINES.built_in:
        return make_native_engine(args, name, end, base)
    engine: Engine = ENGINES.get(strategy)(args, name, end)
    return engine


def make_native_engine(
    args: ComponentArgs, name: str, end: ReceiverEnd | None = None, base: FrozenBase | None = None
) -> NativeEngine:
    """Make one native engine, whose weights arrive later; without `end` they come from this process.

    Adapters that are versions of their own go on top of `base`, or of what the model's directory holds.
    """
    from headway.engines.native.native_engine import NativeEngine
    from headway.engines.native.settings import NativeSettings
    from headway.models.model_loading import find_end_tokens, load_tokenizer, make_architecture_factory

    resolved = args.load_config()
    served = resolved.config.actor_infer.model_args
    end = end or ReceiverEnd(open_payload=memoryview, checks=resolved.config.weight_transfer.compare_served)
    return NativeEngine(
        name,
        make_architecture_factory(args.model),
        NativeSettings(
            slots=count_engine_slots(resolved, args.device),
            slot_tokens=resolved.derived.sequence_length,
            prefix_tokens=count_prefix_tokens(resolved, args.device),
            kv_cache_bytes=args.kv_cache_bytes,
            spare_weights=args.weight_sets > 1,
            threads=args.threads,
            seed=resolved.config.seed,
            device=args.device,
            dtype="fp8" if served.dtype == "fp8" else args.select_engine_dtype(resolved),
            kv_dtype=served.kv_cache_dtype,
            adapters=make_adapter_settings(args, base) if args.adapters else None,
        ),
        decode=load_tokenizer(args.model).decode,
        eos=find_end_tokens(args.model),
        open_payload=end.open_payload,
        release_payloads=end.release_payloads,
        wrap_receiver=end.wrap_receiver,
        checks=end.checks,
    )


def _make_model_loader(directory: str) -> Callable[[], Any]:
    import torch

    from headway.models.model_loading import load_model

    return partial(load_model, directory, torch.float32)


def _make_trainer_options(args: ComponentArgs) -> dict[str, Any]:
    """Return what a trainer needs beside model, settings and store."""
    from headway.algorithms.kl import make_kl_controller
    from headway.models.model_loading import load_tokenizer

    config = args.load_config().config
    return {
        "make_critic": _make_model_loader(args.critic) if args.critic else None,
        "make_kl": lambda: make_kl_controller(config),
        "tokenizer": load_tokenizer(args.model),
    }


def _make_local_settings(args: ComponentArgs) -> LocalSettings:
    from headway.trainers.local.settings import make_local_settings

    resolved = args.load_config()
    precision = args.select_precision(resolved)
    made = make_local_settings(resolved, precision=precision, device=args.device, threads=args.threads)
    if args.micro_batch:
        made = replace(made, micro_batch_tokens=args.micro_batch * resolved.derived.sequence_length)
    return replace(made, lora=replace(made.lora, separate=True)) if made.lora and args.adapters else made


def _make_trainer_settings(args: ComponentArgs) -> LocalSettings:
    """Return the settings of a trainer that is a process: without a critic if that has a process of its own."""
    settings = _make_local_settings(args)
    return replace(settings, critic=None, critic_elsewhere=True) if has_own_critic(args.load_config()) else settings


# -- targets of child processes


def create_trainer(args: Mapping[str, Any]) -> Trainer:
    """Make the trainer of a run that has one trainer process."""
    return make_publishing_trainer(args, make_remote_part)


def create_rank(args: Mapping[str, Any]) -> RankSpec:
    """Describe one rank of the trainer."""
    return describe_rank(args, make_rank_trainer)


async def create_engine(args: Mapping[str, Any]) -> Engine:
    """Make one native engine."""
    return await create_own_engine(args, make_engine)


def create_critic(args: Mapping[str, Any]) -> LocalCritic:
    """Make the critic of a run in which it has devices of its own."""
    from headway.trainers.local.critic_learner import LocalCritic

    component, _ = read_child_args(args)
    return LocalCritic(_make_model_loader(component.critic or component.model)(), _make_local_settings(component))


def create_reference_scorer(args: Mapping[str, Any]) -> Scorer:
    """Make a scorer that keeps the initial policy."""
    return make_policy_scorer(read_child_args(args)[0])


def create_logp_scorer(args: Mapping[str, Any]) -> Scorer:
    """Make a scorer that follows the trainer's weights."""
    component, transport = read_child_args(args)
    return make_policy_scorer(component, make_receiver_end(transport, "", component.device))
