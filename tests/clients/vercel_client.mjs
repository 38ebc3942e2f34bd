// The Vercel AI SDK, as its OpenAI provider and as its provider of compatible servers: objects, whole and streamed, and
// agents that call functions.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const apiKey = process.env.OPENAI_API_KEY;
const compatible = createOpenAICompatible({ name: "quire", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true });
const models = { "@ai-sdk/openai-compatible": compatible("tiny"), "@ai-sdk/openai": createOpenAI({ baseURL, apiKey }).chat("tiny") };
const settings = { temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const person = z.object({
  name: z.string().max(16),
  age: z.number().int().min(0).max(150),
  pets: z.array(z.object({ kind: z.enum(["cat", "dog"]), name: z.string().max(12) })).max(2),
});
const prompt = "Ada is 36 years old and has a cat named Turing.";
const degrees = { Paris: 21, Rome: 34 };

function agent(model, question, first) {
  const cities = [];
  const get_weather = tool({
    description: "Get the current weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      cities.push(city);
      return { temperature: degrees[city] ?? 0, sky: "sunny" };
    },
  });
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? first : "auto" });
  return { cities, asked: { model, ...settings, prompt: question, tools: { get_weather }, stopWhen: stepCountIs(4), prepareStep } };
}

function check(question, cities, steps, text) {
  assert.deepEqual(cities, Object.keys(degrees).filter((city) => question.includes(city)));
  assert.equal(steps.length, 2);
  assert.equal(steps[0].finishReason, "tool-calls");
  for (const city of cities) assert.ok(text.includes(String(degrees[city])), text);
}

for (const [name, model] of Object.entries(models)) {
  const whole = await generateObject({ model, ...settings, schema: person, prompt });
  person.parse(whole.object);
  const streamed = streamObject({ model, ...settings, schema: person, prompt });
  let last;
  for await (last of streamed.partialObjectStream);
  assert.deepEqual(last, whole.object);
  for (const [question, first] of [["What is the weather in Paris?", "required"], ["What is the weather in Paris and in Rome?", "auto"]]) {
    const one = agent(model, question, first);
    const answer = await generateText(one.asked);
    check(question, one.cities, answer.steps, answer.text);
    assert.ok(answer.totalUsage.outputTokens > 0);
    const two = agent(model, question, first);
    const stream = streamText(two.asked);
    let text = "";
    for await (const part of stream.fullStream) {
      assert.notEqual(part.type, "error", String(part.error));
      if (part.type === "tool-call") text = "";
      if (part.type === "text-delta") text += part.text;
    }
    check(question, two.cities, await stream.steps, text);
    assert.equal(text, answer.text);
  }
  const { version } = JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url)));
  console.log(name, version);
}
const { version } = JSON.parse(readFileSync(new URL("node_modules/ai/package.json", import.meta.url)));
console.log("ai", version);
