"""The components and their plugin module pass the conformance kits."""

from stratagem_testing import CheckpointIOConformance, PluginConformance, StrategyConformance


class TestOneBit(StrategyConformance):
    strategy = "onebit"
    equal_to_single_device = False  # each element of a step is a sign


class TestOneBitWarm(StrategyConformance):
    strategy = "onebit_warm"


class TestSqlite(CheckpointIOConformance):
    checkpoint_io = "sqlite"


class TestPlugin(PluginConformance):
    plugin = "stratagem-onebit"
