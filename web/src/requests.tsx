import { useState } from "preact/hooks";
import { failure, open } from "./api";
import { Explanation } from "./explanation";
import type { Moment, RequestRow } from "./live";
import { ms, Panel, Table } from "./panel";

/** The requests in progress by status, class and client, and one by one. */
export function Requests({ rows }: { rows: RequestRow[] }) {
  const [problem, setProblem] = useState("");
  const end = (id: string) =>
    open(`/v1/requests/${encodeURIComponent(id)}`, { method: "DELETE" }).then(
      () => setProblem(""),
      (error) => setProblem(failure(error).message),
    );
  const groups = [...grouped(rows, "service_class"), ...grouped(rows, "tenant")];
  return (
    <Panel title="Requests" note={rows.length ? `${rows.length} in progress` : "none in progress"} wide>
      {groups.length > 0 && (
        <ul class="legend">
          {groups.map(({ name, running, waiting }) => (
            <li key={name} class="bare">
              {name}: {running} running, {waiting} waiting
            </li>
          ))}
        </ul>
      )}
      <p class="error" role="alert">
        {problem}
      </p>
      {rows.length > 0 && (
        <Table
          heads={["Request", "Status", "Class", "Age", "First token", "Prompt", "Cached", "Output", "Of", ""]}
          rows={rows.slice(0, 20).map((one) => ({
            key: one.id,
            cells: [
              <code key="id">{one.id.slice(-12)}</code>,
              one.status,
              one.service_class ?? "",
              ms(1000 * one.age),
              one.ttft === null ? "" : ms(1000 * one.ttft),
              one.prompt_tokens,
              one.cached_tokens,
              one.completion_tokens,
              one.max_tokens ?? "",
              <button key="end" type="button" class="quiet" aria-label={`End ${one.id}`} onClick={() => end(one.id)}>
                End
              </button>,
            ],
          }))}
        />
      )}
    </Panel>
  );
}

function grouped(rows: RequestRow[], by: "service_class" | "tenant") {
  const names = [...new Set(rows.map((one) => one[by]))].filter((one): one is string => !!one);
  return names.map((name) => {
    const of = rows.filter((one) => one[by] === name);
    const running = of.filter((one) => one.status === "running").length;
    return { name, running, waiting: of.length - running };
  });
}

/** The slowest of the latest requests; where the time went, on demand. */
export function Slowest({ rows }: { rows: Moment["slowest"] }) {
  const [asked, ask] = useState("");
  return (
    <Panel title="Slowest answers" note="of the latest ones">
      {rows.length === 0 ? (
        <p class="hint">No answer has ended.</p>
      ) : (
        <ul class="slowest">
          {rows.map((one) => (
            <li key={one.id}>
              <button
                type="button"
                aria-expanded={asked === one.id}
                onClick={() => ask(asked === one.id ? "" : one.id)}
              >
                <code>{one.id.slice(-12)}</code> <strong>{ms(one.ms)}</strong>
                <time dateTime={new Date(1000 * one.ended).toISOString()}>
                  {new Date(1000 * one.ended).toLocaleTimeString()}
                </time>
              </button>
              {asked === one.id && <Explanation id={one.id} />}
            </li>
          ))}
        </ul>
      )}
    </Panel>
  );
}
