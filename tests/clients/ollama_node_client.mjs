// The ollama package for JavaScript: chat and generate whole and streamed, an agent, lists.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { Ollama } from "ollama";

const client = new Ollama({ host: process.argv[2], headers: { authorization: "Bearer secret" } });
const settings = { model: "tiny", options: { temperature: 0, num_predict: 200 } };
const degrees = { Paris: 21, Rome: 34 };
const prompt = "Ada is 36 years old and has a cat named Turing.";
const said = await client.generate({ ...settings, prompt });
let text = "";
for await (const part of await client.generate({ ...settings, prompt, stream: true })) text += part.response;
assert.equal(text, said.response);
assert.deepEqual((await client.list()).models.map((model) => model.name), ["tiny"]);

const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the current weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

async function ask(stream, messages) {
  if (!stream) return (await client.chat({ ...settings, messages, tools })).message;
  const whole = { role: "assistant", content: "", tool_calls: [] };
  for await (const { message } of await client.chat({ ...settings, messages, tools, stream: true })) {
    whole.content += message.content;
    whole.tool_calls.push(...(message.tool_calls ?? []));
  }
  return whole;
}

for (const stream of [false, true]) {
  for (const content of ["What is the weather in Paris?", "What is the weather in Paris and in Rome?"]) {
    const messages = [{ role: "user", content }];
    const called = await ask(stream, messages);
    const cities = called.tool_calls.map((call) => call.function.arguments.city);
    assert.deepEqual(cities, Object.keys(degrees).filter((city) => content.includes(city)));
    messages.push(called);
    for (const city of cities) {
      const result = JSON.stringify({ temperature: degrees[city], sky: "sunny" });
      messages.push({ role: "tool", tool_name: "get_weather", content: result });
    }
    const answer = await ask(stream, messages);
    for (const city of cities) assert.ok(answer.content.includes(String(degrees[city])), answer.content);
  }
}
await assert.rejects(client.generate({ ...settings, model: "other", prompt }), /not served/);
const { version } = JSON.parse(readFileSync(new URL("node_modules/ollama/package.json", import.meta.url)));
console.log("ollama (npm)", version);
