import "./explanation.css";

/** Rows of a name, a bar and a number, the largest first. */
export function Bars({ rows }: { rows: { label: string; value: number; shown: string; about?: string }[] }) {
  const top = Math.max(...rows.map((one) => one.value)) || 1;
  return (
    <dl class="bars">
      {[...rows]
        .sort((a, b) => b.value - a.value)
        .map((one) => (
          <div key={one.label} title={one.about}>
            <dt>{one.label}</dt>
            <dd>
              <meter min="0" max={top} value={one.value} aria-label={one.label} /> <span>{one.shown}</span>
            </dd>
          </div>
        ))}
    </dl>
  );
}
