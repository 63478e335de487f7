"""A reward of one's own: the share of digits in the answer.

    plugins: [digit_reward.py]
    rewards: {digits: {reward_fn: share_of_digits, reward_args: {least: 1}}}

A reward function gets the text of the answer and the row of data that the prompt came from; further keyword arguments
are `reward_args`. It returns a number.
"""

import headway


@headway.register_reward("share_of_digits")
def share_of_digits(text, task_data, *, least=1):
    """Return the share of digits among the characters of an answer; 0 for answers with fewer than `least` digits."""
    digits = sum(character.isdigit() for character in text)
    return digits / len(text) if text and digits >= least else 0.0
