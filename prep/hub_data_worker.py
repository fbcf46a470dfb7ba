"""Worker: the first rows of a Hub data set, streamed into a JSONL file. Imports nothing of qserve.

job: repo, config, split, rows, out. Columns that are no text, number, list or mapping are left out.
"""

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

from datasets import load_dataset

Emit = Callable[..., None]


def main(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    stream = load_dataset(job["repo"], name=job["config"], split=job["split"], streaming=True)
    count = 0
    with open(job["out"], "w", encoding="utf-8") as file:
        for row in islice(stream, job["rows"]):
            plain = {
                key: value for key, value in row.items() if isinstance(value, str | int | float | list | dict | None)
            }
            file.write(json.dumps(plain, default=str) + "\n")
            count += 1
            if count % 1000 == 0:
                emit("layer", done=count, total=job["rows"])
    return {"rows": count}
