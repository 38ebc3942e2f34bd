import { useEffect, useState } from "preact/hooks";
import { type ChatMessage, failure, open } from "./api";
import type { Tool } from "./tools";

interface Props {
  model: string;
  messages: ChatMessage[];
  tools: Tool[];
  cached: number;
}

/** The tokens that the model has read; those that came from the prefix cache are shaded. */
export function Prompt({ model, messages, tools, cached }: Props) {
  const [pieces, setPieces] = useState<string[]>([]);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const body = { model, messages, ...(tools.length > 0 ? { tools } : {}), return_token_strs: true };
    open("/tokenize", { method: "POST", body: JSON.stringify(body) })
      .then((response) => response.json())
      .then(
        (found) => setPieces(found.token_strs ?? []),
        (error) => setProblem(failure(error).message),
      );
  }, []);
  if (problem)
    return (
      <p class="error" role="alert">
        {problem}
      </p>
    );
  return (
    <figure class="prompt">
      <figcaption>
        {cached} of {pieces.length} tokens came from the prefix cache{cached > 0 ? "; they are shaded" : ""}.
      </figcaption>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: a text that scrolls is reached with the keyboard */}
      <section class="tokens" aria-label="Tokens of the prompt" tabIndex={0}>
        <mark>{pieces.slice(0, cached).join("")}</mark>
        {pieces.slice(cached).join("")}
      </section>
    </figure>
  );
}
