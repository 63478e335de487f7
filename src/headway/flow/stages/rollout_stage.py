"""The rollout stage: turns episodes into samples and replaces episodes that are inconsistent."""

from headway.flow.stage import Stage, register_stage
from headway.monitor.events import ErrorReport
from headway.types import DropReason, Episode, EpisodeGroup, Sample, SampleGroup


@register_stage("rollout")
class RolloutStage(Stage[EpisodeGroup, SampleGroup]):
    """Consumes: episode groups. Produces: sample groups. Waits for: generate. Ends when: generate ends."""

    consumes = EpisodeGroup
    produces = SampleGroup

    async def process(self, item: EpisodeGroup) -> SampleGroup | None:
        if not self.pipeline.is_live(item.group_id):
            return None
        for episode in item.episodes:
            fault = find_fault(episode)
            if fault:
                message = f"{episode.sample_id}: {fault}"
                self.pipeline.events.emit(ErrorReport(who=self.role, error="EngineError", message=message))
                self.pipeline.replace_member(item.group_id, episode.sample_id, DropReason.ENGINE_FAILED)
                return None
        samples = tuple(episode_to_sample(episode) for episode in item.episodes)
        return SampleGroup(group_id=item.group_id, task=item.task, samples=samples)


def find_fault(episode: Episode) -> str:
    """Return what makes an episode untrainable, in words; an empty text if nothing does."""
    for number, turn in enumerate(episode.turns):
        made = turn.generation
        counted = sum(run.count for run in made.runs)
        if not len(made.actions) == len(made.logps) == counted:
            sizes = f"{len(made.actions)} actions, {len(made.logps)} log-probabilities"
            return f"turn {number} has {sizes} and versions for {counted}"
    if not any(len(turn.generation.actions) for turn in episode.turns):
        return "no actions at all"
    return ""


def episode_to_sample(episode: Episode) -> Sample:
    """Return the episode as a sample, with the versions that freshness is judged by."""
    runs = episode.runs
    return Sample(
        sample_id=episode.sample_id,
        episode=episode,
        oldest=min(run.version for run in runs),
        newest=max(run.version for run in runs),
        actions=sum(run.count for run in runs),
    )
