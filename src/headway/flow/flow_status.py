"""Takes the status of a flow: what each stage is doing now, and what it waits for."""

from collections.abc import Sequence
from dataclasses import replace

from headway.flow.training_flow import AsyncTrainingFlow
from headway.monitor.run_status import EngineStatus, RunStatus, StageStatus, WaitStatus
from headway.monitor.wait_graph import MOST_CULPRITS, WaitEdge


def take_status(flow: AsyncTrainingFlow) -> RunStatus:
    """Return the status of a flow. Parties of the wait-for graph that are no stages come after the stages."""
    now_s, edges, pipeline = flow.waits.clock(), flow.waits.edges(), flow.pipeline
    stages = [
        StageStatus(
            role=role,
            state=str(stage.state),
            seconds=now_s - stage.since_s,
            queue=0 if stage.inbound is None else len(stage.inbound),
            waits=_select_waits(role, edges, now_s),
        )
        for role, stage in flow.stages.items()
    ]
    for owner in dict.fromkeys(edge.owner for edge in edges if edge.owner not in flow.stages):
        waits = _select_waits(owner, edges, now_s)
        stages.append(StageStatus(role=owner, state="waiting", seconds=waits[0].seconds, waits=waits))
    culprits = tuple(edge.describe(now_s) for edge in flow.waits.find_culprits()[:MOST_CULPRITS])
    status = RunStatus(phase="starting", steps=flow.settings.max_steps, stages=tuple(stages), culprits=culprits)
    if pipeline is None:
        return replace(status, trained=max(0, flow.backends.trainer.version))
    return replace(
        status,
        phase="training",
        trained=pipeline.headway.trained,
        served=pipeline.headway.served,
        level=pipeline.recovery.level.name.lower().replace("_", " "),
        engines=tuple(
            EngineStatus(name=one.name, health=str(one.health), version=one.version, requests=one.load)
            for one in pipeline.hub.replicas
        ),
        quiet_s=flow.progress.quiet_s,
    )


def _select_waits(owner: str, edges: Sequence[WaitEdge], now_s: float) -> tuple[WaitStatus, ...]:
    return tuple(
        WaitStatus(on=edge.on, what=edge.what, seconds=max(0.0, now_s - edge.since_s))
        for edge in edges
        if edge.owner == owner
    )
