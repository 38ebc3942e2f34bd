// The openai SDK for JavaScript: its parse, and `runTools`, which is an agent by itself, whole and streamed.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, maxRetries: 0 });
const settings = { model: "tiny", temperature: 0, max_tokens: 200 };
const degrees = { Paris: 21, Rome: 34 };
const pet = z.object({ kind: z.enum(["cat", "dog"]), name: z.string() });
const messages = [{ role: "user", content: "Ada is 36 years old and has a cat named Turing." }];
const answer = await client.chat.completions.parse({ ...settings, messages, response_format: zodResponseFormat(pet, "pet") });
pet.parse(answer.choices[0].message.parsed);

for (const stream of [false, true]) {
  for (const content of ["What is the weather in Paris?", "What is the weather in Paris and in Rome?"]) {
    const cities = [];
    const weather = zodFunction({
      name: "get_weather",
      description: "Get the current weather of a city.",
      parameters: z.object({ city: z.string() }),
      function: ({ city }) => {
        cities.push(city);
        return { temperature: degrees[city] ?? 0, sky: "sunny" };
      },
    });
    const runner = client.chat.completions.runTools({ ...settings, stream, messages: [{ role: "user", content }], tools: [weather] });
    const text = await runner.finalContent();
    assert.deepEqual(cities, Object.keys(degrees).filter((city) => content.includes(city)));
    for (const city of cities) assert.ok(text.includes(String(degrees[city])), text);
  }
}
const { version } = JSON.parse(readFileSync(new URL("node_modules/openai/package.json", import.meta.url)));
console.log("openai (npm)", version);
