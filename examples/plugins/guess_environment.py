"""An environment of one's own: guess a number in a few turns.

    plugins: [guess_environment.py]
    train_env_manager: {group_size: 4, tags: [guess]}
    custom_envs: {guess: {env_type: guess_number, env_config: {most: 5}}}

`reset` returns what the policy sees first, `step` what it sees after an answer. Members of a group get the same seed.
"""

from random import Random

import headway
from headway.environments.text_environment import Reply


@headway.register_environment("guess_number")
class GuessNumber:
    instructions = "Guess my number. Answer with the number alone."
    max_steps = 3
    max_tokens = 4

    def __init__(self, most=9):
        self.most = most

    def reset(self, seed, data):
        self.secret = Random(seed).randint(1, self.most)
        return f"A number from 1 to {self.most}?"

    def step(self, action):
        if not action.strip().isdigit():
            return Reply("A number, please.", valid=False)
        right = int(action) == self.secret
        return Reply("Right." if right else "Wrong.", reward=float(right), done=right, success=right)
