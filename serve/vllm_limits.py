"""What the locked vLLM (0.32) cannot do on a machine, each in a sentence, known before it is started."""

from typing import assert_never

from qserve.artifacts import Machine
from qserve.recipe import Serving, StartQuantization
from qserve.variants import Awq, Bf16, Bitsandbytes, Fp8, Gguf, Gptq, Mxfp4, Nvfp4, Rtn, Variant


def too_few_gpus(serving: Serving, machine: Machine) -> str | None:
    """Why the parallel sizes do not fit; None where they do. A CPU has NUMA nodes instead of GPUs, and what Ray has is
    not seen from here."""
    needed = serving.tensor_parallel * serving.pipeline_parallel * serving.data_parallel
    if machine.flavour == "cuda" and serving.executor != "ray" and needed > len(machine.gpus):
        return (
            f"tensor x pipeline x data parallel asks for {needed} GPUs, and this machine shows {len(machine.gpus)}; "
            "lower them in serving, or set serving.executor: ray for GPUs of several machines"
        )
    return None


def unquantizable(asked: StartQuantization | None, machine: Machine) -> str | None:
    """Why the locked vLLM (0.32) cannot do this at start-up on this machine; None where it can, or nothing is asked."""
    cpu = machine.flavour == "cpu"
    match asked:
        case "int8":
            return (
                "vLLM quantizes only the experts of a model to int8 at start-up; "
                "make a variant instead: {method: rtn, bits: 8, activations: int8}"
            )
        case "bitsandbytes":
            return "vLLM has no bitsandbytes any more; use serving.quantization: fp8_per_channel, or make a variant"
        case "fp8" if cpu:
            return "vLLM has no CPU kernel for one FP8 scale a tensor; use serving.quantization: fp8_per_channel"
        case "fp8_per_block" if cpu and "amx_tile" not in machine.isa:
            return "vLLM needs AMX for FP8 blocks on a CPU; use serving.quantization: fp8_per_channel"
        case None | "fp8" | "fp8_per_channel" | "fp8_per_block":
            return None
    assert_never(asked)


def unservable(variant: Variant, machine: Machine) -> str | None:
    """Why the locked vLLM has no kernel for this format on this machine; None where it has one."""
    x86_without_avx512 = machine.flavour == "cpu" and "avx2" in machine.isa and "avx512f" not in machine.isa
    match variant:
        case Awq() | Gptq(activations="none") | Rtn(activations="none") if x86_without_avx512:
            return (
                "vLLM's build for CPUs without AVX-512 has no kernel for 4-bit weights; serve it on a GPU or on a CPU "
                "with AVX-512"
            )
        case Gptq(activations="none", bits=8) | Rtn(activations="none", bits=8) if machine.flavour == "cpu":
            return "vLLM's CPU kernel takes 4-bit weights only; use bits: 4, or activations: int8"
        case Gguf():
            return "vLLM's builds here read no GGUF files; use --engine llama-server"
        case Bitsandbytes():
            return "vLLM reads no bitsandbytes checkpoint any more; serve it with --engine transformers"
        case Nvfp4() | Mxfp4() if machine.flavour == "cpu":
            return "vLLM has no CPU kernel for FP4; serve it on a GPU (compute capability 10.0 computes in it)"
        case Fp8(kv_cache=True) if x86_without_avx512:
            return "vLLM's FP8 KV cache needs AVX-512 on a CPU; leave kv_cache out, or serve it on a GPU"
        case Fp8(kv_cache=True) if machine.gpu_capability is not None and float(machine.gpu_capability) < 8.9:
            return "an FP8 KV cache needs a GPU with FP8 arithmetic (compute capability 8.9); leave kv_cache out"
        case Fp8(activations="block") if machine.flavour == "cpu" and "amx_tile" not in machine.isa:
            return "vLLM's CPU kernel for FP8 in blocks needs AMX; use activations: dynamic, or serve it on a GPU"
        case Bf16() | Awq() | Gptq() | Fp8() | Rtn() | Nvfp4() | Mxfp4():
            return None
    assert_never(variant)
