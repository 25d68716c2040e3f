"""The `orc` command. `orc launch` starts without the libraries of the other commands."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `orc` command of this process's arguments; ends the process with the command's exit
    code.
    """
    if sys.argv[1:2] == ["launch"] and sys.argv[2:3] not in ([], ["--help"]):
        from orchestrator.backends.local.watch import run_launch_command as launch

        sys.exit(launch(sys.argv[2:]))
    from orchestrator.cli import main as run

    run()


if __name__ == "__main__":
    main()
