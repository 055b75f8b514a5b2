"""Scripts in processes of their own, for the tests that kill or stop them.

They are forked from a server that has imported torch and the scripts already, so each one starts at once."""

import ast
import contextlib
import importlib
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["ppo_continuous", "ppo_discrete", "ppo_rnn", "probes", "processes"])


def start_server():
    """It only finds the scripts on the path if it is started with it."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    multiprocessing.forkserver.ensure_running()
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before


def work(function, arguments, environment, output):
    os.setsid()  # a process group of its own, as a job of a terminal
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has none
    os.environ.update(environment)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*arguments)


def run_last_block(module):
    """What `python SCRIPT.py` runs in the end: the block under `if __name__ == "__main__":`."""
    last = ast.parse(Path(module.__file__).read_text()).body[-1]
    exec(compile(ast.Module(last.body, []), module.__file__, "exec"), vars(module))


def run_main(script, flags):
    importlib.import_module("probes")
    sys.argv = [f"{script}.py", *flags]
    run_last_block(importlib.import_module(script))


STARTED = []


def kill_what_is_left():
    """After a test that failed: else pytest would wait for its processes at the end."""
    for started in STARTED:
        if started.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.kill()
            started.wait()
    STARTED.clear()


class Started:
    """A new process that calls function(*arguments), with some methods of subprocess.Popen."""

    def __init__(self, function, *arguments, environment=None):
        self.printed = tempfile.NamedTemporaryFile("r")  # noqa: SIM115  as long as this object
        start_server()
        self.process = FORKS.Process(target=work, args=(function, arguments, environment or {}, self.printed.name))
        self.process.start()
        self.pid = self.process.pid
        STARTED.append(self)

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def kill(self):
        self.process.kill()

    def wait(self, timeout=120):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise TimeoutError(f"process {self.pid} has not ended after {timeout} seconds")

    def communicate(self, timeout=120):
        """What it printed until it ended, and None, as from Popen."""
        self.wait(timeout)
        return self.printed.read(), None


def wait_for(condition, process):
    for _ in range(120 * 50):
        if result := condition():
            return result
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise TimeoutError
