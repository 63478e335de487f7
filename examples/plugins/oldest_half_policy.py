"""A staleness policy of one's own: each batch takes half of its groups from the oldest and half from the freshest.

    plugins: [oldest_half_policy.py]
    staleness_policy: oldest_half

A policy answers three questions: `admit` (may a group start?), `select` (which groups make the next batch?) and `evict`
(which groups are too old?). `DropPolicy` answers all of them; this one overrides `select`.
"""

import headway
from headway.flow.staleness_policies import DropPolicy


@headway.register_policy("oldest_half")
class OldestHalfPolicy(DropPolicy):
    def __init__(self, settings):
        super().__init__(settings)
        self.size = settings.groups_per_step

    def select(self, groups, snapshot):
        usable = [group for group in groups if group.is_ready and snapshot.trained - group.oldest <= snapshot.bound]
        if len(usable) < self.size:
            return None
        by_age = sorted(usable, key=lambda group: (group.oldest, group.number))
        old = by_age[: self.size // 2]
        fresh = by_age[::-1][: self.size - len(old)]
        return [*old, *fresh]
