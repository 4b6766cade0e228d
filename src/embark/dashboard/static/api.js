// What the server is asked.

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok)
    throw new Error(
      answer.status === 401
        ? "The token is no longer good: open the printed address again."
        : `the server answered ${answer.status}`,
    );
  return answer.json();
}

const windowed = ({ by, low, high, points }) => {
  const query = new URLSearchParams({ by, points: String(points) });
  if (low !== undefined) query.set("from", String(low));
  if (high !== undefined) query.set("to", String(high));
  return query;
};

export const askRuns = () => ask("/api/runs");
export const askRun = (id) => ask(`/api/runs/${id}`);
export const askCharts = (id, part) => ask(`/api/runs/${id}/charts?${windowed(part)}`);
export const askDiagnosis = (id) => ask(`/api/runs/${id}/diagnosis`);
export const askTraffic = (id) => ask(`/api/runs/${id}/traffic`);
export const askLogs = (id, file, words) =>
  ask(`/api/runs/${id}/logs?${new URLSearchParams({ file: String(file), words })}`);
export const askCurves = (ids, part) => {
  const query = windowed(part);
  query.set("ids", ids.join(","));
  return ask(`/api/curves?${query}`);
};
