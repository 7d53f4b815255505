"""Run the Python of several pages, each in a fork of a process that has the libraries imported.

``page_runner.py FILE``: a JSON list of ``[page, folder, [[text, line], …]]``; prints for each a line of JSON
with the exit status and the output.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

Parts = list[tuple[str, int]]


def read(page: str, parts: Parts) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for text, line in parts:
        # Blank lines first, so that a traceback names the line of the page.
        exec(compile("\n" * (line - 1) + text, page, "exec"), names)


def in_fork(page: str, folder: str, parts: Parts) -> tuple[int, str]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.chdir(folder)
            status = 1
            try:
                read(page, parts)
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")


if __name__ == "__main__":
    import deepspeed  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    for page, folder, parts in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        status, output = in_fork(page, folder, parts)
        print(json.dumps([page, status, output]), flush=True)
