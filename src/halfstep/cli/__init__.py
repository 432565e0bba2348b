"""The command line."""

from halfstep.cli._app import main

__all__ = ["main"]
