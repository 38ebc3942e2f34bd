/** Pictures of what the server computed: lines, bars, and places of memory. They scale values and compute nothing. */

export interface Series {
  name: string;
  x: (number | string)[];
  y: number[];
}

export interface ChartData {
  title: string;
  kind: "lines" | "bars";
  x: string;
  y: string;
  series: Series[];
  levels: [string, number][];
}

export interface CellsData {
  title: string;
  owners: number[];
  names: string[];
}

const WIDTH = 640;
const HEIGHT = 260;
const LEFT = 64;
const BOTTOM = 44;
const TOP = 20;

/** Round numbers from 0 to at least `most`, about four of them. */
export function ticks(most: number): number[] {
  if (!(most > 0)) return [0, 1];
  const rough = most / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? power;
  const count = Math.ceil(most / step - 1e-9);
  return Array.from({ length: count + 1 }, (_, i) => i * step);
}

/** A number in few characters. */
export function brief(value: number): string {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e4) return Intl.NumberFormat("en", { notation: "compact" }).format(value);
  return String(Number(value.toPrecision(3)));
}

/** How many points of a series, whose x rise, are there in a part of the time from `first` to `last`. */
export function pointsBy(x: number[], first: number, last: number, part: number): number {
  const end = first + part * (last - first);
  return part === 1 ? x.length : x.filter((one) => one <= end).length;
}

interface Looks {
  data: ChartData;
  part?: number;
  onPick?: ((name: string) => void) | undefined;
}

/** A chart; of lines only what there is after a `part` of the time. `onPick`: its bars can be pointed at. */
export function Chart({ data, part = 1, onPick }: Looks) {
  const marks = ticks(Math.max(...data.series.flatMap((one) => one.y), ...data.levels.map(([, value]) => value), 0));
  const top = marks.at(-1) ?? 1;
  const high = (value: number) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - TOP);
  return (
    <figure>
      <figcaption>{data.title}</figcaption>
      <svg
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        role={onPick ? "group" : "img"}
        aria-label={`${data.title}: ${data.y} by ${data.x}`}
      >
        {marks.map((mark) => (
          <g key={mark}>
            <line class="rule" x1={LEFT} x2={WIDTH - 8} y1={high(mark)} y2={high(mark)} />
            <text x={LEFT - 6} y={high(mark) + 4} text-anchor="end">
              {brief(mark)}
            </text>
          </g>
        ))}
        {data.kind === "lines" ? (
          <Lines data={data} high={high} part={part} />
        ) : (
          <Bars data={data} high={high} onPick={onPick} />
        )}
        {data.levels.map(([name, value]) => (
          <g key={name}>
            <line class="level" x1={LEFT} x2={WIDTH - 8} y1={high(value)} y2={high(value)} />
            <text x={WIDTH - 12} y={high(value) - 5} text-anchor="end">
              {name}: {brief(value)}
            </text>
          </g>
        ))}
        <text x={(LEFT + WIDTH) / 2} y={HEIGHT - 6} text-anchor="middle">
          {data.x}
        </text>
        <text x={14} y={HEIGHT / 2 - 20} text-anchor="middle" transform={`rotate(-90 14 ${HEIGHT / 2 - 20})`}>
          {data.y}
        </text>
      </svg>
      {data.series.length > 1 && (
        <ul class="legend">
          {data.series.map((one, i) => (
            <li key={one.name} class={`series${i}`}>
              {one.name}
            </li>
          ))}
        </ul>
      )}
    </figure>
  );
}

interface Plot {
  data: ChartData;
  high: (value: number) => number;
}

function Lines({ data, high, part }: Plot & { part: number }) {
  const xs = data.series.flatMap((one) => one.x.map(Number));
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const at = (x: number) => LEFT + ((x - first) / (last - first || 1)) * (WIDTH - LEFT - 12);
  return (
    <>
      {data.series.map((one, i) => (
        <polyline
          key={one.name}
          class={`line series${i}`}
          points={one.x
            .slice(0, pointsBy(one.x.map(Number), first, last, part))
            .map((x, k) => `${at(Number(x))},${high(one.y[k] ?? 0)}`)
            .join(" ")}
        />
      ))}
      <text x={LEFT} y={HEIGHT - 26}>
        {brief(first)}
      </text>
      <text x={WIDTH - 8} y={HEIGHT - 26} text-anchor="end">
        {brief(last)}
      </text>
    </>
  );
}

function Bars({ data, high, onPick }: Plot & Pick<Looks, "onPick">) {
  const names = data.series[0]?.x ?? [];
  const place = (WIDTH - LEFT - 8) / Math.max(1, names.length);
  const width = (place * 0.7) / data.series.length;
  const few = names.length <= 12;
  return (
    <>
      {names.map((name, k) => (
        <g key={name} {...(onPick ? pointed(String(name), onPick) : {})}>
          {onPick && <rect class="place" x={LEFT + place * k} y={TOP} width={place} height={HEIGHT - BOTTOM - TOP} />}
          {data.series.map((one, i) => {
            const y = high(one.y[k] ?? 0);
            const x = LEFT + place * k + place * 0.15 + i * width;
            return (
              <rect
                key={one.name}
                class={`bar series${i}`}
                x={x}
                y={y}
                width={width}
                height={Math.max(0, HEIGHT - BOTTOM - y)}
              >
                <title>{`${name}, ${one.name}: ${brief(one.y[k] ?? 0)} ${data.y}`}</title>
              </rect>
            );
          })}
          {few && (
            <text x={LEFT + place * (k + 0.5)} y={HEIGHT - 28} text-anchor="middle">
              {String(name).slice(0, Math.max(3, Math.floor(place / 7)))}
            </text>
          )}
        </g>
      ))}
    </>
  );
}

/** What lets a bar be chosen with the pointer or the keyboard. */
function pointed(name: string, onPick: (name: string) => void) {
  const pick = () => onPick(name);
  return { tabIndex: 0, role: "button" as const, "aria-label": name, onMouseEnter: pick, onFocus: pick, onClick: pick };
}

const ACROSS = 64;

export function Cells({ data }: { data: CellsData }) {
  const rows = Math.ceil(data.owners.length / ACROSS);
  const owner = (value: number) =>
    value === 0 ? "free" : value < 0 ? "held, unused" : (data.names[value - 1] ?? `sequence ${value}`);
  return (
    <figure>
      <figcaption>{data.title}</figcaption>
      <svg viewBox={`0 0 ${ACROSS * 10} ${rows * 10}`} role="img" aria-label={data.title}>
        {data.owners.map((value, i) => (
          <rect
            key={i}
            class={value === 0 ? "free" : value < 0 ? "unused" : `bar series${(value - 1) % 6}`}
            x={(i % ACROSS) * 10 + 1}
            y={Math.floor(i / ACROSS) * 10 + 1}
            width={8}
            height={8}
          >
            <title>{`${i}: ${owner(value)}`}</title>
          </rect>
        ))}
      </svg>
      <ul class="legend">
        <li class="free">free</li>
        {data.owners.some((value) => value < 0) && <li class="unused">held, unused</li>}
        <li class="series0">sequences</li>
      </ul>
    </figure>
  );
}
