"""A session of ssh that hands its stdin, stdout and stderr to the agent, then waits for the end.

The process that the session is for is the agent's child, so that the agent knows its id, its
exit and all that it starts; the bytes go straight between it and ssh. Arguments: the agent's
folder and the number of the order. On the standard library alone, because it must start quickly.
"""

from __future__ import annotations

import os
import socket
import sys

SOCKET = "agent"


def main() -> None:
    """Hand over and wait until the agent lets go, which it does when the process has ended."""
    os.chdir(sys.argv[1])  # the path of a socket is short, that of a folder may be long
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.connect(SOCKET)
        socket.send_fds(agent, [sys.argv[2].encode()], [0, 1, 2])
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        agent.recv(1)


if __name__ == "__main__":
    main()
