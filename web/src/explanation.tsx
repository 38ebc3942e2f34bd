import { useEffect, useState } from "preact/hooks";
import { type Explained, failure, read } from "./api";
import { Bars } from "./bars";
import { ms } from "./panel";

/** Why an answer took so long: a sentence, and the parts of its time. */
export function Explanation({ id }: { id: string }) {
  const [found, setFound] = useState<Explained | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    read<Explained>(`/v1/requests/${encodeURIComponent(id)}/explain`).then(setFound, (error) =>
      setProblem(failure(error).message),
    );
  }, [id]);
  if (problem) return <p class="error">{problem}</p>;
  if (!found) return <p class="hint">…</p>;
  const { cache } = found;
  return (
    <div class="explanation">
      <p>{found.sentence.replace(/^\S+: /, "")}</p>
      <Bars rows={found.parts.map((one) => ({ label: one.name, value: one.ms, shown: ms(one.ms), about: one.says }))} />
      {cache && (
        <p class="hint">
          Cache: {cache.hit_tokens} prompt tokens found, {cache.lost_tokens} not ({cache.kind}
          {cache.changes && `: ${cache.changes}`}).
        </p>
      )}
    </div>
  );
}
