"""The parts of the monitor of a training."""
