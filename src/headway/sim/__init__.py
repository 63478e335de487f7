"""The simulated world: a virtual clock and back ends that cost time but compute nothing."""
