"""A program that runs the command line in forked children: imports are paid once, each run is a process of its own.

    python fork_server.py      orders come as JSON lines on standard input, answers go to standard output

An order is {"main": "module:function", "argv": [...], "env": {...}, "log": path}; the answers are {"pid": n} at the start
and {"code": status} at the end, -9 after a SIGKILL. Children are forked before jax starts its threads.
"""

import json
import os
import sys
import traceback
import warnings
from importlib import import_module
from typing import Any

from rljax import chat, cli, convert, evaluate, loop  # noqa: F401 (imported once, for all children)


def run_child(order: dict[str, Any], answers: int) -> None:
    """Run one order in this process and end it."""
    os.close(answers)
    os.environ.update(order["env"])
    output = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(number, target)
    code = 1
    try:
        module, function = order["main"].split(":")
        code = getattr(import_module(module), function)(order["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Serve orders until standard input ends."""
    warnings.filterwarnings("ignore", message=".*fork", category=RuntimeWarning)
    answers = os.dup(1)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            run_child(order, answers)
        os.write(answers, json.dumps({"pid": child}).encode() + b"\n")
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(answers, json.dumps({"code": code}).encode() + b"\n")


if __name__ == "__main__":
    main()
