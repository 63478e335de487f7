"""Three stages of one's own: one touches text, one drops groups, one changes rewards.

    plugins: [group_stages.py]
    with_reward: false                      # score in the reward stage, so that it sees the text of strip_spaces
    stages:
      - {name: strip_spaces, after: rollout}
      - {name: short_groups, after: strip_spaces, args: {most_tokens: 64}}
      - {name: length_bonus, after: reward, args: {bonus: 0.1}}

A stage consumes groups of samples one by one and returns each, changed or not, or `None`. Records are frozen: `replace`
makes changed copies. Stages run in the main process, in real and in simulated runs alike.
"""

from dataclasses import replace

import headway
from headway.flow.stage import Stage
from headway.types import DropReason, SampleGroup


@headway.register_stage("strip_spaces")
class StripSpaces(Stage):
    """Remove spaces around the text of every answer, before rewards read it. Tokens stay as they were sampled."""

    consumes = produces = SampleGroup

    async def process(self, group):
        return replace(group, samples=tuple(self.strip(sample) for sample in group.samples))

    def strip(self, sample):
        turns = tuple(
            replace(turn, generation=replace(turn.generation, text=turn.generation.text.strip()))
            for turn in sample.episode.turns
        )
        return replace(sample, episode=replace(sample.episode, turns=turns))


@headway.register_stage("short_groups")
class ShortGroups(Stage):
    """Drop groups whose answers have more than `most_tokens` tokens together. The reason is recorded and counted."""

    consumes = produces = SampleGroup

    def __init__(self, pipeline, *, most_tokens=1024):
        super().__init__(pipeline)
        self.most_tokens = most_tokens

    async def process(self, group):
        if group.actions <= self.most_tokens:
            return group
        self.pipeline.drop(group.group_id, DropReason.FILTERED, who=self.role)
        return None


@headway.register_stage("length_bonus")
class LengthBonus(Stage):
    """Add `bonus` to the reward of the shortest answers of each group."""

    consumes = produces = SampleGroup

    def __init__(self, pipeline, *, bonus=0.1):
        super().__init__(pipeline)
        self.bonus = bonus

    async def process(self, group):
        shortest = min(sample.actions for sample in group.samples)
        return replace(group, samples=tuple(self.add_bonus(sample, shortest) for sample in group.samples))

    def add_bonus(self, sample, shortest):
        if sample.actions > shortest:
            return sample
        score = replace(
            sample.score,
            value=sample.score.value + self.bonus,
            parts={**sample.score.parts, "length_bonus": self.bonus},
        )
        return replace(sample, score=score)
