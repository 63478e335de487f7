"""The param_update stage: brings every healthy replica to the newest version while everything else goes on."""

from headway.errors import BackendError, TrainerCrashed
from headway.flow.stage import Stage, register_stage
from headway.rollout.replica import ReplicaHealth
from headway.types import Snapshot


@register_stage("param_update")
class ParamUpdateStage(Stage[Snapshot, Snapshot]):
    """Consumes: snapshots, only the newest if there are several. Produces: served versions. Waits for: train. Ends
    when: train ends."""

    consumes = produces = Snapshot

    async def process(self, item: Snapshot) -> None:
        assert self.inbound is not None
        newest = [item, *self.inbound.drain()][-1]
        pipeline, reliability = self.pipeline, self.pipeline.settings.reliability

        async def push() -> None:
            replicas = [replica for replica in pipeline.hub.replicas if replica.health is ReplicaHealth.UP]
            await pipeline.updater.push(newest.version, replicas)

        try:
            await self.attempt(f"version {newest.version}", push, retries=reliability.transfer_retries)
        except BackendError as error:  # the supervisor handles replicas that fail: this is the trainer
            raise TrainerCrashed(f"its weights cannot be read: {error}") from error
        pipeline.versions_changed()
