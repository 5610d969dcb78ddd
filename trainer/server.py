"""The engine's process: SkyRL's standalone vLLM server, started as `python -m trainer.server`.

Only what has to happen inside the process is here: it ends with its launcher, even before vLLM is loaded (afterwards
the engine's plugin watches in every process of it), and it listens on a socket that the launcher bound, so that the
port cannot be taken in between. The arguments are vLLM's. The handle on the launcher's side is `trainer.engine`.

Source: skyrl 0.4.0 `inference_servers/vllm_server_actor.py:main`. Departure: the socket comes from outside.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

LAUNCHER = "INKLING_RL_LAUNCHER_PID"
SOCKET = "INKLING_RL_SERVER_FD"
POLL_SECONDS = 1.0


def end_with_launcher() -> None:
    """From now on, when the launcher is gone, this process group is ended within about a second."""
    launcher = int(os.environ[LAUNCHER])

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(POLL_SECONDS)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until ended. `arguments` are vLLM's command line."""
    end_with_launcher()
    from skyrl.backends.skyrl_train.inference_servers import vllm_server_actor

    descriptor = int(os.environ.pop(SOCKET))
    os.set_inheritable(descriptor, False)
    listener = socket.socket(fileno=descriptor)
    assert hasattr(vllm_server_actor, "create_server_socket"), "skyrl's server changed; see trainer.server"
    vllm_server_actor.create_server_socket = lambda address, reuse_port=False: listener
    vllm_server_actor.main(list(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    main()
