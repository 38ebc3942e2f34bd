import { useEffect, useState } from "preact/hooks";
import { type ApiFailure, failure, read } from "./api";
import { Problem } from "./problem";

/** As much of a JSON schema as is shown. */
interface Schema {
  $ref?: string;
  type?: string | string[];
  description?: string;
  enum?: unknown[];
  const?: unknown;
  default?: unknown;
  properties?: Record<string, Schema>;
  required?: string[];
  items?: Schema;
  anyOf?: Schema[];
  oneOf?: Schema[];
}

interface Operation {
  summary?: string;
  tags?: string[];
  parameters?: { name: string; in: string; required?: boolean; schema?: Schema }[];
  requestBody?: { content?: Record<string, { schema?: Schema }> };
  responses?: Record<string, { description?: string; content?: Record<string, { schema?: Schema }> }>;
}

interface Api {
  info: { title: string; version: string };
  paths: Record<string, Record<string, Operation>>;
  components?: { schemas?: Record<string, Schema> };
}

interface Route {
  path: string;
  verb: string;
  operation: Operation;
}

/** The API of this server, from its own description. */
export function Reference() {
  const [api, setApi] = useState<Api | null>(null);
  const [problem, setProblem] = useState<ApiFailure | null>(null);
  const [sought, seek] = useState("");
  const get = () =>
    read<Api>("/openapi.json").then(
      (found) => {
        setApi(found);
        setProblem(null);
      },
      (error) => setProblem(failure(error)),
    );
  useEffect(() => {
    get();
  }, []);
  const routes: Route[] = Object.entries(api?.paths ?? {}).flatMap(([path, verbs]) =>
    Object.entries(verbs).map(([verb, operation]) => ({ path, verb: verb.toUpperCase(), operation })),
  );
  const word = sought.toLowerCase();
  const shown = routes.filter(({ path, operation }) => `${path} ${operation.summary}`.toLowerCase().includes(word));
  const tags = [...new Set(shown.map(({ operation }) => operation.tags?.[0] ?? "other"))];
  return (
    <div class="page">
      <nav aria-label="Parts of the API">
        <h1>
          <img src="/ui/quire.svg" alt="" width="28" height="28" /> API
        </h1>
        <a href="/">Chat</a>
        <a href="/dashboard">Control room</a>
        <label>
          Search <input type="search" value={sought} onInput={(event) => seek(event.currentTarget.value)} />
        </label>
        <ul>
          {tags.map((tag) => (
            <li key={tag}>
              <a href={`#${tag}`}>{tag}</a>
            </li>
          ))}
        </ul>
      </nav>
      <main class="reference">
        {problem && <Problem problem={problem} onTry={get} />}
        {api && (
          <p>
            {api.info.title} {api.info.version}: {routes.length} routes. The description itself is at{" "}
            <a href="/openapi.json">/openapi.json</a>.
          </p>
        )}
        {tags.map((tag) => (
          <section key={tag} id={tag}>
            <h2>{tag}</h2>
            {shown
              .filter(({ operation }) => (operation.tags?.[0] ?? "other") === tag)
              .map((route) => (
                <RouteView key={`${route.verb} ${route.path}`} route={route} schemas={api?.components?.schemas ?? {}} />
              ))}
          </section>
        ))}
      </main>
    </div>
  );
}

function RouteView({ route, schemas }: { route: Route; schemas: Record<string, Schema> }) {
  const [open, setOpen] = useState(false);
  const { path, verb, operation } = route;
  const body = content(operation.requestBody?.content);
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <b class={verb.toLowerCase()}>{verb}</b> <code>{path}</code> <span>{operation.summary}</span>
      </summary>
      {open && (
        <div class="route">
          {(operation.parameters ?? []).length > 0 && (
            <>
              <h3>Parameters</h3>
              <ul>
                {operation.parameters?.map((one) => (
                  <li key={one.name}>
                    <code>{one.name}</code> <small>{one.in}</small>
                  </li>
                ))}
              </ul>
            </>
          )}
          {body && (
            <>
              <h3>Body</h3>
              <Fields schema={body} schemas={schemas} depth={0} />
            </>
          )}
          {Object.entries(operation.responses ?? {}).map(([status, answer]) => {
            const schema = content(answer.content);
            return (
              <section key={status}>
                <h3>
                  {status} <small>{answer.description}</small>
                </h3>
                {schema && status < "300" && <Fields schema={schema} schemas={schemas} depth={0} />}
              </section>
            );
          })}
        </div>
      )}
    </details>
  );
}

const content = (of?: Record<string, { schema?: Schema }>) => Object.values(of ?? {})[0]?.schema;

function found(schema: Schema, schemas: Record<string, Schema>): Schema {
  return schema.$ref ? (schemas[schema.$ref.split("/").at(-1) ?? ""] ?? {}) : schema;
}

/** What kind of value a schema takes, in a few words. */
function kind(schema: Schema): string {
  if (schema.$ref) return schema.$ref.split("/").at(-1) ?? "";
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return several.map(kind).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.type === "array") return `array of ${kind(schema.items ?? {})}`;
  return [schema.type ?? "any value"].flat().join(" or ");
}

/** The schemas below one that have fields of their own. */
function inner(schema: Schema): Schema[] {
  if (schema.$ref) return [schema];
  return [...(schema.anyOf ?? schema.oneOf ?? []), ...(schema.items ? [schema.items] : [])].flatMap(inner);
}

const DEPTH = 4;

function Fields({ schema, schemas, depth }: { schema: Schema; schemas: Record<string, Schema>; depth: number }) {
  const whole = found(schema, schemas);
  const fields = Object.entries(whole.properties ?? {});
  if (fields.length === 0) {
    const below = inner(whole);
    if (below.length === 0 || depth > DEPTH) return <p>{kind(whole)}</p>;
    return (
      <>
        {below.map((one) => (
          <Fields key={one.$ref} schema={one} schemas={schemas} depth={depth + 1} />
        ))}
      </>
    );
  }
  return (
    <>
      {whole.description && <p>{whole.description}</p>}
      <dl>
        {fields.map(([name, field]) => (
          <div key={name}>
            <dt>
              <code>{name}</code> {whole.required?.includes(name) && <small>required</small>}
            </dt>
            <dd>
              {kind(field)}
              {field.default !== undefined && field.default !== null && (
                <small> default {JSON.stringify(field.default)}</small>
              )}
              {depth < DEPTH &&
                inner(field).map((one) => <More key={one.$ref} schema={one} schemas={schemas} depth={depth + 1} />)}
            </dd>
          </div>
        ))}
      </dl>
    </>
  );
}

/** Fields of a value inside of another, once somebody wants to see them. */
function More({ schema, schemas, depth }: { schema: Schema; schemas: Record<string, Schema>; depth: number }) {
  const [open, setOpen] = useState(false);
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{kind(schema)}</summary>
      {open && <Fields schema={schema} schemas={schemas} depth={depth} />}
    </details>
  );
}
