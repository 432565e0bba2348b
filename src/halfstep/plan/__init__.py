"""Finds the policy under which an unmodified script trains fastest on this machine."""

from halfstep.plan._find import Wanted, find

__all__ = ["Wanted", "find"]
