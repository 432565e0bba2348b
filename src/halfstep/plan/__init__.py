"""Finds the policy under which an unmodified script trains fastest on this machine."""

from halfstep.plan._find import Wanted, Watcher, find

__all__ = ["Wanted", "Watcher", "find"]
