// Rows of the run table: runs, groups of runs that differ only in their seed, and algorithms with their groups and runs.

import { Run, Value } from './api';
import { interval, plural } from './format';
import { shown, shownInterval } from './values';

const RESULTS = ['accuracy', 'loss', 'train_loss', 'seconds', 'steps', 'bytes_sent', 'samples'];
const OF_A_RUN = ['run', 'error', 'folder', 'sweep', 'left_s']; // entries that say nothing of several runs

/** A row of the table. */
export interface TableRow {
  key: string;
  kind: 'run' | 'group' | 'algorithm';
  run: Run; // of several runs: what they share, and by what they are sorted
  texts: Record<string, string>; // what is shown in place of the run's values
  members: Run[];
  below: TableRow[]; // its rows when it is unfolded
  level: number;
}

export function runRows(runs: Run[], level = 1): TableRow[] {
  return runs.map(run => ({ key: run.folder, kind: 'run', run, texts: {}, members: [run], below: [], level }));
}

/** Groups, in the order of their first runs. A run without repetitions is a row of its own. */
export function groupRows(runs: Run[], results: string[], level = 1): TableRow[] {
  return [...groupedBy(runs, run => String(run.group))].flatMap(([key, members]) =>
    members.length === 1 ? runRows(members, level) : group(key, members, results, level)
  );
}

/** Algorithms, in the order of their first rows. Their runs differ in more than the seed, so their results are ranges, not means. */
export function algorithmRows(rows: TableRow[], results: string[]): TableRow[] {
  return [...groupedBy(rows, row => String(row.run.algorithm))].map(([name, below]) => algorithm(name, below, results));
}

function groupedBy<T>(items: T[], keyOf: (item: T) => string): Map<string, T[]> {
  const found = new Map<string, T[]>();
  for (const item of items) {
    const key = keyOf(item);
    found.get(key)?.push(item) ?? found.set(key, [item]);
  }
  return found;
}

/** The keys of results: those that every run has, and the metrics of problems. */
export function resultKeys(runs: Run[]): string[] {
  return [...new Set([...RESULTS, ...runs.flatMap(run => run.metrics ?? [])])];
}

/** Results are means over the runs that have finished. */
function group(key: string, members: Run[], results: string[], level: number): TableRow {
  const row = several(`group:${key}`, 'group', members, runRows(members, level + 1), level);
  for (const name of results) {
    const values = numbers(members.filter(isFinished).map(one => one[name]));
    row.run[name] = null;
    if (values.length) {
      const mean = interval(values);
      row.run[name] = mean.mean;
      row.texts[name] = shownInterval(name, mean);
    }
  }
  return row;
}

/** Results are from the lowest to the highest of the rows below, and so are the settings in which these differ. */
function algorithm(name: string, below: TableRow[], results: string[]): TableRow {
  const members = below.flatMap(row => row.members);
  const row = several(`algorithm:${name}`, 'algorithm', members, below, 1);
  const done = below.filter(one => one.members.some(isFinished));
  const keys = new Set([...results, ...members.flatMap(one => Object.keys(one))]);
  for (const own of ['label', 'status', 'seed', 'created', ...OF_A_RUN]) {
    keys.delete(own);
  }
  for (const key of keys) {
    const values = (results.includes(key) ? done : below).map(one => one.run[key]);
    const different = [...new Set(values.filter(value => value !== null && value !== undefined))];
    row.run[key] = different.length === 1 ? different[0] : null;
    if (different.length > 1) {
      const ordered = numbers(different).sort((a, b) => a - b);
      const ends = [ordered[0], ordered[ordered.length - 1]].map(value => shown(key, value));
      row.texts[key] = ordered.length < different.length ? plural(different.length, 'value') : [...new Set(ends)].join(' to ');
    }
  }
  row.run.label = name;
  return row;
}

function several(key: string, kind: TableRow['kind'], members: Run[], below: TableRow[], level: number): TableRow {
  const created = members.map(one => String(one.created)).sort().pop() ?? null;
  const run: Run = { ...members[0], created, status: states(members) };
  run.seed = plural(new Set(members.map(one => one.seed)).size, 'seed');
  for (const name of OF_A_RUN) {
    run[name] = new Set(members.map(one => one[name])).size > 1 ? null : members[0][name];
  }
  return { key, kind, run: { ...run, run: '', folder: key }, texts: {}, members, below, level };
}

function isFinished(run: Run): boolean {
  return run.status === 'finished';
}

function numbers(values: Value[]): number[] {
  return values.filter((value): value is number => typeof value === 'number');
}

function states(runs: Run[]): string {
  return [...groupedBy(runs, run => run.status)]
    .sort(([a], [b]) => Number(b === 'finished') - Number(a === 'finished'))
    .map(([status, found]) => `${found.length} ${status}`)
    .join(', ');
}

/** The rows, with those below the open ones. */
export function unfolded(rows: TableRow[], isOpen: (row: TableRow) => boolean): TableRow[] {
  return rows.flatMap(row => (isOpen(row) ? [row, ...unfolded(row.below, isOpen)] : [row]));
}
