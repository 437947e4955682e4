// Rows of the run table: runs, or groups of runs that differ only in their seed.

import { Run } from './api';
import { interval, Interval, plural } from './format';

const RESULTS = ['accuracy', 'loss', 'train_loss', 'seconds', 'steps', 'bytes_sent', 'samples'];

/** A row of the table: a run, a run inside a group, or a group. */
export interface TableRow {
  key: string;
  run: Run; // of a group: the settings that its runs share, with means as results
  members: Run[];
  kind: 'run' | 'member' | 'group';
  intervals: Record<string, Interval>;
}

function alone(run: Run, kind: 'run' | 'member' = 'run'): TableRow {
  return { key: run.folder, run, members: [run], kind, intervals: {} };
}

export function runRows(runs: Run[]): TableRow[] {
  return runs.map(run => alone(run));
}

/** Groups, in the order of their first runs. A run without repetitions is a row of its own. */
export function groupRows(runs: Run[], results: string[]): TableRow[] {
  const groups = new Map<string, Run[]>();
  runs.forEach(run => {
    const key = String(run.group);
    const members = groups.get(key);
    members ? members.push(run) : groups.set(key, [run]);
  });
  return [...groups].map(([key, members]) => (members.length === 1 ? alone(members[0]) : group(key, members, results)));
}

/** The keys of results: those that every run has, and the metrics of problems. */
export function resultKeys(runs: Run[]): string[] {
  return [...new Set([...RESULTS, ...runs.flatMap(run => run.metrics ?? [])])];
}

/** Results are means over the runs that have finished. */
function group(key: string, members: Run[], results: string[]): TableRow {
  const finished = members.filter(run => run.status === 'finished');
  const run: Run = { ...members[0], run: '', created: members.map(one => String(one.created)).sort().pop() ?? null };
  const intervals: Record<string, Interval> = {};
  for (const name of results) {
    const values = finished.map(one => one[name]).filter((value): value is number => typeof value === 'number');
    run[name] = null;
    if (values.length) {
      intervals[name] = interval(values);
      run[name] = intervals[name].mean;
    }
  }
  const counts = new Map<string, number>();
  members.forEach(one => counts.set(one.status, (counts.get(one.status) ?? 0) + 1));
  run.status = [...counts]
    .sort(([a], [b]) => Number(b === 'finished') - Number(a === 'finished'))
    .map(([status, number]) => `${number} ${status}`).join(', ');
  run.seed = plural(new Set(members.map(one => one.seed)).size, 'seed');
  for (const name of ['error', 'folder', 'sweep', 'left_s']) {
    if (new Set(members.map(one => one[name])).size > 1) {
      run[name] = null;
    }
  }
  return { key: `group:${key}`, run: { ...run, folder: `group:${key}` }, members, kind: 'group', intervals };
}

/** The rows with the members of open groups below them. */
export function unfolded(rows: TableRow[], open: ReadonlySet<string>): TableRow[] {
  return rows.flatMap(row =>
    row.kind === 'group' && open.has(row.key) ? [row, ...row.members.map(one => alone(one, 'member'))] : [row]
  );
}
