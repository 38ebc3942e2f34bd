// The anthropic SDK for JavaScript: messages whole and streamed, counts, agents.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "secret", maxRetries: 0 });
const settings = { model: "tiny", max_tokens: 200, temperature: 0 };
const degrees = { Paris: 21, Rome: 34 };
const tools = [
  {
    name: "get_weather",
    description: "Get the current weather of a city.",
    input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
];
const first = [{ role: "user", content: "Ada is 36 years old and has a cat named Turing." }];
const counted = await client.messages.countTokens({ model: "tiny", messages: first });
const { usage } = await client.messages.create({ ...settings, messages: first });
assert.equal(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens);

async function ask(stream, body) {
  if (!stream) return client.messages.create(body);
  let text = "";
  const events = client.messages.stream(body).on("text", (piece) => (text += piece));
  const message = await events.finalMessage();
  assert.equal(text, message.content.filter((block) => block.type === "text").map((block) => block.text).join(""));
  return message;
}

for (const stream of [false, true]) {
  for (const content of ["What is the weather in Paris?", "What is the weather in Paris and in Rome?"]) {
    const messages = [{ role: "user", content }];
    const called = await ask(stream, { ...settings, messages, tools });
    assert.equal(called.stop_reason, "tool_use");
    const calls = called.content.filter((block) => block.type === "tool_use");
    assert.deepEqual(calls.map((call) => call.input.city), Object.keys(degrees).filter((city) => content.includes(city)));
    messages.push({ role: "assistant", content: called.content });
    const results = calls.map((call) => ({
      type: "tool_result",
      tool_use_id: call.id,
      content: JSON.stringify({ temperature: degrees[call.input.city], sky: "sunny" }),
    }));
    messages.push({ role: "user", content: results });
    const answer = await ask(stream, { ...settings, messages, tools });
    for (const call of calls) assert.ok(answer.content[0].text.includes(String(degrees[call.input.city])), answer.content[0].text);
  }
}
await assert.rejects(client.messages.create({ ...settings, model: "other", messages: first }), Anthropic.NotFoundError);
const { version } = JSON.parse(readFileSync(new URL("node_modules/@anthropic-ai/sdk/package.json", import.meta.url)));
console.log("@anthropic-ai/sdk (npm)", version);
