// @vitest-environment jsdom
import { expect, test } from "vitest";
import { empty, requestBody, take } from "../src/api";
import { added, begin, branch, changed, lastBelow, messages, siblings, type Turn } from "../src/conversation";
import { html } from "../src/markdown";
import { BUILT_IN, result, value } from "../src/tools";

function turn(id: string, parent: string | null, role: Turn["role"], content = id): Turn {
  return { id, parent, role, content };
}

test("an edited message begins a branch beside the old one", () => {
  let one = { ...begin(), system: "Be short." };
  for (const next of [turn("q", null, "user"), turn("a", "q", "assistant"), turn("q2", "a", "user")]) {
    one = added(one, next);
  }
  one = added(one, turn("a2", "q", "assistant"));
  expect(branch(one).map(({ id }) => id)).toEqual(["q", "a2"]);
  expect(siblings(one, turn("a2", "q", "assistant")).map(({ id }) => id)).toEqual(["a", "a2"]);
  expect(lastBelow(one, "a")).toBe("q2");
  expect(messages(one, "q").map(({ role }) => role)).toEqual(["system", "user"]);
  expect(changed(one, "a2", { content: "x" }).turns.a2?.content).toBe("x");
});

test("chunks add up to the answer", () => {
  const answer = empty();
  take(answer, { choices: [{ delta: { role: "assistant", content: "" } }] });
  take(answer, { choices: [{ delta: { reasoning_content: "hm" } }] });
  take(answer, {
    choices: [{ delta: { content: "Hi" }, logprobs: { content: [{ token: "Hi", logprob: -0.1, top_logprobs: [] }] } }],
  });
  take(answer, { choices: [{ delta: {}, finish_reason: "stop" }] });
  take(answer, {
    choices: [],
    usage: { prompt_tokens: 9, completion_tokens: 2, prompt_tokens_details: { cached_tokens: 4 } },
  });
  expect(answer).toMatchObject({ content: "Hi", reasoning: "hm", finish: "stop", promptTokens: 9, cachedTokens: 4 });
  expect(answer.tokens).toHaveLength(1);
});

test("a request has what was set and nothing else", () => {
  expect(requestBody("m", [], { temperature: 0, schema: '{"type":"object"}' })).toEqual({
    model: "m",
    messages: [],
    temperature: 0,
    stream: true,
    stream_options: { include_usage: true },
    response_format: { type: "json_schema", json_schema: { name: "answer", schema: { type: "object" } } },
  });
  expect(() => requestBody("m", [], { schema: "{" })).toThrow(SyntaxError);
});

test("calls come in pieces, and go back with their results", () => {
  const answer = empty();
  for (const piece of [
    { index: 0, id: "c1", function: { name: "calculate", arguments: "" } },
    { index: 0, function: { arguments: '{"sum": ' } },
    { index: 0, function: { arguments: '"2*(3+4)"}' } },
  ]) {
    take(answer, { choices: [{ delta: { tool_calls: [piece] } }] });
  }
  expect(answer.calls).toEqual([{ id: "c1", name: "calculate", args: '{"sum": "2*(3+4)"}' }]);
  expect(answer.calls.map(result)).toEqual(["14"]);
  let one = added(begin(), turn("q", null, "user"));
  one = added(one, { ...turn("a", "q", "assistant", ""), answer });
  one = added(one, { ...turn("r", "a", "tool", "14"), call: "c1" });
  const [, called, told] = messages(one, "r");
  expect(called).toMatchObject({ content: null, tool_calls: [{ id: "c1", function: { name: "calculate" } }] });
  expect(told).toEqual({ role: "tool", content: "14", tool_call_id: "c1" });
  const asked = requestBody("m", messages(one, "q"), { builtIn: true, mustCall: true });
  expect(asked).toMatchObject({ tools: BUILT_IN, tool_choice: "required" });
  expect(requestBody("m", messages(one, "r"), { builtIn: true, mustCall: true }).tool_choice).toBeUndefined();
});

test("the calculator takes sums and nothing else", () => {
  expect(value("-2 * (3 + 4) / 7 - 1")).toBe(-3);
  for (const text of ["", "2 +", "(1", "alert(1)", "2 3"]) expect(() => value(text)).toThrow(Error);
  expect(result({ id: "", name: "calculate", args: "{" })).toMatch(/^Error/);
  expect(result({ id: "", name: "weather", args: "{}" })).toBe("");
  expect(Number(result({ id: "", name: "dice", args: '{"sides": 6}' }))).toBeLessThanOrEqual(6);
});

test("accepted drafts are those that the server names", () => {
  const answer = empty();
  const content = ["a", "b"].map((token) => ({ token, logprob: -1, top_logprobs: [] }));
  for (const accepted_drafts of [[1], [], [4]]) {
    take(answer, { choices: [{ delta: { content: "ab" }, logprobs: { content }, accepted_drafts }] });
  }
  expect(answer.tokens.map(({ drafted }) => drafted)).toEqual([false, true, false, false, true, false]);
});

test("what a model writes cannot run or load anything", () => {
  const hostile = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "![x](https://elsewhere.example/p.png)",
    "[x](javascript:alert(1))",
    '<iframe src="https://elsewhere.example"></iframe>',
    '<a href="https://a.example" onclick="x()">a</a>',
    "<style>body{display:none}</style>",
    "<svg onload=alert(1)>",
    "<form action=https://elsewhere.example><input name=a></form>",
  ].join("\n\n");
  const made = String(html(hostile));
  expect(made).not.toMatch(/<script|<img|<iframe|<style|<svg|<form|<input|onclick|onerror|javascript:/i);
  expect(made).toContain('rel="noopener noreferrer"');
  expect(String(html("**a** `b`"))).toContain("<strong>a</strong> <code>b</code>");
});
