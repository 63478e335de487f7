"""Tools that a policy may call, and the environment that gives them to it: see `ToolEnvironment`."""
