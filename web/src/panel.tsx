import type { ComponentChildren } from "preact";

/** A part of the control room under a heading; `wide` ones take a whole row. */
export function Panel({
  title,
  note,
  wide,
  children,
}: {
  title: string;
  note?: string;
  wide?: boolean;
  children: ComponentChildren;
}) {
  return (
    <section class={wide ? "panel wide" : "panel"}>
      <h2>
        {title} {note && <small>{note}</small>}
      </h2>
      {children}
    </section>
  );
}

/** Rows of texts under headings; those that end with numbers are aligned right by `numbers`. */
export function Table({ heads, rows }: { heads: string[]; rows: { key: string; cells: ComponentChildren[] }[] }) {
  return (
    <div class="scroll">
      <table>
        <thead>
          <tr>
            {heads.map((head) => (
              <th key={head} scope="col">
                {head}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map(({ key, cells }) => (
            <tr key={key}>
              {cells.map((cell, i) => (
                <td key={heads[i]} class={typeof cell === "number" ? "number" : ""}>
                  {typeof cell === "number" ? cell.toLocaleString("en") : cell}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

export function ms(value: number): string {
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 100 ? Math.round(value) : Number(value.toPrecision(2))} ms`;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value: number): string {
  const power = value < 1 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log2(value) / 10));
  return `${Number((value / 1024 ** power).toPrecision(3))} ${UNITS[power]}`;
}

export const percent = (share: number) => `${Math.round(100 * share)} %`;
