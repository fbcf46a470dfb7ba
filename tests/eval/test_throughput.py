"""A block of load on a server that goes on working for a while after its last answer."""

import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
from fake_openai import Call, serving

from qserve.artifacts import Counters
from qserve.eval.throughput import Plan, Prompts
from qserve.recipe import Bench

SPIN = "import time\nend = time.time() + 1.5\nwhile time.time() < end: pass\nprint('done', flush=True)\ntime.sleep(60)"


async def answer(call: Call) -> None:
    await call.answer()


def test_a_block_ends_when_its_server_is_at_rest() -> None:
    bench = Bench(prompt_tokens=16, output_tokens=4, requests_per_slot=1)
    plan = Plan(bench, Prompts(np.arange(1000, dtype=np.int32), None), float("inf"))
    with serving(answer) as fake, subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        arm = SimpleNamespace(
            url=fake.url, model="fake", dialect="vllm", counters=Counters, memory_bytes=lambda: None,
            cpu_s=lambda: process.cpu_times().user,
        )  # fmt: skip
        block = plan.block(arm, plan.requests(2), 2)  # type: ignore[arg-type]
        used = process.cpu_times().user
        time.sleep(0.3)
        assert process.cpu_times().user - used < 0.1
        child.kill()
    assert [record.outcome for record in block.run.records] == ["ok", "ok"]
    assert block.run.wall_s < 1  # the wait is not counted
