"""``python -m agl_demo.tether PARENT COMMAND...``: run a command that does not outlive its parent.

The kernel sends SIGTERM to the process when its parent dies, by whatever means. The wish survives
the exec, so that the command itself need not know.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to the one that started it, and become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent has ended")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
