"""Trainers in processes: in a single one, or in one for each rank. The same for every kind of model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from headway.config import ResolvedConfig
from headway.errors import ConfigError
from headway.launch.components import ComponentArgs, LaunchContext, make_publishing_trainer, read_child_args
from headway.placement.component_places import make_rank_names, share_a_card
from headway.placement.placement import Placement
from headway.processes.base import ChildSpec
from headway.trainers.base import Trainer
from headway.trainers.remote_trainer import RemoteTrainer
from headway.trainers.sharded.ranked_trainer import MultiRankTrainer

if TYPE_CHECKING:
    from headway.trainers.sharded.rank_host import RankSpec

MakeRankTrainer = Callable[..., Any]
"""Makes the trainer of a rank from `ComponentArgs`, a store (`None`: it publishes nothing) and the number of ranks."""


def check_shared_card(resolved: ResolvedConfig, placement: Placement) -> None:
    """Check that ranks on one GPU only exchange what goes through the memory of the host. Raises `ConfigError`."""
    sizes, key = resolved.config.actor_train.strategy_args.strategy_config, "actor_train.strategy_args.strategy_config"
    if placement.device != "cuda" or not share_a_card(placement.places, make_rank_names(placement.ranks)):
        return
    if sizes.distributed_backend == "nccl":
        problem = "NCCL refuses two ranks on one GPU"
        raise ConfigError(problem, key=f"{key}.distributed_backend", value="nccl", hint="auto, or a GPU for each rank")
    for name in ("tensor_model_parallel_size", "context_parallel_size"):
        if (size := getattr(sizes, name)) > 1:
            problem = "ranks on one GPU share weights, but neither layers nor sequences"
            raise ConfigError(problem, key=f"{key}.{name}", value=size, hint="1, or a GPU for each rank")


def make_remote_trainer(
    context: LaunchContext, create_trainer: Callable[..., Any], create_rank: Callable[..., Any]
) -> RemoteTrainer:
    """Make a trainer in one child process by `create_trainer`, or in one for each rank by `create_rank`."""
    placement = context.placement
    if placement.ranks == 1:
        spec = context.make_child_spec("trainer", create_trainer, placement.train_threads)
        return RemoteTrainer(spec, placement.start_child)

    shares_card = share_a_card(placement.places, make_rank_names(placement.ranks))

    def adapt_to_rank(spec: ChildSpec, rank: int) -> ChildSpec:
        own = context.make_child_spec(spec.name, create_rank, placement.train_threads)
        return replace(spec, env=own.env, log=own.log, args={**spec.args, **own.args, "shares_card": shares_card})

    return MultiRankTrainer(
        context.make_child_spec("trainer", create_rank, placement.train_threads),
        placement.start_child,
        ranks=placement.ranks,
        customize=adapt_to_rank,
        join_s=context.resolved.config.cluster.start_timeout_s,
        rank_s=context.resolved.config.reliability.rank_timeout_s,
        publishers=placement.transport.publishers,
    )


def describe_rank(args: Mapping[str, Any], make_rank_trainer: MakeRankTrainer) -> RankSpec:
    """Describe one rank of the trainer. Ranks on one GPU meet through gloo, because NCCL refuses them."""
    from headway.trainers.sharded.rank_host import RankSpec

    component: ComponentArgs = read_child_args(args)[0]
    number, ranks = args["rank"], args["ranks"]

    def make() -> Trainer:
        if not args["publishes"]:
            trainer: Trainer = make_rank_trainer(component, None, ranks)
            return trainer
        return make_publishing_trainer(args, partial(make_rank_trainer, ranks=ranks))

    config = component.load_config().config
    backend = config.actor_train.strategy_args.strategy_config.distributed_backend
    return RankSpec(
        number=number,
        ranks=ranks,
        device=component.device,
        make=make,
        backend=backend if backend != "auto" else "gloo" if args["shares_card"] else "",
        timeout_s=2 * (config.reliability.rank_timeout_s + config.cluster.start_timeout_s),
    )
