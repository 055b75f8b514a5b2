"""Processes that begin with everything imported: forks of this one, which start in no time."""

import os
import socket
import time
import traceback
import warnings


def fork(function, *arguments):
    """Call the function in a process of its own. -> its id

    It ends with what the function returns or exits with (None: 0), and with 1 if the function raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX, which the new process does not use
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        status = function(*arguments) or 0
    except SystemExit as exit:
        status = exit.code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def exit_status(child, timeout=60):
    """Wait for a process. -> its exit status, or minus the signal that ended it"""
    end = time.monotonic() + timeout
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, 9)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def two_ranks(function):
    """Call function(rank) in two processes, with the environment variables of `torchrun --nproc-per-node 2`.

    The function trains once: a second process group at the same port can meet what is left of the first, and hang."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def start(rank):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
        function(rank)

    ranks = [fork(start, rank) for rank in range(2)]
    assert [exit_status(child) for child in ranks] == [0, 0]
