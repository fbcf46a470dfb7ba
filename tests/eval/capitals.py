"""A small task of multiple choice, in lm-evaluation-harness's own format, with its data beside it."""

import json
from pathlib import Path

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Spain": "Madrid", "Russia": "Moscow",
    "Greece": "Athens", "Norway": "Oslo", "Cuba": "Havana", "Peru": "Lima", "Austria": "Vienna", "Iraq": "Baghdad",
    "Kenya": "Nairobi", "China": "Beijing", "Poland": "Warsaw", "Portugal": "Lisbon", "Ireland": "Dublin",
    "Hungary": "Budapest", "Turkey": "Ankara", "Finland": "Helsinki",
}  # fmt: skip
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {name}.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: What is the capital of {{{{country}}}}?\\nAnswer:"
doc_to_target: answer
doc_to_choice: choices
num_fewshot: {shots}
metric_list:
  - {{metric: {metric}, aggregation: mean, higher_is_better: true}}
"""


def items() -> list[dict[str, object]]:
    """Each country with its capital and three others."""
    cities = list(CAPITALS.values())
    made: list[dict[str, object]] = []
    for i, (country, city) in enumerate(CAPITALS.items()):
        choices = [cities[(i + step) % len(cities)] for step in (3, 7, 11)]
        choices.insert(i % 4, city)
        made.append({"country": country, "choices": choices, "answer": i % 4})
    return made


def write_task(folder: Path, name: str = "capitals", shots: int = 0, metric: str = "acc") -> Path:
    """NAME.yaml and NAME.jsonl in the folder; returns the former."""
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items()))
    path = folder / f"{name}.yaml"
    path.write_text(TASK.format(name=name, shots=shots, metric=metric))
    return path


def prompt(item: dict[str, object]) -> str:
    return f"Question: What is the capital of {item['country']}?\nAnswer:"
