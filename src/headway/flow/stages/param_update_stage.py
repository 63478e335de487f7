"""param_update: brings every replica in service to the newest version, while everything else goes on."""

from __future__ import annotations

from headway.errors import BackendError, TrainerCrashed
from headway.flow.stage import Stage, register_stage
from headway.rollout.replica import ReplicaHealth
from headway.types import Snapshot


@register_stage("param_update")
class ParamUpdateStage(Stage[Snapshot, Snapshot]):
    """Consumes: snapshots, the newest if there are several. Produces: served versions. Waits for: train. Ends when:
    train ends."""

    consumes = produces = Snapshot

    async def process(self, item: Snapshot) -> None:
        assert self.inbound is not None
        newest = [item, *self.inbound.drain()][-1]
        line, reliability = self.line, self.line.settings.reliability

        async def push() -> None:
            replicas = [replica for replica in line.hub.replicas if replica.health is ReplicaHealth.UP]
            await line.updater.push(newest.version, replicas)

        try:
            await self.attempt(f"version {newest.version}", push, retries=reliability.transfer_retries)
        except BackendError as error:  # replicas that fail are seen to elsewhere: this is the trainer
            raise TrainerCrashed(f"its weights cannot be had: {error}") from error
        line.versions_changed()
