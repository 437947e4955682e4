// All runs as a table: sorted, filtered, with chosen columns. Only the rows in view are in the page.

import { ReactWidget } from '@jupyterlab/apputils';
import { IStateDB } from '@jupyterlab/statedb';
import { LabIcon } from '@jupyterlab/ui-components';
import { Poll } from '@lumino/polling';
import * as React from 'react';

import { Api, isLive, Run, Value } from './api';
import { bytes, count, digits, duration, percent } from './format';
import { Dot, Trouble } from './panel';

const ROW_PX = 26;
const EXTRA_ROWS = 12;
const STATE_KEY = 'sgd-workbench-table:columns'; // in no tracker's namespace: a restorer removes unknown keys there
const BASE = ['status', 'label', 'problem', 'workers', 'steps', 'accuracy', 'loss', 'train_loss', 'seconds', 'created', 'run'];
const MAX_DIFFERING = 6; // settings that are shown because they differ
const TITLES: Record<string, string> = {
  status: 'state',
  label: 'algorithm',
  workers: 'ranks',
  loss: 'test loss',
  train_loss: 'training loss',
  seconds: 'training time',
  bytes_sent: 'sent',
  batch_size: 'batch size',
  algorithm: 'class',
  left_s: 'time left',
  num_steps: 'steps planned',
  run: 'name'
};
const HIDDEN = new Set(['curve', 'cell']);
const RESULTS = new Set([...BASE, 'error', 'folder', 'left_s', 'num_steps', 'samples', 'bytes_sent', 'algorithm', 'sweep', 'runtime']);

type Sort = { key: string; descending: boolean };

interface Kept {
  columns: string[] | null;
  sort: Sort;
}

export function title(key: string): string {
  return TITLES[key] ?? key.replace(/^set\./, '').replace(/_/g, ' ');
}

/** A value as it is shown. */
export function shown(key: string, value: Value): string {
  if (value === null || value === undefined) {
    return '';
  }
  if (typeof value === 'number') {
    switch (key) {
      case 'accuracy':
        return percent(value);
      case 'seconds':
      case 'left_s':
        return duration(value);
      case 'bytes_sent':
        return bytes(value);
      case 'steps':
      case 'samples':
      case 'num_steps':
        return count(value);
      default:
        return Number.isInteger(value) ? String(value) : digits(value);
    }
  }
  return key === 'created' ? String(value).slice(0, 19).replace('T', ' ') : String(value);
}

/** Rows that contain every word of the filter, in any value. */
export function filtered(rows: Run[], text: string, keys: string[]): Run[] {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) {
    return rows;
  }
  return rows.filter(row => {
    const content = keys.map(key => `${title(key)}=${shown(key, row[key])}`).join('\n').toLowerCase();
    return words.every(word => content.includes(word));
  });
}

/** Numbers before words; rows without the value last, in both directions. */
export function sorted(rows: Run[], sort: Sort): Run[] {
  const sign = sort.descending ? -1 : 1;
  const absent = (value: Value) => value === null || value === undefined || value === '';
  return [...rows].sort((one, other) => {
    const a: Value = one[sort.key];
    const b: Value = other[sort.key];
    if (absent(a) || absent(b)) {
      return Number(absent(a)) - Number(absent(b));
    }
    if (typeof a === 'number' && typeof b === 'number') {
      return sign * (a - b);
    }
    if (typeof a !== typeof b) {
      return sign * (typeof a === 'number' ? -1 : 1);
    }
    return sign * String(a).localeCompare(String(b), 'en', { numeric: true });
  });
}

/** CSV with the values as they are stored; a text that a spreadsheet would compute is quoted with '. */
export function csv(rows: Run[], columns: string[]): string {
  const cell = (value: Value) => {
    if (value === null || value === undefined) {
      return '';
    }
    const text = typeof value === 'string' && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  return [columns, ...rows.map(row => columns.map(key => row[key]))].map(line => line.map(cell).join(',')).join('\r\n') + '\r\n';
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
  private version = 0;
  private error = '';
  private loaded = false;
  private kept: Kept = { columns: null, sort: { key: 'created', descending: true } };
  private poll: Poll;

  constructor(
    private api: Api,
    private openRun: (name: string) => void,
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
      frequency: { interval: 2000, backoff: true, max: 30000 },
      name: 'workbench:run-table',
      standby: () => !this.isVisible || document.hidden
    });
    void this.begin();
  }

  dispose(): void {
    if (!this.isDisposed) {
      this.poll.dispose();
      super.dispose();
    }
  }

  private async begin(): Promise<void> {
    const kept: any = await this.state?.fetch(STATE_KEY).catch(() => null);
    if (kept?.sort?.key) {
      this.kept = { columns: Array.isArray(kept.columns) ? kept.columns : null, sort: kept.sort };
    }
    await this.poll.start();
  }

  private keep(kept: Kept): void {
    this.kept = kept;
    void this.state?.save(STATE_KEY, kept as any).catch(() => undefined);
    this.update();
  }

  private async fetch(): Promise<void> {
    try {
      let list = await this.api.runs(`after=${this.version}`);
      if (this.version && list.num_runs < this.rows.size + list.runs.filter(row => !this.rows.has(row.folder)).length) {
        list = await this.api.runs('after=0'); // a run was removed
        this.rows.clear();
      }
      list.runs.forEach(row => this.rows.set(row.folder, row));
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
        runs={[...this.rows.values()]}
        error={this.error}
        kept={this.kept}
        keep={kept => this.keep(kept)}
        openRun={this.openRun}
      />
    );
  }
}

function download(name: string, text: string): void {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], { type: 'text/csv' }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function View(props: {
  runs: Run[];
  error: string;
  kept: Kept;
  keep: (kept: Kept) => void;
  openRun: (name: string) => void;
}): JSX.Element {
  const { runs, kept } = props;
  const [text, setText] = React.useState('');
  const [top, setTop] = React.useState(0);
  const [height, setHeight] = React.useState(600);
  const [choosing, setChoosing] = React.useState(false);
  const [active, setActive] = React.useState(0);
  const box = React.useRef<HTMLDivElement>(null);
  React.useLayoutEffect(() => {
    const element = box.current;
    if (!element) {
      return;
    }
    const observer = new ResizeObserver(() => setHeight(element.clientHeight));
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
  const rows = React.useMemo(
    () => sorted(filtered(runs, text, keys), kept.sort),
    [runs, text, keys, kept.sort]
  );
  const widths = React.useMemo(
    () =>
      columns.map(key => {
        const sample = runs.slice(0, 300).map(row => shown(key, row[key]).length + (key === 'status' ? 3 : 0));
        return Math.min(340, 26 + 7 * Math.max(title(key).length + 1, ...sample));
      }),
    [columns, runs]
  );
  const first = Math.max(0, Math.floor(top / ROW_PX) - EXTRA_ROWS);
  const last = Math.min(rows.length, Math.ceil((top + height) / ROW_PX) + EXTRA_ROWS);
  const sortBy = (key: string) => {
    const number = runs.some(row => typeof row[key] === 'number');
    const descending = kept.sort.key === key ? !kept.sort.descending : number && key !== 'loss' && key !== 'train_loss';
    props.keep({ ...kept, sort: { key, descending } });
  };
  const move = (event: React.KeyboardEvent) => {
    const page = Math.max(1, Math.floor(height / ROW_PX) - 2);
    const steps: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length };
    if (event.key === 'Enter' && rows[active]) {
      props.openRun(rows[active].run);
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
  const live = rows.filter(isLive).length;
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
          {rows.length === runs.length ? '' : `${count(rows.length)} of `}
          {count(runs.length)} {runs.length === 1 ? 'run' : 'runs'}
          {live ? `, ${live} live` : ''}
        </span>
        <span className="wb-Spacer" />
        <button type="button" className="wb-Button" aria-expanded={choosing} onClick={() => setChoosing(!choosing)}>
          Columns
        </button>
        <button
          type="button"
          className="wb-Button"
          disabled={!rows.length}
          onClick={() => download('runs.csv', csv(rows, columns))}
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
        aria-label="Runs: arrow keys choose a run, Enter opens it"
        onScroll={event => setTop(event.currentTarget.scrollTop)}
        onKeyDown={move}
      >
        <table className="wb-Table" aria-rowcount={rows.length + 1} style={{ width: widths.reduce((a, b) => a + b, 0) }}>
          <colgroup>
            {columns.map((key, index) => (
              <col key={key} style={{ width: widths[index] }} />
            ))}
          </colgroup>
          <thead>
            <tr aria-rowindex={1}>
              {columns.map(key => (
                <th
                  key={key}
                  scope="col"
                  aria-sort={kept.sort.key !== key ? 'none' : kept.sort.descending ? 'descending' : 'ascending'}
                >
                  <button type="button" title={`Sort by ${title(key)}`} onClick={() => sortBy(key)}>
                    {title(key)}
                    <span aria-hidden="true">{kept.sort.key !== key ? '' : kept.sort.descending ? ' ▾' : ' ▴'}</span>
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {first > 0 && <tr style={{ height: first * ROW_PX }} aria-hidden="true" />}
            {rows.slice(first, last).map((row, index) => (
              <tr
                key={row.folder}
                aria-rowindex={first + index + 2}
                aria-selected={first + index === active}
                data-run={row.run}
                onClick={() => setActive(first + index)}
                onDoubleClick={() => props.openRun(row.run)}
              >
                {columns.map(key => {
                  const value = shown(key, row[key]);
                  return (
                    <td key={key} title={value} data-number={typeof row[key] === 'number' || undefined}>
                      {key === 'status' && <Dot state={row.status} />}
                      {key === 'label' ? (
                        <button type="button" className="wb-Link" tabIndex={-1} onClick={() => props.openRun(row.run)}>
                          {value}
                        </button>
                      ) : (
                        value
                      )}
                    </td>
                  );
                })}
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
