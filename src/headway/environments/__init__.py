"""Environments in which an agent acts. A single-turn verifiable task is an environment with one step.

base                    the protocol that the scheduler sees: observations in tokens
text_environment        the protocol that users implement: observations and actions as text
text_episode            turns a text environment into one that the scheduler can play
environment_registry    environments by name
local_host, worker_host where environments run: in this process, or in worker processes
library, tools          environments and tools that come with Headway
"""
