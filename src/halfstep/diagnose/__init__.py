"""Runs a training script and finds out what a low precision does to its numbers."""

from halfstep.diagnose._examine import DEFAULT_POLICY, Examination, examine

__all__ = ["DEFAULT_POLICY", "Examination", "examine"]
