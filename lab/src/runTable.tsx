// All runs as a table: sorted, filtered, grouped, with chosen columns. Only the rows in view are in the page.

import { ReactWidget } from '@jupyterlab/apputils';
import { IStateDB } from '@jupyterlab/statedb';
import { LabIcon } from '@jupyterlab/ui-components';
import { Poll } from '@lumino/polling';
import * as React from 'react';

import { Api, isLive, onReconnect, Run } from './api';
import { csv, download } from './files';
import { count, plural } from './format';
import { MAX_MS } from './model';
import { Dot, Trouble } from './panel';
import { algorithmRows, groupRows, resultKeys, runRows, TableRow, unfolded } from './runGroups';
import { Sort, sorted, SortHead } from './sorting';
import { shown, title } from './values';

const ROW_PX = 26;
const EXTRA_ROWS = 12;
const FOLD_PX = 12;
const BOX_PX = 30;
const FIRST_SHARE = 0.5; // of the width, for the column that does not scroll
const STATE_KEY = 'sgd-workbench-table:columns'; // in no tracker's namespace: a restorer removes unknown keys there
const BASE = ['label', 'status', 'problem', 'workers', 'steps', 'accuracy', 'loss', 'train_loss', 'seconds', 'created', 'run'];
const MAX_DIFFERING = 6; // settings that are shown because they differ
const HIDDEN = new Set(['curve', 'cell', 'group', 'metrics']);
const RESULTS = new Set([...BASE, 'error', 'folder', 'left_s', 'num_steps', 'samples', 'bytes_sent', 'algorithm', 'sweep', 'runtime']);

type Groups = 'none' | 'seeds' | 'algorithms';
const GROUPS: [Groups, string][] = [['none', 'none'], ['seeds', 'seeds'], ['algorithms', 'algorithms']];

interface Kept {
  columns: string[] | null;
  sort: Sort;
  groups: Groups;
}

const contents = new WeakMap<Run, string>(); // a row that changed is another object

function contentOf(row: Run): string {
  let content = contents.get(row);
  if (content === undefined) {
    content = Object.keys(row)
      .filter(key => !HIDDEN.has(key))
      .map(key => `${title(key)}=${shown(key, row[key])}`)
      .join('\n')
      .toLowerCase();
    contents.set(row, content);
  }
  return content;
}

/** Rows that contain every word of the filter, in any value. */
export function filtered(rows: Run[], text: string): Run[] {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return words.length ? rows.filter(row => words.every(word => contentOf(row).includes(word))) : rows;
}

/** The columns to show when none were chosen: the base, and settings in which the runs differ. */
function usual(rows: Run[], keys: string[]): string[] {
  const base = BASE.filter(key => rows.some(row => row[key] !== null && row[key] !== undefined));
  const differing = keys
    .filter(key => !RESULTS.has(key))
    .filter(key => new Set(rows.map(row => row[key]).filter(value => value !== null && value !== undefined)).size > 1)
    .sort((a, b) => Number(b === 'lr') - Number(a === 'lr'))
    .slice(0, MAX_DIFFERING);
  const place = base.indexOf('workers') + 1;
  return [...base.slice(0, place), ...differing, ...base.slice(place)];
}

export class RunTable extends ReactWidget {
  private rows = new Map<string, Run>();
  private list: Run[] = []; // of `rows`; another one only when a row changed
  private version = 0;
  private error = '';
  private loaded = false;
  private chosen: ReadonlySet<string> = new Set(); // folders of the runs to compare
  private kept: Kept = { columns: null, sort: { key: 'created', descending: true }, groups: 'none' };
  private poll: Poll;
  private disconnect: () => void;

  constructor(
    private api: Api,
    private openRun: (name: string) => void,
    private compare: (names: string[]) => void,
    private state: IStateDB | null,
    icon: LabIcon
  ) {
    super();
    this.addClass('wb-Pane');
    this.addClass('wb-TablePane');
    this.title.label = 'Runs';
    this.title.caption = 'Workbench: run table';
    this.title.icon = icon;
    this.title.closable = true;
    this.poll = new Poll({
      auto: false,
      factory: () => this.fetch(),
      frequency: { interval: 2000, backoff: true, max: MAX_MS },
      name: 'workbench:run-table',
      standby: () => !this.isVisible || document.hidden
    });
    this.disconnect = onReconnect(() => this.isVisible && void this.poll.refresh().catch(() => undefined));
    void this.begin();
  }

  dispose(): void {
    if (!this.isDisposed) {
      this.disconnect();
      this.poll.dispose();
      super.dispose();
    }
  }

  private async begin(): Promise<void> {
    const kept: any = await this.state?.fetch(STATE_KEY).catch(() => null);
    if (kept?.sort?.key) {
      const columns = Array.isArray(kept.columns) ? kept.columns : null;
      const groups = GROUPS.some(([name]) => name === kept.groups) ? kept.groups : 'none';
      this.kept = { columns, sort: kept.sort, groups };
    }
    await this.poll.start();
  }

  /** Choose the runs to compare, by their folders. */
  private choose(chosen: ReadonlySet<string>): void {
    this.chosen = chosen;
    this.update();
  }

  /** Choose one more run to compare. */
  add(folder: string): void {
    this.choose(new Set([...this.chosen, folder]));
  }

  private keep(kept: Kept): void {
    this.kept = kept;
    void this.state?.save(STATE_KEY, kept as any).catch(() => undefined);
    this.update();
  }

  private async fetch(): Promise<void> {
    try {
      let list = await this.api.runs(`after=${this.version}`);
      let removed = false;
      if (this.version && list.num_runs < this.rows.size + list.runs.filter(row => !this.rows.has(row.folder)).length) {
        list = await this.api.runs('after=0'); // a run was removed
        this.rows.clear();
        removed = true;
      }
      list.runs.forEach(row => this.rows.set(row.folder, row));
      if (removed || list.runs.length) {
        this.list = [...this.rows.values()];
      }
      this.version = list.version;
      this.loaded = true;
      this.error = '';
    } catch (error) {
      this.error = (error as Error).message;
      throw error; // the poll backs off
    } finally {
      this.update();
    }
  }

  protected render(): JSX.Element {
    if (this.error && !this.loaded) {
      return <Trouble text={this.error} />;
    }
    if (!this.loaded) {
      return <div className="wb-Empty">Reading the runs…</div>;
    }
    return (
      <View
        runs={this.list}
        error={this.error}
        kept={this.kept}
        keep={kept => this.keep(kept)}
        chosen={this.chosen}
        setChosen={chosen => this.choose(chosen)}
        openRun={this.openRun}
        compare={this.compare}
      />
    );
  }
}

function cellText(row: TableRow, key: string): string {
  return row.texts[key] ?? shown(key, row.run[key]);
}

/** About how many letters wide a cell is, with its dot or its fold. */
function spaceOf(row: TableRow, key: string): number {
  const more = key === 'status' ? 3 : key === 'label' ? 3 * row.level : 0;
  return cellText(row, key).length * (row.kind === 'algorithm' ? 1.15 : 1) + more; // bold
}

const Cell = React.memo(function Cell(props: {
  name: string;
  row: TableRow;
  open: boolean;
  act: (row: TableRow) => void;
}): JSX.Element {
  const { name, row } = props;
  const text = cellText(row, name);
  return (
    <td title={text} data-number={typeof row.run[name] === 'number' || undefined}>
      {name === 'status' && row.kind === 'run' && <Dot state={row.run.status} />}
      {name !== 'label' ? (
        text
      ) : (
        <button
          type="button"
          className="wb-Link"
          tabIndex={-1}
          aria-expanded={row.below.length ? props.open : undefined}
          style={{ paddingLeft: FOLD_PX * (row.level - 1) }}
          onClick={() => props.act(row)}
        >
          {row.below.length > 0 && <span className="wb-Fold">{props.open ? '▾' : '▸'}</span>}
          {text}
        </button>
      )}
    </td>
  );
});

function View(props: {
  runs: Run[];
  error: string;
  kept: Kept;
  keep: (kept: Kept) => void;
  chosen: ReadonlySet<string>;
  setChosen: (chosen: ReadonlySet<string>) => void;
  openRun: (name: string) => void;
  compare: (names: string[]) => void;
}): JSX.Element {
  const { runs, kept, chosen, setChosen } = props;
  const [text, setText] = React.useState('');
  const [top, setTop] = React.useState(0);
  const [size, setSize] = React.useState({ width: 1000, height: 600 });
  const [choosing, setChoosing] = React.useState(false);
  const [active, setActive] = React.useState(0);
  const [turned, setTurned] = React.useState<ReadonlySet<string>>(new Set()); // rows that were unfolded; algorithms that were folded
  const box = React.useRef<HTMLDivElement>(null);
  React.useLayoutEffect(() => {
    const element = box.current;
    if (!element) {
      return;
    }
    const observer = new ResizeObserver(() => setSize({ width: element.clientWidth, height: element.clientHeight }));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  const keys = React.useMemo(() => {
    const found = new Set<string>();
    runs.forEach(row => Object.keys(row).forEach(key => found.add(key)));
    HIDDEN.forEach(key => found.delete(key));
    return [...found].sort((a, b) => title(a).localeCompare(title(b)));
  }, [runs]);
  const columns = React.useMemo(
    () => kept.columns?.filter(key => keys.includes(key)) ?? usual(runs, keys),
    [kept.columns, keys, runs]
  );
  const found = React.useMemo(() => filtered(runs, text), [runs, text]);
  const results = React.useMemo(() => resultKeys(runs), [runs]);
  const folded = React.useMemo(() => {
    const level = kept.groups === 'algorithms' ? 2 : 1;
    const inOrder = sorted(found, kept.sort, (run, key) => run[key]);
    const rows = kept.groups === 'none' ? runRows(inOrder) : groupRows(inOrder, results, level);
    const sortedRows = sorted(rows, kept.sort, (row, key) => row.run[key]);
    return level === 1 ? sortedRows : algorithmRows(sortedRows, results);
  }, [found, results, kept.groups, kept.sort]);
  const isOpen = (row: TableRow) => turned.has(row.key) !== (row.kind === 'algorithm');
  const rows = React.useMemo(() => unfolded(folded, isOpen), [folded, turned]);
  const compared = React.useMemo(() => runs.filter(row => chosen.has(row.folder)).map(row => row.run), [runs, chosen]);
  const widths = React.useMemo(
    () =>
      columns.map(key => {
        const sample = unfolded(folded, () => true).slice(0, 300).map(row => spaceOf(row, key));
        const wanted = Math.min(340, 26 + 7 * Math.max(title(key).length + 1, ...sample));
        return key === columns[0] ? Math.min(wanted, FIRST_SHARE * size.width) : wanted;
      }),
    [columns, folded, size.width]
  );
  const choose = (row: TableRow) => {
    const next = new Set(chosen);
    const all = row.members.every(one => next.has(one.folder));
    row.members.forEach(one => (all ? next.delete(one.folder) : next.add(one.folder)));
    setChosen(next);
  };
  const turn = (row: TableRow) => {
    const next = new Set(turned);
    next.delete(row.key) || next.add(row.key);
    setTurned(next);
  };
  const act = (row: TableRow) => (row.kind === 'run' ? props.openRun(row.run.run) : turn(row));
  const first = Math.max(0, Math.floor(top / ROW_PX) - EXTRA_ROWS);
  const last = Math.min(rows.length, Math.ceil((top + size.height) / ROW_PX) + EXTRA_ROWS);
  const sortBy = (key: string) => {
    const number = runs.some(row => typeof row[key] === 'number');
    const descending = kept.sort.key === key ? !kept.sort.descending : number && key !== 'loss' && key !== 'train_loss';
    props.keep({ ...kept, sort: { key, descending } });
  };
  const move = (event: React.KeyboardEvent) => {
    const page = Math.max(1, Math.floor(size.height / ROW_PX) - 2);
    const steps: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length };
    if (event.target !== event.currentTarget) {
      return; // of a button or a box in the table
    }
    if (event.key === 'Enter' && rows[active]) {
      act(rows[active]);
    } else if (event.key === ' ' && rows[active]) {
      event.preventDefault();
      choose(rows[active]);
    } else if (event.key in steps) {
      event.preventDefault();
      const next = Math.min(rows.length - 1, Math.max(0, active + steps[event.key]));
      setActive(next);
      const element = box.current;
      if (element) {
        const place = next * ROW_PX;
        if (place < element.scrollTop) {
          element.scrollTop = place;
        } else if (place + 3 * ROW_PX > element.scrollTop + element.clientHeight) {
          element.scrollTop = place + 3 * ROW_PX - element.clientHeight;
        }
      }
    }
  };
  const live = found.filter(isLive).length;
  return (
    <>
      <div className="wb-Bar">
        <input
          className="wb-Filter"
          type="search"
          placeholder="Filter, such as pipesgd lr=0.1"
          aria-label="Filter the runs"
          value={text}
          onChange={event => {
            setText(event.target.value);
            setActive(0);
            if (box.current) {
              box.current.scrollTop = 0;
            }
          }}
        />
        <span className="wb-Quiet" role="status">
          {found.length === runs.length ? '' : `${count(found.length)} of `}
          {plural(runs.length, 'run')}
          {kept.groups === 'seeds' ? ` in ${plural(folded.length, 'row')}` : ''}
          {kept.groups === 'algorithms' ? ` of ${plural(folded.length, 'algorithm')}` : ''}
          {live ? `, ${live} live` : ''}
        </span>
        <span className="wb-Spacer" />
        <button
          type="button"
          className="wb-Button"
          disabled={!compared.length}
          title="Curves of the chosen runs on the same axes; choose runs with the boxes at the left"
          onClick={() => props.compare(compared)}
        >
          {compared.length ? `Compare ${compared.length}` : 'Compare'}
        </button>
        {chosen.size > 0 && (
          <button type="button" className="wb-Button" onClick={() => setChosen(new Set())}>
            Choose none
          </button>
        )}
        <label
          className="wb-Quiet"
          title="Seeds: means of finished runs that differ only in their seed, with 95 % intervals. Algorithms: a heading above these, with the lowest and the highest value"
        >
          groups{' '}
          <select value={kept.groups} onChange={event => props.keep({ ...kept, groups: event.target.value as Groups })}>
            {GROUPS.map(([name, text]) => (
              <option key={name} value={name}>
                {text}
              </option>
            ))}
          </select>
        </label>
        <button type="button" className="wb-Button" aria-expanded={choosing} onClick={() => setChoosing(!choosing)}>
          Columns
        </button>
        <button
          type="button"
          className="wb-Button"
          disabled={!rows.length}
          onClick={() => {
            const members = folded.flatMap(row => row.members);
            download('runs.csv', csv([columns, ...members.map(run => columns.map(key => run[key]))]));
          }}
        >
          Export CSV
        </button>
      </div>
      {choosing && (
        <div className="wb-Columns" role="group" aria-label="Columns">
          {keys.map(key => (
            <label key={key} title={key}>
              <input
                type="checkbox"
                checked={columns.includes(key)}
                onChange={event =>
                  props.keep({
                    ...kept,
                    columns: event.target.checked ? [...columns, key] : columns.filter(one => one !== key)
                  })
                }
              />
              {title(key)}
            </label>
          ))}
          <button type="button" className="wb-Button" onClick={() => props.keep({ ...kept, columns: null })}>
            Usual columns
          </button>
        </div>
      )}
      {props.error && <Trouble text={props.error} />}
      <div
        className="wb-TableBox"
        ref={box}
        tabIndex={0}
        aria-label="Runs: arrow keys move, Enter opens a run or a group, Space chooses it for a comparison"
        onScroll={event => setTop(event.currentTarget.scrollTop)}
        onKeyDown={move}
      >
        <table className="wb-Table wb-Runs" aria-rowcount={rows.length + 1} style={{ width: widths.reduce((a, b) => a + b, BOX_PX) }}>
          <colgroup>
            <col style={{ width: BOX_PX }} />
            {columns.map((key, index) => (
              <col key={key} style={{ width: widths[index] }} />
            ))}
          </colgroup>
          <thead>
            <tr aria-rowindex={1}>
              <th aria-label="chosen" />
              {columns.map(key => (
                <SortHead key={key} name={key} sort={kept.sort} sortBy={sortBy} />
              ))}
            </tr>
          </thead>
          <tbody>
            {first > 0 && <tr style={{ height: first * ROW_PX }} aria-hidden="true" />}
            {rows.slice(first, last).map((row, index) => (
              <tr
                key={row.key}
                aria-rowindex={first + index + 2}
                aria-selected={first + index === active}
                aria-level={row.level}
                data-run={row.run.run || undefined}
                data-group={row.kind === 'group' ? row.members.length : undefined}
                data-algorithm={row.kind === 'algorithm' ? row.run.label : undefined}
                onClick={() => setActive(first + index)}
                onDoubleClick={() => act(row)}
              >
                <td className="wb-Choice">
                  <input
                    type="checkbox"
                    tabIndex={-1}
                    aria-label={`Choose ${row.run.run || row.run.label}`}
                    checked={row.members.every(one => chosen.has(one.folder))}
                    onChange={() => choose(row)}
                  />
                </td>
                {columns.map(key => (
                  <Cell key={key} name={key} row={row} open={isOpen(row)} act={act} />
                ))}
              </tr>
            ))}
            {last < rows.length && <tr style={{ height: (rows.length - last) * ROW_PX }} aria-hidden="true" />}
          </tbody>
        </table>
        {!rows.length && (
          <div className="wb-Empty">
            {runs.length ? 'No run contains these words.' : 'No run yet: train in a notebook, or with workbench train.'}
          </div>
        )}
      </div>
    </>
  );
}
