import { useState } from "preact/hooks";
import { type Call, result } from "./tools";

/** Calls of an answer. With `onResults` their results are asked for; those of built-in tools are there at once. */
export function Calls({ calls, onResults }: { calls: Call[]; onResults: ((results: string[]) => void) | null }) {
  const [results, setResults] = useState<string[] | null>(null);
  const shown = results ?? calls.map(result);
  const put = (at: number, text: string) => setResults(shown.map((one, i) => (i === at ? text : one)));
  return (
    <form
      class="calls"
      onSubmit={(event) => {
        event.preventDefault();
        onResults?.(shown);
      }}
    >
      {calls.map((call, at) => (
        <div key={call.id}>
          <code>
            {call.name}({call.args})
          </code>
          {onResults && (
            <label>
              Result of {call.name}
              <textarea rows={1} value={shown[at]} onInput={(event) => put(at, event.currentTarget.value)} />
            </label>
          )}
        </div>
      ))}
      {onResults && (
        <button type="submit" class="primary">
          Send the results
        </button>
      )}
    </form>
  );
}
