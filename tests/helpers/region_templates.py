# ruff: noqa: E501
"""Small chat templates that write tool calls in the formats of families, and in formats of none."""

from __future__ import annotations

from quire.text.regions.spec import HeadedCall, Hole, ObjectCall, PythonCall


def template(calls: str, reasoning: str = "", content: str = "{{ m.content or '' }}") -> str:
    """A small template: `calls` are written where `m` calls tools."""
    thought = f"{{% if m.reasoning_content %}}{reasoning}{{% endif %}}" if reasoning else ""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{thought}{content}{{% if m.tool_calls %}}{calls}{{% endif %}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


EACH = "{% for c in m.tool_calls %}"
OBJECT = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
FAMILIES = {
    "hermes": f"{EACH}{{% if m.content or not loop.first %}}\n{{% endif %}}<tool_call>\n{OBJECT}\n</tool_call>{{% endfor %}}",
    "qwen3_coder": EACH + "\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    "glm45": EACH + "\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments | items %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "mistral_v3": "[TOOL_CALLS] [" + EACH + OBJECT + "{% if not loop.last %}, {% endif %}{% endfor %}]",
    "mistral_v11": EACH + "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
    "deepseek_v3": "<｜tool▁calls▁begin｜>" + EACH + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>" + EACH + "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
    "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|>" + EACH + "<|tool_call_begin|>functions.{{ c.function.name }}:{{ loop.index0 }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    "command_r": "<|START_ACTION|>[" + EACH + '\n    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", '
    '"parameters": {{ c.function.arguments | tojson }}}{% if not loop.last %},{% endif %}{% endfor %}\n]<|END_ACTION|>',
    "granite": "<|tool_call|>[" + EACH + OBJECT + "{% if not loop.last %}, {% endif %}{% endfor %}]",
    "phi4_mini": "<|tool_call|>[" + EACH + OBJECT + "{% if not loop.last %}, {% endif %}{% endfor %}]<|/tool_call|>",
    "openai": EACH + "<|channel|>commentary to=functions.{{ c.function.name }} <|constrain|>json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}",
}  # fmt: skip
UNKNOWN = {
    "object": ("{% for c in m.tool_calls %}[[fn]]" + OBJECT.replace("arguments\"", "args\"") + "[[/fn]]{% endfor %}", ObjectCall(arguments="args")),
    "array": ("CALL [" + EACH + OBJECT + "{% if not loop.last %}; {% endif %}{% endfor %}]".replace("; ", ", "), ObjectCall(array=True)),
    "headed": ("<CALLS>" + EACH + "<c>{{ c.function.name }}<args>{{ c.function.arguments | tojson }}</c>{% endfor %}</CALLS>",
               HeadedCall(("<c>", Hole.NAME, "<args>"), "</c>")),
    "tags": ("\n<calls>" + EACH + '\n<invoke name="{{ c.function.name }}">{% for k, v in c.function.arguments | items %}\n'
             '<p name="{{ k }}">{{ v }}</p>{% endfor %}\n</invoke>{% endfor %}\n</calls>', None),
    "python": ("<py>[" + EACH + "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}"
               "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]</py>", PythonCall()),
}  # fmt: skip


ODD = template(
    EACH
    + "{{ c.function.name | upper }}: {{ c.function.name }} {{ c.function.arguments | length }}{% endfor %}"
)
