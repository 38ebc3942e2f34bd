// promptfoo: an evaluation over chats, completions and Anthropic's messages, with assertions on text and on JSON.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const url = process.argv[2];
const folder = mkdtempSync(join(tmpdir(), "promptfoo-"));
const quiet = { PROMPTFOO_CONFIG_DIR: folder, PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1" };
const fixed = { apiBaseUrl: `${url}/v1`, temperature: 0, max_tokens: 100 };
const schema = {
  type: "object", properties: { name: { type: "string", maxLength: 16 }, age: { type: "integer" } },
  required: ["name", "age"], additionalProperties: false,
};
const format = { type: "json_schema", json_schema: { name: "person", strict: true, schema } };
const config = {
  prompts: ["{{text}}"],
  providers: [
    { id: "openai:chat:tiny", label: "chat", config: fixed },
    { id: "openai:chat:tiny", label: "json", config: { ...fixed, response_format: format } },
    { id: "openai:completion:tiny", label: "text", config: fixed },
    { id: "anthropic:messages:tiny", label: "messages", config: { apiBaseUrl: url, apiKey: process.env.OPENAI_API_KEY, temperature: 0, max_tokens: 100 } },
  ],
  tests: [
    { vars: { text: "Ada is 36 years old." }, providers: ["json"], assert: [{ type: "is-json", value: schema }] },
    { vars: { text: "What is TTFT?" }, providers: ["chat", "messages", "text"], assert: [{ type: "javascript", value: "output.length > 3" }, { type: "latency", threshold: 60000 }] },
  ],
};
const [asked, said] = [join(folder, "config.json"), join(folder, "results.json")];
writeFileSync(asked, JSON.stringify(config));
const program = join("node_modules", "promptfoo", "dist", "src", "main.js");
try {
  execFileSync("node", [program, "eval", "-c", asked, "-o", said, "--no-cache", "--no-write", "--no-table", "--no-progress-bar"], {
    cwd: import.meta.dirname, env: { ...process.env, ...quiet }, stdio: "pipe",
  });
} catch (error) {
  console.log(String(error.stdout), String(error.stderr));
}
const { results } = JSON.parse(readFileSync(said, "utf8"));
const texts = Object.fromEntries(results.results.map((one) => [one.provider.label, one.response?.output]));
assert.equal(results.stats.failures + results.stats.errors, 0, JSON.stringify(results.results.map((one) => one.error)));
assert.equal(results.stats.successes, 4);
assert.equal(texts.chat, texts.messages);
console.log("promptfoo", JSON.parse(readFileSync(join(import.meta.dirname, "node_modules/promptfoo/package.json"))).version);
