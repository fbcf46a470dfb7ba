"""`qserve prep` of one variant beside a bare llm-compressor script with the same settings, in alternation.

    python tests/benchmarks/prep_overhead.py [RECIPE] --variant int8 --pairs 3

The recipe must have been prepared once, so that the model, the data and the environment are there. Each pair removes
the variant's checkpoint, times `qserve prep --only VARIANT` as a whole process, and times the bare script as a whole
process. Prints both wall times and their ratio.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from qserve.eval.compare import ratio
from qserve.machine import look
from qserve.prep.stage import ensure_data, find_prepared
from qserve.recipe import find_recipe, load_recipe
from qserve.runtimes import ensure_runtime
from qserve.workspace import open_workspace

BARE = """
import json, sys, torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer
source, ids, out, threads, count, length = sys.argv[1:7]
torch.set_num_threads(int(threads))
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
samples = json.load(open(ids))[: int(count)]
data = Dataset.from_list([{"input_ids": s, "attention_mask": [1] * len(s)} for s in samples])
modifier = GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"], actorder=None)
oneshot(model=model, dataset=data, recipe=modifier, max_seq_length=int(length), num_calibration_samples=int(count))
model.to(torch.bfloat16)
model.save_pretrained(out, save_compressed=True)
AutoTokenizer.from_pretrained(source).save_pretrained(out)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--variant", default="int8", help="a `gptq, bits: 8, activations: int8` variant")
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    recipe, space = load_recipe(find_recipe(args.recipe)), open_workspace(None)
    base, made = find_prepared(recipe, space, (args.variant,))
    ids = ensure_data(recipe, space, print) / "calibration.json"
    python = ensure_runtime("llmcompressor", look().flavour, print).python
    threads = recipe.threads or look().cores
    count = made.manifest.calibration.records if made.manifest.calibration else 0
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}

    def ours() -> None:
        shutil.rmtree(made.folder)
        words = ["prep", *([args.recipe] if args.recipe else []), "--only", args.variant]
        subprocess.run([sys.executable, "-m", "qserve.cli", *words], check=True, capture_output=True)

    def bare() -> None:
        with tempfile.TemporaryDirectory() as out:
            script = Path(out) / "bare.py"
            script.write_text(BARE)
            command = [str(python), str(script), str(base.folder), str(ids), f"{out}/made", str(threads), str(count)]
            longest = max(len(sample) for sample in json.loads(ids.read_text()))
            subprocess.run([*command, str(longest)], check=True, capture_output=True, env=env)

    times: list[tuple[float, float]] = []
    for i in range(args.pairs):
        taken = {}
        for name, run in (("ours", ours), ("bare", bare)) if i % 2 == 0 else (("bare", bare), ("ours", ours)):
            began = time.monotonic()
            run()
            taken[name] = time.monotonic() - began
        times.append((taken["ours"], taken["bare"]))
        print(f"pair {i + 1}: qserve prep {taken['ours']:.1f} s, bare script {taken['bare']:.1f} s", flush=True)
    found = ratio(list(times), higher_is_faster=False)
    if found:
        print(f"qserve / bare: {found.value:.3f} [{found.low}, {found.high}] over {found.pairs} pairs")


if __name__ == "__main__":
    main()
