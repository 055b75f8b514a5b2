"""Processes that begin with everything imported: forks of this one, which start in no time."""

import multiprocessing
import os
import socket
import warnings


def fork(function, *arguments):
    """Call the function in a process of its own. -> the process"""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX, which the new process does not use
        process.start()
    return process


def exit_status(process, timeout=60):
    """Wait for a process. -> its exit status, or minus the signal that ended it"""
    process.join(timeout)
    process.kill()
    process.join()
    return process.exitcode


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
    assert [exit_status(process) for process in ranks] == [0, 0]
