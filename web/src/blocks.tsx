import type { ComponentChildren } from "preact";

/** A part of a line, or a block, as the server reads Markdown. Nothing in it is HTML. */
export interface Node {
  kind: string;
  text?: string;
  source?: string;
  href?: string;
  inline?: Node[];
  level?: number;
  ordered?: boolean;
  language?: string;
  items?: Node[][];
  head?: Node[][];
  rows?: Node[][][];
}

/** Parts of a line. A number says where it comes from. */
export function Inline({ nodes = [] }: { nodes?: Node[] | undefined }) {
  return (
    <>
      {nodes.map((node, at) => (
        <Part key={at} node={node} />
      ))}
    </>
  );
}

function Part({ node }: { node: Node }): ComponentChildren {
  const { kind, text, inline } = node;
  if (kind === "strong")
    return (
      <strong>
        <Inline nodes={inline} />
      </strong>
    );
  if (kind === "emphasis")
    return (
      <em>
        <Inline nodes={inline} />
      </em>
    );
  if (kind === "code") return <code>{text}</code>;
  if (kind === "number")
    return (
      <span class="number" title={node.source}>
        {text}
      </span>
    );
  if (kind === "link" && /^[#/]/.test(node.href ?? ""))
    return (
      <a href={node.href}>
        <Inline nodes={inline} />
      </a>
    );
  if (kind === "link" && node.href?.startsWith("https://"))
    return (
      <a href={node.href} target="_blank" rel="noreferrer">
        <Inline nodes={inline} />
      </a>
    );
  if (kind === "link")
    return (
      <span title={`docs/${node.href}`}>
        <Inline nodes={inline} />
      </span>
    );
  return inline ? <Inline nodes={inline} /> : text;
}

/** A block of plain Markdown; null for another kind. */
export function Block({ node }: { node: Node }) {
  const { kind, inline } = node;
  if (kind === "heading")
    return (
      <h3>
        <Inline nodes={inline} />
      </h3>
    );
  if (kind === "paragraph")
    return (
      <p>
        <Inline nodes={inline} />
      </p>
    );
  if (kind === "fence")
    return (
      // biome-ignore lint/a11y/noNoninteractiveTabindex: code that scrolls is reached with the keyboard
      <pre tabIndex={0}>
        <code>{node.text}</code>
      </pre>
    );
  if (kind === "list") {
    const items = (node.items ?? []).map((item, at) => (
      <li key={at}>
        <Inline nodes={item} />
      </li>
    ));
    return node.ordered ? <ol>{items}</ol> : <ul>{items}</ul>;
  }
  if (kind === "table")
    return (
      <Rows
        heads={(node.head ?? []).map((cell) => inlineOf(cell))}
        rows={(node.rows ?? []).map((row) => row.map((cell) => inlineOf(cell)))}
      />
    );
  return null;
}

const inlineOf = (nodes: Node[]) => <Inline nodes={nodes} />;

/** A table that scrolls by itself where it is too wide. */
export function Rows({
  heads,
  rows,
  label = "Table",
}: {
  heads: ComponentChildren[];
  rows: ComponentChildren[][];
  label?: string;
}) {
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: a table that scrolls is reached with the keyboard
    <section class="wide" aria-label={label} tabIndex={0}>
      <table>
        <thead>
          <tr>
            {heads.map((head, at) => (
              <th key={at} scope="col">
                {head}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row, at) => (
            <tr key={at}>
              {row.map((cell, column) => (
                <td key={column}>{cell}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

export function Blocks({ nodes }: { nodes: Node[] }) {
  return (
    <>
      {nodes.map((node, at) => (
        <Block key={at} node={node} />
      ))}
    </>
  );
}

/** The numbers below some nodes: each source once, with the first number that it gave. */
export function sources(nodes: unknown): Map<string, string> {
  const found = new Map<string, string>();
  const look = (value: unknown): void => {
    if (Array.isArray(value)) value.forEach(look);
    else if (value && typeof value === "object") {
      const { source, text } = value as Node;
      if (source && text && !found.has(source)) found.set(source, text);
      Object.values(value).forEach(look);
    }
  };
  look(nodes);
  return found;
}
