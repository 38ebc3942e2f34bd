"""How families write thinking and tool calls: one spec each, by the names that vLLM gives its parsers."""

from __future__ import annotations

from quire.text.regions.spec import (
    ArgumentForm,
    CallIds,
    CallSpec,
    ChannelCall,
    HeadedCall,
    History,
    Hole,
    ObjectCall,
    PythonCall,
    ReasoningSpec,
    Tags,
)

_SPECS = (
    # Qwen 2.5 and 3, Hermes, quire-mini, Granite 4
    CallSpec(
        name="hermes",
        call=ObjectCall(),
        opener="<tool_call>\n",
        closer="\n</tool_call>",
        again="\n",
        lead="\n",
    ),
    CallSpec(
        name="smollm3", call=ObjectCall(), opener="<tool_call>", closer="</tool_call>", again="\n", lead="\n"
    ),
    CallSpec(
        name="qwen3_coder",
        call=HeadedCall(
            ("<function=", Hole.NAME, ">\n"),
            "</function>\n",
            ArgumentForm.TAGS,
            Tags("<parameter=", ">\n", "\n</parameter>\n"),
        ),
        opener="<tool_call>\n",
        closer="</tool_call>",
        again="\n",
        lead="\n\n",
    ),
    CallSpec(
        name="glm45",
        call=HeadedCall(
            (Hole.NAME, "\n"),
            "</tool_call>",
            ArgumentForm.TAGS,
            Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        opener="<tool_call>",
        closer="",
        again="\n",
        lead="\n",
    ),
    CallSpec(
        name="llama3_json",
        call=ObjectCall(arguments="parameters"),
        opener="",
        closer="",
        others=("<|python_tag|>",),
        between="; ",
    ),
    CallSpec(name="pythonic", call=PythonCall(), opener="", closer=""),
    CallSpec(
        name="llama4_pythonic",
        call=PythonCall(),
        opener="",
        closer="<|python_end|>",
        others=("<|python_start|>",),
    ),
    # Gemma 3 writes a list, or one call in a block of code
    CallSpec(name="gemma3", call=PythonCall(), opener="", closer="```", others=("```tool_code",)),
    CallSpec(
        name="mistral_v3",
        call=ObjectCall(id="id", array=True),
        opener="[TOOL_CALLS] ",
        closer="",
        ids=CallIds.NINE,
    ),
    CallSpec(
        name="mistral_v11",
        call=HeadedCall((Hole.NAME, ("[CALL_ID]", Hole.ID), "[ARGS]")),
        opener="[TOOL_CALLS]",
        closer="",
        ids=CallIds.NINE,
    ),
    CallSpec(
        name="deepseek_v3",
        call=HeadedCall(
            ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", Hole.NAME, "\n```json\n"),
            "\n```<｜tool▁call▁end｜>",
        ),
        opener="<｜tool▁calls▁begin｜>",
        closer="<｜tool▁calls▁end｜>",
        between="\n",
    ),
    CallSpec(
        name="deepseek_v31",
        call=HeadedCall(("<｜tool▁call▁begin｜>", Hole.NAME, "<｜tool▁sep｜>"), "<｜tool▁call▁end｜>"),
        opener="<｜tool▁calls▁begin｜>",
        closer="<｜tool▁calls▁end｜>",
        between="",
    ),
    CallSpec(
        name="kimi_k2",
        call=HeadedCall(
            ("<|tool_call_begin|>", Hole.ID, "<|tool_call_argument_begin|>"), "<|tool_call_end|>"
        ),
        opener="<|tool_calls_section_begin|>",
        closer="<|tool_calls_section_end|>",
        between="",
        ids=CallIds.INDEXED,
    ),
    CallSpec(name="openai", call=ChannelCall(), opener="<|channel|>commentary", closer="<|call|>"),
    CallSpec(
        name="granite",
        call=ObjectCall(array=True),
        opener="<|tool_call|>",
        closer="",
        others=("<tool_call>",),
    ),
    # Phi-4-mini: its template marks calls with tokens; answers begin with a word
    CallSpec(name="phi4_mini_json", call=ObjectCall(array=True), opener="functools", closer=""),
    CallSpec(name="phi4_mini", call=ObjectCall(array=True), opener="<|tool_call|>", closer="<|/tool_call|>"),
    CallSpec(
        name="command_r",
        call=ObjectCall(
            "tool_name", "parameters", "tool_call_id", array=True, layout=("[\n    ", ",\n    ", "\n]")
        ),
        opener="<|START_ACTION|>",
        closer="<|END_ACTION|>",
    ),
)

_THINK = ReasoningSpec(name="qwen3", opener="<think>\n", closer="\n</think>\n\n")
_REASONING_SPECS = (
    _THINK,
    ReasoningSpec(name="deepseek_r1", opener="<think>\n", closer="\n</think>\n\n", history=History.NONE),
    ReasoningSpec(name="deepseek_v3", opener="<think>", closer="</think>", history=History.NONE),
    ReasoningSpec(name="glm45", opener="<think>", closer="</think>\n"),
    ReasoningSpec(name="kimi_k2", opener="<think>", closer="</think>", at_calls=True),
    ReasoningSpec(
        name="granite",
        opener="Here is my thought process:\n",
        closer="\nHere is my response:\n",
        history=History.CONTENT,
    ),
    ReasoningSpec(name="mistral", opener="[THINK]", closer="[/THINK]", history=History.CONTENT),
    ReasoningSpec(name="command_r", opener="<|START_THINKING|>", closer="<|END_THINKING|>"),
    ReasoningSpec(name="openai_gptoss", opener="<|channel|>analysis<|message|>", closer="<|end|>", channel=True),
)  # fmt: skip

CALLS = {spec.name: spec for spec in _SPECS}
REASONING = {spec.name: spec for spec in _REASONING_SPECS}
# Names of vLLM that stand for another spec of the table.
_ALIASES = {
    "granite4": "hermes",
    "qwen2": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "llama4_json": "llama3_json",
    "llama": "llama3_json",
    "gpt_oss": "openai",
    "gptoss": "openai",
    "cohere2": "command_r",
    "quire_mini": "hermes",
}
CALLS |= {alias: CALLS[name] for alias, name in _ALIASES.items()}
_REASONING_ALIASES = {
    "qwq": "qwen3",
    "smollm3": "qwen3",
    "glm4_moe": "glm45",
    "openai": "openai_gptoss",
    "magistral": "mistral",
}
REASONING |= {alias: REASONING[name] for alias, name in _REASONING_ALIASES.items()}
# A name with two forms: a token of the newer one, the newer, the older.
VARIANTS = {"mistral": ("[ARGS]", "mistral_v11", "mistral_v3")}
# What a template of a family says, the most particular first.
CALLS_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁sep｜>",)),
    ("command_r", ("<|START_ACTION|>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("glm45", ("<arg_key>",)),
    ("mistral_v11", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_v3", ("[TOOL_CALLS]",)),
    ("phi4_mini", ("<|tool_call|>", "<|/tool_call|>")),
    ("granite", ("<|tool_call|>",)),
    ("phi4_mini_json", ("functools",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("smollm3", ("xml_tools",)),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ('"parameters": ', "<|eot_id|>")),
    ("gemma3", ("tool_code",)),
    ("pythonic", ("[func_name1(",)),
)
REASONING_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>", "<|message|>")),
    ("granite", ("Here is my thought process:",)),
    ("mistral", ("[THINK]",)),
    ("command_r", ("<|START_THINKING|>",)),
    ("glm45", ("<arg_key>", "</think>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "</think>")),
    ("deepseek_v3", ("<｜Assistant｜>", "</think>")),
    ("qwen3", ("</think>",)),
)
