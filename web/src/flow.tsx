/** Places in a circle and what goes between them, as the server says it. */

export interface FlowData {
  title: string;
  places: string[];
  arrows: [number, number, string][];
  moments: [number, number][];
}

const WIDTH = 640;
const HEIGHT = 300;
const TALL = 30; // of a box
const HEAD = 8; // of an arrow
const FEW = 8; // arrows that have room for a label each

interface Point {
  x: number;
  y: number;
}

/** The last moment that has come after a part of the time, from 0 to 1; -1 for a flow without moments. */
export function momentBy(moments: [number, number][], part: number): number {
  const now = part * (moments.at(-1)?.[0] ?? 0);
  return moments.filter(([at]) => at <= now).length - 1;
}

/** From beside the edge of a box to that of another; an arrow that has one `back` lies beside that. */
export function between(from: Point, to: Point, wide: number, back: boolean): [Point, Point] {
  const length = Math.hypot(to.x - from.x, to.y - from.y) || 1;
  const [x, y] = [(to.x - from.x) / length, (to.y - from.y) / length];
  const aside = back ? { x: -y * 4, y: x * 4 } : { x: 0, y: 0 };
  /** From beside the middle of a box in a direction, so far that it is out of the box. */
  const out = (middle: Point, dx: number, dy: number): Point => {
    const reach = (half: number, by: number, d: number) => (half - by * Math.sign(d)) / Math.abs(d || 1e-9);
    const far = 5 + Math.min(reach(wide / 2, aside.x, dx), reach(TALL / 2, aside.y, dy));
    return { x: middle.x + aside.x + dx * far, y: middle.y + aside.y + dy * far };
  };
  return [out(from, x, y), out(to, -x, -y)];
}

export function Flow({ data, part }: { data: FlowData; part: number }) {
  const { title, places, arrows, moments } = data;
  const wide = Math.min(120, 1100 / places.length);
  const at = (i: number): Point => {
    const angle = (2 * Math.PI * i) / places.length - Math.PI / 2;
    return {
      x: WIDTH / 2 + (WIDTH / 2 - wide / 2 - 4) * Math.cos(angle),
      y: HEIGHT / 2 + (HEIGHT / 2 - TALL / 2 - 4) * Math.sin(angle),
    };
  };
  const moment = part < 1 ? moments[momentBy(moments, part)] : undefined;
  const labels = new Set(arrows.map(([, , label]) => label));
  const said = arrows.length === 0 ? "nothing" : labels.size === 1 && `each arrow: ${[...labels][0]}`;
  return (
    <figure>
      <figcaption>
        {title}
        {said && <small> ({said})</small>}
      </figcaption>
      <svg class="flow" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={spoken(data)}>
        {arrows.map(([a, b, label]) => {
          const back = arrows.some(([from, to]) => from === b && to === a);
          const ends = between(at(a), at(b), wide, back);
          return <Arrow key={`${a} ${b}`} ends={ends} label={arrows.length <= FEW ? label : ""} />;
        })}
        {places.map((place, i) => (
          <g key={place} class={moment?.[1] === i ? "now" : ""}>
            <rect x={at(i).x - wide / 2} y={at(i).y - TALL / 2} width={wide} height={TALL} rx="6" />
            <text x={at(i).x} y={at(i).y + 4} text-anchor="middle">
              {wide < 75 ? place.replace(/^\w+ /, "") : place}
            </text>
          </g>
        ))}
      </svg>
    </figure>
  );
}

function Arrow({ ends: [from, to], label }: { ends: [Point, Point]; label: string }) {
  const angle = Math.atan2(to.y - from.y, to.x - from.x);
  const wing = (turn: number) => `${to.x - HEAD * Math.cos(angle + turn)},${to.y - HEAD * Math.sin(angle + turn)}`;
  return (
    <g>
      <line x1={from.x} y1={from.y} x2={to.x} y2={to.y} />
      <polygon points={`${to.x},${to.y} ${wing(0.45)} ${wing(-0.45)}`} />
      {label && (
        <text class="along" x={(from.x + to.x) / 2} y={(from.y + to.y) / 2 + 4} text-anchor="middle">
          {label}
        </text>
      )}
    </g>
  );
}

/** The picture in words; of many arrows that are alike, how many there are. */
function spoken({ title, places, arrows }: FlowData): string {
  const [first] = arrows;
  if (!first) return `${title}: nothing`;
  if (arrows.length > FEW) return `${title}: ${arrows.length} arrows, each ${first[2]}`;
  return `${title}: ${arrows.map(([a, b, what]) => `${places[a]} to ${places[b]} ${what}`.trim()).join(", ")}`;
}
