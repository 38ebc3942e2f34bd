import type { Model } from "./api";
import { bytes, Panel, Table } from "./panel";

/** The models of a server with several: whether they are loaded, and the memory that they have, borrow and lend. */
export function Models({ all }: { all: Model[] }) {
  const several = all.filter((one) => one.state !== undefined && !one.parent);
  if (several.length === 0) return null;
  return (
    <Panel title="Models">
      <Table
        heads={["Name", "State", "Share", "Borrowed", "Lent"]}
        rows={several.map((one) => ({
          key: one.id,
          cells: [
            one.id,
            one.state ?? "",
            bytes(one.memory ?? 0),
            one.borrowed ? bytes(one.borrowed) : "",
            one.lent ? bytes(one.lent) : "",
          ],
        }))}
      />
    </Panel>
  );
}
