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
        pipeline, reliability = self.pipeline, self.pipeline.settings.reliability
        await self._wait_for_validation()
        newest = [item, *self.inbound.drain()][-1]

        async def push() -> None:
            replicas = [replica for replica in pipeline.hub.replicas if replica.health is ReplicaHealth.UP]
            await pipeline.updater.push(newest.version, replicas)

        try:
            await self.attempt(f"version {newest.version}", push, retries=reliability.transfer_retries)
        except BackendError as error:  # the supervisor handles replicas that fail: this is the trainer
            raise TrainerCrashed(f"its weights cannot be read: {error}") from error
        finally:
            pipeline.updater.turn.release()
        pipeline.versions_changed()

    async def _wait_for_validation(self) -> None:
        """Reserve the weights of the engines, which a validation may need for its answers."""
        turn = self.pipeline.updater.turn
        if turn.locked():
            self.settle(running=-1, listening=1)
            try:
                with self.pipeline.waits.waiting(self.role, "the answers of a validation", "validate"):
                    await turn.acquire()
            finally:
                self.settle(listening=-1, running=1)
        else:
            await turn.acquire()
