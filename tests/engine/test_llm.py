"""The Python API end to end: text and ids in, text and ids out, equal to transformers where it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from helpers.tokenizers import Folder
from quire import LLM, SamplingParams
from quire.types import FinishReason, MemoryBudgetError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Folder) -> LLM:
    return LLM(checkpoint("llama3.1"), progress=False, max_model_len=200)


@pytest.mark.parametrize(
    "name",
    [
        "llama2",
        "llama3.1",
        "llama-yarn",
        "mistral-window",
        "qwen2-tied",
        "qwen2-mixed-windows",
        "qwen3",
        "mixtral",
        "gpt-oss",
    ],
)
@pytest.mark.parametrize("executor", ["native", "torch"])
def test_greedy_text_equals_transformers(checkpoint: Folder, name: str, executor: str) -> None:
    folder = checkpoint(name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = ["Hello, world", "a", "The quick brown fox jumps over"]
    with LLM(folder, executor=executor, max_num_batched_tokens=16, max_num_seqs=4, progress=False) as llm:
        outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            whole = reference.generate(
                ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        expected = whole[0, ids.shape[1] :].tolist()
        assert output.prompt_token_ids == ids[0].tolist()
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == tokenizer.decode(expected, skip_special_tokens=True)
        assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_prompts_of_both_kinds_and_one_alone(llm: LLM) -> None:
    text, ids = llm.generate(["Hi", [40, 41, 42]], GREEDY)
    assert text.prompt == "Hi"
    assert ids.prompt is None
    assert ids.prompt_token_ids == [40, 41, 42]
    assert llm.generate([40, 41, 42], GREEDY)[0].outputs == ids.outputs
    assert llm.generate("Hi", GREEDY)[0].outputs == text.outputs


def test_stream_adds_up(llm: LLM) -> None:
    (whole,) = llm.generate(["Once upon"], GREEDY)
    deltas = list(llm.stream("Once upon", GREEDY))
    assert "".join(d.text for d in deltas) == whole.outputs[0].text
    assert [t for d in deltas for t in d.token_ids] == whole.outputs[0].token_ids
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("Once upon", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.built.core.scheduler.blocks_used > 0
    stream.close()
    assert llm.built.core.scheduler.blocks_used == 0
    llm.built.core.scheduler.audit()


def test_stop_string_ends_and_is_cut(llm: LLM) -> None:
    full = llm.generate(["Once upon"], GREEDY)[0].outputs[0].text
    stop = full[5:8]
    cut = full[: full.find(stop)]
    (out,) = llm.generate(
        ["Once upon"], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop])
    )
    assert (out.outputs[0].text, out.outputs[0].finish_reason) == (cut, FinishReason.STOP)
    assert out.outputs[0].stop_reason == stop
    deltas = list(
        llm.stream("Once upon", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop]))
    )
    assert "".join(d.text for d in deltas) == cut
    assert not llm.built.core.has_work()
    kept = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, stop=[stop], include_stop_str_in_output=True
    )
    assert llm.generate(["Once upon"], kept)[0].outputs[0].text == cut + stop


def test_stop_token_and_eos(llm: LLM) -> None:
    ids = llm.generate(["Once upon"], GREEDY)[0].outputs[0].token_ids
    third = ids[2]
    first = ids.index(third)
    (out,) = llm.generate(["Once upon"], SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[third]))
    assert out.outputs[0].token_ids == ids[: first + 1]
    assert out.outputs[0].finish_reason is FinishReason.STOP
    assert out.outputs[0].stop_reason == third
    later = SamplingParams(
        temperature=0, max_tokens=24, stop_token_ids=[third], min_tokens=6, ignore_eos=True
    )
    held_back = llm.generate(["Once upon"], later)[0].outputs[0].token_ids
    assert third not in held_back[:6]


def test_samples_share_the_prompt_and_differ(llm: LLM) -> None:
    asked = SamplingParams(n=4, max_tokens=12, seed=7, temperature=1.5, ignore_eos=True)
    prompt = list(range(3, 60))
    (out,) = llm.generate([prompt], asked)
    assert [s.index for s in out.outputs] == [0, 1, 2, 3]
    assert len({tuple(s.token_ids) for s in out.outputs}) == 4
    assert out.usage.completion_tokens == 48
    assert llm.generate([prompt], asked)[0].outputs == out.outputs


def test_prompt_logprobs_equal_transformers(checkpoint: Folder, llm: LLM) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint("llama3.1"), attn_implementation="eager"
    )
    ids = list(range(5, 45))
    (out,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, logprobs=3))
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0]
    logprobs = torch.log_softmax(logits.float(), -1)
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    for i, entry in enumerate(out.prompt_logprobs[1:]):
        assert entry is not None
        chosen, *top = entry
        assert chosen.token_id == ids[i + 1]
        assert chosen.logprob == pytest.approx(float(logprobs[i, ids[i + 1]]), abs=1e-4)
        assert [t.token_id for t in top] == logprobs[i].topk(2).indices.tolist()
        assert chosen.rank == int((logprobs[i] > logprobs[i, ids[i + 1]]).sum()) + 1
    last = out.outputs[0].logprobs
    assert last is not None
    assert [t.token_id for t in last[0][1:]] == logprobs[-1].topk(3).indices.tolist()


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (out,) = llm.chat(messages, GREEDY)
    assert llm.built.model.tokenizer is not None
    assert llm.built.model.tokenizer.decode(out.prompt_token_ids) == "[user] Hi\n[assistant] "
    assert "".join(d.text for d in llm.stream_chat(messages, GREEDY)) == out.outputs[0].text


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("", GREEDY, "prompt"),
        ([], GREEDY, "prompt"),
        ([3, 128], GREEDY, "prompt_token_ids"),
        ([3, -1], GREEDY, "prompt_token_ids"),
        ([3] * 200, GREEDY, "prompt_token_ids"),
        ("x", SamplingParams(logit_bias={128: 1.0}), "logit_bias"),
        ("x", SamplingParams(banned_token_ids=list(range(128))), "banned_token_ids"),
        ("x", SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=1), "min_tokens"),
    ],
)
def test_refusals_name_the_field(
    llm: LLM, prompt: str | list[int], params: SamplingParams, field: str
) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(["fine", prompt], params)
    assert refused.value.field == field
    assert not llm.built.core.has_work()


def test_a_model_without_tokenizer_takes_ids(checkpoint: Folder, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(checkpoint("qwen3") / name)
    with LLM(tmp_path, progress=False) as llm:
        assert len(llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids) == 24
        with pytest.raises(RequestError, match="tokenizer"):
            llm.generate(["text"], GREEDY)


def test_random_weights_from_a_config_alone(checkpoint: Folder, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(checkpoint("qwen3") / "config.json")
    found = []
    for seed in (1, 1, 2):
        with LLM(tmp_path, load_format="random", seed=seed, progress=False) as llm:
            found.append(llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids)
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_int8_stays_near_the_full_weights(checkpoint: Folder) -> None:
    """Quantized weights: probabilities move a little, memory falls as planned, the torch definition agrees."""
    prompt = list(range(5, 60))
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def run(**options: object) -> tuple[list[float], LLM]:
        llm = LLM(checkpoint("llama3.1"), dtype="float32", max_model_len=200, progress=False, **options)
        (out,) = llm.generate([prompt], asked)
        assert out.prompt_logprobs is not None
        return [entry[0].logprob for entry in out.prompt_logprobs if entry], llm

    full, _ = run()
    int8, quantized = run(quantization="int8")
    part, _ = run(quantization="int8", quantize_head="none")
    reference, _ = run(quantization="int8", executor="torch")
    far = [sum(abs(a - b) for a, b in zip(full, other, strict=True)) / len(full) for other in (int8, part)]
    assert 0 < far[1] < far[0] < 0.1
    assert max(abs(a - b) for a, b in zip(int8, reference, strict=True)) < 0.1
    plan = quantized.built.plan.parts
    assert abs(quantized.built.executor.memory()["weights"] - plan["weights"]) < 4096


@pytest.mark.parametrize("options", [{}, {"quantization_group_size": 64}, {"quantize_head": "int4"}])
def test_int4_stays_near_the_full_weights(checkpoint: Folder, options: dict[str, object]) -> None:
    """As above for weights in groups, whose head is int8 unless something else is asked for."""
    prompt = list(range(5, 60))
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def run(**more: object) -> tuple[list[float], LLM]:
        llm = LLM(checkpoint("llama3.1"), dtype="float32", max_model_len=200, progress=False, **more)
        (out,) = llm.generate([prompt], asked)
        assert out.prompt_logprobs is not None
        return [entry[0].logprob for entry in out.prompt_logprobs if entry], llm

    full, _ = run()
    int4, quantized = run(quantization="int4", **options)
    reference, _ = run(quantization="int4", executor="torch", **options)
    assert (
        1e-4 < sum(abs(a - b) for a, b in zip(full, int4, strict=True)) / len(full) < 0.4
    )  # of logits a few apart
    assert max(abs(a - b) for a, b in zip(int4, reference, strict=True)) < 0.1
    built = quantized.built
    assert abs(built.executor.memory()["weights"] - built.plan.parts["weights"]) < 4096
    formats = {param.name: str(param.format) for param in built.program.params if param.kind == "linear"}
    size = options.get("quantization_group_size", 32)
    head = "i4 in groups of 32" if "quantize_head" in options else "i8 in rotated groups of 64"
    assert formats.pop("head") == head
    assert set(formats.values()) == {f"i4 in groups of {size}"}


def test_group_sizes_and_heads_that_do_not_exist_are_refused(checkpoint: Folder) -> None:
    for field, value in (
        ("quantization_group_size", 48),
        ("quantize_head", "int2"),
        ("quantization", "int5"),
    ):
        with pytest.raises(ValueError, match=f"{field}: {value!r} is not one of"):
            LLM(checkpoint("qwen3"), progress=False, **{field: value})


def test_memory_that_cannot_fit_is_refused_with_advice(checkpoint: Folder) -> None:
    with pytest.raises(MemoryBudgetError, match="max-model-len"):
        LLM(checkpoint("qwen3"), memory="1MiB", max_model_len=200, progress=False)


MEMORY_SCRIPT = """
import json, sys
from quire import LLM, SamplingParams
from quire.util.sizes import parse_size
bound = parse_size("320MiB")
with LLM(sys.argv[1], memory=bound, max_num_seqs=16, load_format="random", progress=False) as llm:
    llm.generate([[i % 100 + 3] * 900 for i in range(40)],
                 SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, repetition_penalty=1.1, ignore_eos=True))
    plan = llm.built.plan
    held = llm.built.executor.memory()
    peak = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) * 1024
    print(json.dumps({"bound": bound, "peak": peak, "sum": plan.total, "planned": plan.parts, "held": held,
                      "preempted": sum(r.preempted for r in llm.step_records())}))
"""


def test_the_memory_bound_holds(checkpoint: Folder, tmp_path: Path) -> None:
    """A process under more load than its cache can hold stays below its bound, and uses the planned memory."""
    config = json.loads((checkpoint("qwen3") / "config.json").read_text())
    config |= {
        "max_position_embeddings": 1024,
        "num_hidden_layers": 16,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    config["layer_types"] = ["full_attention"] * 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["sum"] <= found["bound"]
    assert found["peak"] <= found["bound"]
    for part in ("weights", "kv", "activations", "tables"):
        assert found["held"][part] <= found["planned"][part] + 4096, part
    assert found["planned"]["kv"] > found["bound"] // 4, (
        "the test should fill a good part of the bound with KV"
    )
