"""Runs a tree of cheap children in a process of its own: tree_main.py JSON-of-[name, [arg…]] pairs."""

import asyncio
import json
import sys
from pathlib import Path

from pdhub.api import Process
from pdhub.operate.backoff import RestartRule
from pdhub.operate.console import TreeConsole
from pdhub.operate.launcher import LocalLauncher
from pdhub.operate.member import Member
from pdhub.operate.options import LocalConfig
from pdhub.operate.up import run_tree

CHILD = Path(__file__).with_name("cheap_child.py")


def main() -> int:
    spec = json.loads(sys.argv[1])
    stages = [[_member(*item) for item in stage] for stage in spec]
    console = TreeConsole([member.name for stage in stages for member in stage], sys.stdout)

    async def work(_supervisor: object) -> None:
        console.say("all ready")
        sys.stdout.flush()

    return asyncio.run(
        run_tree(
            LocalLauncher(LocalConfig(grace_s=0.3)), stages, say=console.say, on_event=console.event,
            on_line=console.line, work=work, rule=RestartRule(first_s=0.1, give_up_after=3),
        )
    )  # fmt: skip


def _member(name: str, port: int, *words: str) -> Member:
    argv = (sys.executable, "-S", str(CHILD), str(port), *words)
    ready = Process(argv=argv, ready_url=f"http://127.0.0.1:{port}/health", ready_within_s=5.0)
    return Member(name, ready, vital=name == "router", stop_within_s=1.0)


if __name__ == "__main__":
    sys.exit(main())
