"""Tools that a policy may call, and the environment that offers them: see `ToolEnvironment`."""
