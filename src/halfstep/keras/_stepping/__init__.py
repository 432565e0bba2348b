"""The parts of a step under a loss scale."""
