"""The command line: no logic, every verb calls one function of another part."""

from pdhub.cli.app import main

__all__ = ["main"]
