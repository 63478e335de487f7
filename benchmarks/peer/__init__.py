"""Parts of the benchmarks against other systems.

work            what everyone has to do: prompts, groups, lengths, the model
contestants     how each of them is told, and what it reports: TRL, Headway
processes       runs a command and watches the memory of its whole tree
trl_grpo        runs inside TRL's environment; imports nothing of Headway
reward          the reward, the same function for everyone
"""
