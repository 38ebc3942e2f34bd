import { useEffect, useRef, useState } from "preact/hooks";
import type { Answer, TokenChance } from "./api";
import { html } from "./markdown";

/** Markdown, with a button on each block of code that copies it. */
export function Markdown({ text }: { text: string }) {
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const box = place.current;
    if (!box) return;
    box.innerHTML = html(text);
    for (const block of box.querySelectorAll("pre")) {
      const code = block.textContent ?? "";
      const button = document.createElement("button");
      button.type = "button";
      button.className = "copy";
      button.textContent = "Copy";
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(code);
        button.textContent = "Copied";
        setTimeout(() => {
          button.textContent = "Copy";
        }, 1500);
      });
      block.append(button);
    }
  }, [text]);
  return <div class="markdown" ref={place} />;
}

/** Tokens shaded by their chance; the alternatives of each on hover or focus. */
export function Tokens({ tokens }: { tokens: TokenChance[] }) {
  return (
    <p class="tokens">
      {tokens.map((one, i) => (
        <Token one={one} key={i} />
      ))}
    </p>
  );
}

function Token({ one }: { one: TokenChance }) {
  const [open, setOpen] = useState(false);
  const chance = Math.exp(one.logprob);
  const shade = Math.min(4, Math.floor((1 - chance) * 5));
  return (
    <button
      type="button"
      class={`token shade${shade}${one.drafted ? " drafted" : ""}`}
      aria-label={`${one.token}, ${percent(chance)}${one.drafted ? ", an accepted draft" : ""}`}
      onMouseEnter={() => setOpen(true)}
      onMouseLeave={() => setOpen(false)}
      onFocus={() => setOpen(true)}
      onBlur={() => setOpen(false)}
    >
      {one.token}
      {open && (
        <span class="alternatives" role="tooltip">
          {(one.top.length > 0 ? one.top : [one]).map((other) => (
            <span key={other.token} class={other.token === one.token ? "chosen" : ""}>
              <code>{JSON.stringify(other.token)}</code> {percent(Math.exp(other.logprob))}
            </span>
          ))}
          {one.drafted && <small>an accepted draft</small>}
        </span>
      )}
    </button>
  );
}

function percent(share: number): string {
  return `${(100 * share).toFixed(share < 0.1 ? 2 : 1)} %`;
}

/** What an answer took: tokens, time to the first, tokens a second. */
export function Figures({ answer, running }: { answer: Answer; running: boolean }) {
  const spent = answer.seconds - answer.firstToken;
  const rate = answer.outputTokens > 1 && spent > 0 ? (answer.outputTokens - 1) / spent : 0;
  const parts = [
    answer.promptTokens > 0 && `${answer.promptTokens} in`,
    answer.cachedTokens > 0 && `${answer.cachedTokens} of them cached`,
    `${answer.outputTokens} out`,
    answer.firstToken > 0 && `first token ${milliseconds(answer.firstToken)}`,
    rate > 0 && `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`,
    !running && answer.finish === "length" && "cut at the limit",
  ].filter(Boolean);
  return <p class="figures">{parts.join(" · ")}</p>;
}

function milliseconds(seconds: number): string {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`;
}
