"""The frame every worker runs in: `python worker.py WORKER.py JOB.json RESULT.json`.

Run by file path with a runtime's own Python, so it imports nothing of qserve. It loads the worker file, calls its
`main(job, emit)`, and writes what that returns to RESULT.json. `emit(event, **fields)` sends progress as one JSON line.
Whatever else the libraries print goes to stderr, which is the log.
"""

import json
import os
import runpy
import sys
import traceback


def run(worker_path: str, job_path: str, result_path: str) -> int:
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a library that prints must not break the protocol

    def emit(event: str, **fields: object) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")
        events.flush()

    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    try:
        result = runpy.run_path(worker_path)["main"](job, emit)
    except BaseException as error:
        traceback.print_exc()
        text = (str(error).strip().splitlines() or [""])[0]
        emit("error", type=type(error).__name__, message=text)
        return 1
    with open(result_path + ".partial", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(result_path + ".partial", result_path)
    return 0


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:4]))
