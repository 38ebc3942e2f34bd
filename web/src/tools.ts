/** A function that a model may call, as the API takes it. */
export interface Tool {
  type: "function";
  function: { name: string; description?: string; parameters?: Record<string, unknown> };
}

/** A call that a model has written; `args` is its JSON. */
export interface Call {
  id: string;
  name: string;
  args: string;
}

const tool = (name: string, description: string, properties: Record<string, unknown>): Tool => ({
  type: "function",
  function: {
    name,
    description,
    parameters: { type: "object", properties, required: Object.keys(properties), additionalProperties: false },
  },
});

/** Tools whose results the page makes itself. */
export const BUILT_IN: Tool[] = [
  tool("clock", "The date and the time.", {}),
  tool("dice", "A throw of a die.", { sides: { type: "integer", minimum: 2, maximum: 1000 } }),
  tool("calculate", "The value of a sum, such as 2 * (3 + 4).", { sum: { type: "string", maxLength: 200 } }),
];

/** What a built-in tool says to a call; "" for another tool, whose result somebody has to write. */
export function result({ name, args }: Call): string {
  try {
    const given = JSON.parse(args || "{}");
    if (name === "clock") return new Date().toString();
    if (name === "dice")
      return String(1 + ((crypto.getRandomValues(new Uint32Array(1))[0] ?? 0) % Number(given.sides)));
    if (name === "calculate") return String(value(String(given.sum)));
  } catch (error) {
    return `Error: ${error instanceof Error ? error.message : error}`;
  }
  return "";
}

/** The value of a sum of numbers with + - * / and brackets. Raises Error for anything else. */
export function value(text: string): number {
  const parts = text.match(/\d+(\.\d+)?|[^\s\d]/g) ?? [];
  let at = 0;
  const operand = (): number => {
    const part = parts[at++];
    if (part === "-") return -operand();
    if (part === "(") {
      const inner = sum();
      if (parts[at++] !== ")") throw new Error("a bracket is not closed");
      return inner;
    }
    if (part === undefined || !/^\d/.test(part)) throw new Error(`${part ?? "the end"} where a number should be`);
    return Number(part);
  };
  const product = (): number => {
    let found = operand();
    while (parts[at] === "*" || parts[at] === "/") found = parts[at++] === "*" ? found * operand() : found / operand();
    return found;
  };
  const sum = (): number => {
    let found = product();
    while (parts[at] === "+" || parts[at] === "-") found = parts[at++] === "+" ? found + product() : found - product();
    return found;
  };
  const found = sum();
  if (at < parts.length) throw new Error(`${parts[at]} where the sum should end`);
  return found;
}
