import { Bars } from "./bars";
import type { Overview } from "./live";
import { bytes, ms, Panel, Table } from "./panel";

/** Goodput against the levels of each class of service. */
export function Classes({ rows }: { rows: Overview["classes"] }) {
  if (rows.length === 0) return null;
  return (
    <Panel title="Service levels" note="goodput of the last minute">
      <Table
        heads={["Class", "Promises", "Goodput", "Kept now", "Missed now"]}
        rows={rows.map((one) => ({
          key: one.name,
          cells: [
            one.name,
            Object.entries(one.levels)
              .map(([name, value]) => `${name} ${ms(value)}`)
              .join(", ") || "none",
            `${one.goodput.toFixed(2)}/s`,
            one.kept,
            one.missed,
          ],
        }))}
      />
    </Panel>
  );
}

/** The memory plan, part by part. */
export function Memory({ planned }: { planned: Record<string, number> }) {
  const parts = Object.entries(planned).filter(([, value]) => value > 0);
  const sum = parts.reduce((total, [, value]) => total + value, 0);
  if (!sum) return null;
  return (
    <Panel title="Memory plan" note={`${bytes(sum)} at most`}>
      <Bars rows={parts.map(([label, value]) => ({ label, value, shown: bytes(value) }))} />
    </Panel>
  );
}

export function Adapters({ rows }: { rows: Overview["adapters"] }) {
  if (rows.length === 0) return null;
  return (
    <Panel title="Adapters">
      <Table
        heads={["Name", "Rank", "Loaded", "Gave way"]}
        rows={rows.map((one) => ({ key: one.name, cells: [one.name, one.rank, one.loads, one.evictions] }))}
      />
    </Panel>
  );
}
